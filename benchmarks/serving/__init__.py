"""The whole system behind its HTTP API, under load and with long prompts."""
