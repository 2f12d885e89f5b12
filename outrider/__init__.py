"""The library that the processes share. It imports none of them; what only one of them needs lives with that one.

In reading order; a room imports only rooms above it in this list:

    errors, settings    typed errors with their status; settings, each declared once
    concurrency         background tasks, time slices of threads, waiting times of slots
    sampling_params     the parameters of a request
    audit               whether speculation changed an output
    local               processes of one machine: children, ports, an embedded Redis server
    security            mutual TLS, certificates, tenants
    text                text to token ids and back
    observability       logs, metrics, traces
    registry            workers and slots in Redis
    canary              a share of the traffic decoded in another way
    grammar             grammars for the output
    hints               the hint tree and its messages
    engine              the model: KV cache, layers, sampling, ranks, loading
    worker              what both kinds of worker process share
    hint_service        the gRPC service for draft workers
    engines             hints for engines that others have written: vLLM
"""

__version__ = "0.1.0"
