"""Writes the generated pages of `docs/reference` from the code: `python -m docs.generate`.

`command_line` documents the `outrider` command, `settings` the flags of the three processes, `http` the HTTP API and
its parameters, `grpc` the messages of `protos/`, `metrics` what the processes export. Each has a function that
returns one page. `tests/docs/test_reference.py` compares the committed pages with what these functions return.
"""
