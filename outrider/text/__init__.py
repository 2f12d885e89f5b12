"""Conversion of text to token ids and back. Never imports torch."""
