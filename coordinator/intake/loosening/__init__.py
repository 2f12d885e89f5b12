"""Looser JSON schemas for tools whose own no grammar holds. Pure."""
