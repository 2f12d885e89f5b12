"""The public APIs: each translates its wire format to and from `coordinator.service` and decides nothing else.

`schema` reads and documents request bodies, `answer` writes responses, `http` and `grpc` are the two servers.
`responses` and `anthropic` are two further APIs over HTTP, whose requests are translated to chats.
"""
