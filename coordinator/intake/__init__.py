"""Turns a request of an API into one that can be scheduled: checked, tokenized, seeded, identified.

`generation_request` has the types. `preparation` does the work; long work runs in the threads of `worker_threads`.
`closed_schema` and `held_tools` rewrite JSON schemas; the latter loosens those that a grammar does not hold, by what
`loosening` has.
"""
