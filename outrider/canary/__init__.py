"""A canary: a share of traffic with other speculation settings, measured beside the rest, promoted or ended by rule.

Reading order: `plan` (what is tried and who gets it), `statistics` (sums of its outcomes), `intervals` (their
confidence), `rule` (the verdict), `store` (Redis, for the coordinator's replicas and for `outrider canary`).
"""
