"""A whole installation on one machine, under load, while everything in it is replaced."""
