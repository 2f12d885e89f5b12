"""The memory worker: a draft worker without a model, whose hints are what followed the same tokens in other sequences.

Reading order: `token_memory` (remembered tokens by scope, pure), `guesses` (the tree that they suggest, pure),
`scheduler` (sessions: commits in, hints out, pure), `options` (settings), `__main__` (the process; attachments, streams
and gRPC are those of every draft worker: `draft_worker.attachments`, `draft_worker.links` and `draft_worker.server`).
"""
