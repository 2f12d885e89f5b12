"""`outrider audit`: checks that speculation does not change a running server's output."""
