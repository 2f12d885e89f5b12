"""`outrider tune`: predicts what speculation gains for a pair of models on this machine."""
