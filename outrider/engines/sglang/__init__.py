"""Hints of draft workers in SGLang: `worker.HintWorker`, registered by `plugin` as the speculative algorithm OUTRIDER.

In reading order: `contract` (everything of SGLang that this relies on), `checks`, `requests`, `batches` (which hints a
decode batch verifies; knows no SGLang), `worker`, `algorithm`, `plugin`.
"""
