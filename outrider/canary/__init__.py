"""A canary: a share of traffic decoded in another way, measured beside the rest, promoted or taken back by rule.

`plan` says what is tried and who gets it, `statistics` adds up what came of it, `intervals` how sure that is, `rule`
draws the verdict, and `store` keeps all of it in Redis for the replicas of the coordinator and for `outrider canary`.
"""
