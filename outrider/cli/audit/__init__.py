"""`outrider audit`: does speculation change what a running server says?"""
