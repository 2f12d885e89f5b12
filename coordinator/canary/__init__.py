"""Runs a canary in one coordinator: assigns requests to arms, observes and audits them, synchronizes replicas.

`outrider.canary` has the plan, the rule and the statistics, which `outrider canary` reads too.
"""
