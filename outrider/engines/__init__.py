"""Hints of draft workers for engines that others have written.

`hinted_requests` decides in the engine's own process which hints a step verifies; `hint_link` connects it to
`hint_server`, a process beside the engine that talks with draft workers over gRPC. `vllm` and `sglang` plug
this into these engines.
"""
