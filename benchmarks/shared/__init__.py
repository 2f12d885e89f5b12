"""Shared pieces: a pair of workers, the choice of models, the machine's description, charts, a slow network."""
