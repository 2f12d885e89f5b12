"""The draft worker: rides ahead of target workers and streams hints to them.

Read `session` first (one hint tree and its cursor, pure), then `scheduler` (whose nodes to expand next, pure),
`runner` (one step on the model), `links` (streams to target workers) and `server` (gRPC).
"""
