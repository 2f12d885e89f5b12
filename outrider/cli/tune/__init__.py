"""`outrider tune`: what speculation will gain for a pair of models on this machine, before anything is served."""
