"""Hints: a draft worker's guesses of the next tokens.

`hint_tree` stores them below the committed tokens, `hint_wire` is their wire format, `confidence` and `acceptance`
learn how often they are accepted. Whoever verifies them decides with `speculation` how many, and with `hint_intake`
whether they pay at all; `step_cost` and `pace` learn what steps cost.
"""
