"""`outrider simulate`: what a fleet will do, before it is bought."""
