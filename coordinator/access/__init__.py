"""Authenticates clients and limits how much of the system each tenant may use.

`api_keys` authenticates, `rate_limits` counts tokens and requests per minute, `concurrency_limits` counts
sequences. Limits are counted in Redis, so all coordinators together keep to them. Which request runs next is
decided in `placement`.
"""
