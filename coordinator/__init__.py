"""The Ray Serve application in front of the worker pools: accepts requests, places them, streams their tokens.

In reading order, the lowest room first; a room imports only rooms above it in this list:

    formats          how models write reasoning and tool calls: recognized, forced by a grammar, parsed
    settings         what one coordinator is told at its start
    access           who may ask and how much: API keys, tokens, rate limits, limits of concurrent sequences
    placement        which workers serve a request, and in which order requests wait for a slot
    models           the served models: tokenizer, formats, grammars and draft models of each
    intake           a request as every API hands it in, checked and tokenized
    recovery         what outlives a replica or a target: journal, resumption, poisonous requests
    speculation      whether speculation pays for a request
    workers          connections to workers, and whether a worker is the one it claims to be
    observability    metrics of a replica and statistics of a request
    output           from committed tokens to what a client reads
    request          one request from its admission to its last token
    canary           a share of the traffic decoded in another way, and compared
    service          the service behind every API
    batches          files of requests that run in spare capacity
    api              the OpenAI-compatible HTTP API and the gRPC API
    hosting          Ray, Ray Serve and HAProxy: the only room that knows them
"""
