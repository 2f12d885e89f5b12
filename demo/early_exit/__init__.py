"""A copy of the demo's target whose first layers guess what all of its layers say.

__main__    training, `python -m demo.early_exit`
evaluate    how often the first layers agree with all of them
"""
