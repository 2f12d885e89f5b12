"""Stands in for `python -m target_worker`."""

from fake_service import run

run("target")
