"""Outrider in one thread under a virtual clock: the real code of every process, with all that is around it made up.

    clock       an asyncio event loop whose time passes only when nothing is left to do
    network     processes, and gRPC between them that delays, reorders across streams, breaks and partitions
    registry    a model of the registry's scripts, proven equal to Redis by `test_registry_model`
    actors      coordinators, target and draft workers: real servicers, schedulers, sessions, links and leases; the
                models behind them are cheap functions of the text, so that the right text is known
    scenario    what happens in one run, drawn from a seed: processes, requests, faults
    world       runs a scenario, checks I1, I2, I3, I7 and I8 all along, and that everything ends and is freed
    `python -m tests.simulation --help` runs seeds on demand, replays one, and makes a failing one small.

Everything that could differ between two runs comes from the seed, so a failing seed fails again.
"""
