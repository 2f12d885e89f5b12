"""Simulator of a fleet under load in virtual time.

It runs the pure cores of coordinator, draft worker and target worker, the production code, on synthetic models and
measured costs. Only `outrider simulate` imports it, when it runs.

    fleet     settings of a fleet file, checked
    traffic   requests, each with the target's tokens and the draft's candidates
    models    synthetic models: verdicts and expansions from those tokens
    clock     virtual time, and network links
    workers   a target worker and a draft worker around their schedulers
    streams   the replicas' streams and reservations
    coordinator  a coordinator replica: its queue, its request state machine, its fallback
    world     the whole fleet, and its outcome
    ratios    the best draft : target ratio at a given price
"""
