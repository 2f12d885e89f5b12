"""Shared parts of both worker processes: `worker_main` starts and serves one; the model's thread, ranks, settings."""
