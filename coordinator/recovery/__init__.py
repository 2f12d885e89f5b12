"""How a request survives the loss of its target, its replica or its connection, and the bounds of what that costs.

`journal` stores shown tokens in Redis, `resumption` finds where a client stopped reading, `poison` recognizes requests
that bring targets down, and `loss_exchange` shares losses between replicas.
"""
