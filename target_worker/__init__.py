"""The target worker: a complete continuous-batching generation server that also accepts hints.

Reading order: `scheduling` (the life of a session, pure), `hints` (which hints a step verifies, pure), `runner` (one
step on the model), `serving` (gRPC).
"""
