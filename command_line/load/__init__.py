"""Load generator: sends requests at a given rate or concurrency and measures every answer.

`prompts` chooses what is sent and `load` when; `requests`, `stream` and `transport` send one request and read its
answer; `servers` asks what is served; `summary` adds up.
"""
