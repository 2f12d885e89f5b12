"""Processes of one machine: children under a supervisor, an embedded Redis server, free ports."""
