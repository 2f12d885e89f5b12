"""Chooses the workers of a request, and reserves their slots.

`routing` ranks workers, `fair_queue` orders those that wait, `slot_search` finds what fits, `reservations` takes
slots in Redis, and `admission` runs the queue of one replica.
"""
