"""The target worker: a complete continuous-batching generation server that also listens to hints.

Read `scheduler` first (what happens to a session, pure), then `runner` (one step on the model), `server` (gRPC).
"""
