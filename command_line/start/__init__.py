"""Starts a whole system on this machine: `outrider serve` and `outrider demo`, and everything they check and plan
first.
"""
