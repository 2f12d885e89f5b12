"""The scheduler of a target worker: events in, actions and steps out. Pure.

Reading order: `scheduler` is the entry; `session` is one sequence and the only place where its committed tokens grow;
`batch_slots` assigns batch slots and KV blocks; `waiting` waits for hints and `step_composition` builds the next step;
`forecast` estimates when a slot becomes free.
"""
