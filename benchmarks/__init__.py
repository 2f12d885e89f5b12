"""Every number that the documentation states, reproducible: `python -m benchmarks` lists them, with a name it runs one.

Rooms, from the lowest to the highest: `shared` (workers, models, charts, statistics), `engine` (kernels and steps),
`speculation` (a pair of workers), `gpu` (one session on a GPU), `sources` (of hints), `peers` (other engines),
`serving` (the HTTP API under load), `scaling` (a fleet over a day).
"""
