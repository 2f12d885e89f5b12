"""`outrider canary`: tries another way of speculating on a share of the traffic, and says what came of it."""
