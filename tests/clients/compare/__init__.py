"""Comparison of this server's HTTP answers with vLLM's: `python -m tests.clients.compare`."""
