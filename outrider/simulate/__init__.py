"""`outrider simulate`: a fleet under load in virtual time, to know what it will do before it is bought.

A program of its own above all others: it runs the pure cores of coordinator, draft worker and target worker, the very
code that decides in production, on made-up models and measured costs. Nobody imports it but its command.

    fleet     what a fleet file says, checked
    traffic   requests, each with the text that the target will say and what the draft will guess
    models    the made-up models: verdicts and expansions from those texts
    clock     virtual time, and a network in it
    workers   a target worker and a draft worker around their schedulers
    door      the coordinator: routing, reservations, fallback
    world     all of them together, and what came out
    ratios    which draft : target ratio is best for the money
"""
