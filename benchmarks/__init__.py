"""Every number that the README states, reproducible."""
