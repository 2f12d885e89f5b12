"""`outrider batch`: runs files of requests at a server in its spare capacity."""
