"""`outrider bench`: measures the speed of running servers under load."""
