"""Decides whether speculation pays for a request.

`fallback` has the states of one request and their transition table, `priors` the evidence of earlier requests,
`acceptance_watch` finds draft workers whose hints are never accepted, `prior_store` shares priors between replicas.
"""
