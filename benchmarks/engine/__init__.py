"""Kernels and steps of the engine alone, without messages."""
