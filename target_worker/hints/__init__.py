"""Hints on a target worker: which of them a step verifies, how long it waits for them, and what that costs. Pure.

`hint_path` collects candidates from draft workers, from `lookup` and from the grammar; `speculation` chooses how many
to verify; `hint_intake` decides whether hints of draft workers pay at all; `step_cost` and `pace` learn what steps
cost.
"""
