"""The way from committed tokens to the client: text, log probabilities, and the queue in front of a slow client.

`sequence_output` is the entry: the output of one sequence. Nothing here knows about workers.
"""
