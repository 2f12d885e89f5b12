"""`outrider canary`: tests another speculation setting on a share of the traffic."""
