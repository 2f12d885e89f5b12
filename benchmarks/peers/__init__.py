"""Outrider beside other ways to speculate, on the same weights in one run: `python -m benchmarks.peers --help`."""
