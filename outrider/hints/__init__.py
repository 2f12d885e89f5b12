"""Hints: a draft worker's guesses of the next tokens.

`hint_tree` stores them below the committed tokens, `hint_wire` is their wire format, `confidence` and `acceptance`
learn how often they are accepted.
"""
