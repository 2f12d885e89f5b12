"""Outrider in one thread under a virtual clock: the real code of every process, with all that is around it made up.

    clock       an asyncio event loop whose time passes only when nothing is left to do
    process     processes, each on a host with clocks of its own, that can be stopped and go on
    calls       gRPC between them: ordered streams, flow control, bytes; questions to what does not speak gRPC
    network     delays, reorders across streams, breaks, partitions in both directions or in one
    registry    a model of the registry's scripts, proven equal to Redis by `test_registry_model`
    redis_process, actors, coordinators
                real services, servicers, schedulers, sessions, links and leases
    models      cheap functions of the text in place of models and grammars, so that the right text is known
    scenario    what happens in one run, drawn from a seed: processes, requests, faults
    features    what some runs have beside that: tenants, reused ids, poison, weights ...; `additions` adds them
    checks      I1, I2, I3, I7 and I8 after every step of a worker
    judge       I9, I10, limits and shares, with what nobody but it knows of all processes
    client      compares every token as it comes, comes back, stops reading, lies
    world       runs a scenario, and sees to it that everything ends and is freed
    seed_log    which seeds a long run has done, so that it can go on where it was stopped
    `python -m tests.simulation --help` runs seeds on demand, replays one, and makes a failing one small.

Everything that could differ between two runs comes from the seed, so a failing seed fails again.
"""
