"""Stands in for `python -m draft_worker`."""

from fake_service import run

run("draft")
