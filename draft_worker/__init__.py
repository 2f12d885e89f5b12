"""The draft worker: drafts tokens ahead of the target workers and streams them as hints.

Reading order: `session` (one hint tree and its cursor, pure), `attachments` (whom the worker follows, pure),
`scheduler` (chooses the nodes to expand next, pure), `step_items` (what a step feeds of them), `runner` (one step on
the model), `links` (streams to target workers), `server` (gRPC). `memory` is a worker without a model.
"""
