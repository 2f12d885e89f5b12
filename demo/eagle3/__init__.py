"""An EAGLE-3 head for the demo's target: training, measurement, and a twin for the grown target.

head        the network, and rows that feed each other
__main__    training, `python -m demo.eagle3`
evaluate    how often it is right where the target's features are late
grow        the same guesses beside a grown target
"""
