"""Authenticates clients and limits how much of the system each tenant may use.

`authentication` finds the caller of a request, by a key (`api_keys`) or by a token (`tokens`, with the keys that
`identity_provider` reads). `rate_limits` counts tokens and requests per minute, `concurrency_limits` counts
sequences. Limits are counted in Redis, so all coordinators together keep to them. Which request runs next is
decided in `placement`.
"""
