"""Chooses the workers of a request, and reserves their slots.

`routing` ranks workers, `fair_queue` orders those that wait, `slot_search` finds what fits and `lanes` leave out what
does not, `slot_queue` puts them together, `reservations` takes slots in Redis, and `admission` runs the queues of one
replica.
"""
