"""Outrider beside other engines with the same weights."""
