"""JSON schemas of every kind that requests bring, and a random walk through what they permit."""
