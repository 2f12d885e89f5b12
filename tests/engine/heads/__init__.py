"""Draft heads: published formats are read, and computed as the code of those who defined them computes them."""
