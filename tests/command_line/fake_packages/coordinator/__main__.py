"""Stands in for `python -m coordinator`."""

from fake_service import run

run("coordinator")
