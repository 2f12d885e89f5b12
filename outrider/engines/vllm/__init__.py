"""Hints of draft workers in vLLM: `scheduler.HintScheduler`, with `no_drafts.NoDrafts` as its speculative method.

`contract` names everything of vLLM that this relies on.
"""
