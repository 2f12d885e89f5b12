"""Writes the bodies of OpenAI-compatible responses, whole or streamed. Pure: no sockets, no clocks."""
