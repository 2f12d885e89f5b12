"""OpenAI's Files and Batches APIs: bodies, answers and their documentation. Pure.

`batch_body` has what clients send, `batch_answers` what they get, `paths` the calls. The handlers are in
`coordinator.api.http`, the batches themselves in `coordinator.batches`.
"""
