"""`outrider simulate`: predicts what a fleet does under load."""
