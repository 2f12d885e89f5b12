"""Reads checkpoints and builds engines: formats, memory, fingerprints, a self-test before serving."""
