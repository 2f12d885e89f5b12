"""A target worker whose model vLLM runs: `outrider target-worker --engine vllm --model M -- VLLM_FLAGS`.

`worker` starts it. `sessions` takes the servicer's events in place of the scheduler and the model thread, `parameters`
translates a session's parameters, `engine` is the only module that touches vLLM, `hints` passes draft workers' hints
on to vLLM's scheduler (`outrider.engines.vllm.session_scheduler`).
"""
