"""Reads the bodies of OpenAI-compatible requests and documents them as OpenAPI. Pure.

`openai_schema` is the entry: the bodies of all calls. `unserved_parameters` refuses parameters of other servers. No
field is accepted and ignored.
"""
