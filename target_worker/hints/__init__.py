"""Hints of a target worker's steps, from all their sources. Pure.

`hint_path` collects candidates from draft workers, from `lookup` and from the grammar. What other engines need as well,
how many of them to verify and whether they pay at all, is in `outrider.hints`.
"""
