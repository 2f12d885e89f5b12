"""vLLM's scheduler inside a target worker: replays, and counts with every output.

A request that goes on where another worker stopped has its committed output at the end of vLLM's prompt. Here it
becomes output again, as if this engine had generated and then preempted it, and a grammar is advanced by it.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, Final

import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from outrider.engines.engine_hints import EngineHints, hello
from outrider.engines.hint_link import HintLink
from outrider.engines.hinted_requests import HintedRequests
from outrider.engines.target_door import Door
from outrider.engines.vllm.checks import settings_in
from outrider.engines.vllm.contract import SESSION_METHODS, SESSION_SOURCES, missing
from outrider.engines.vllm.requests import announcement
from outrider.engines.vllm.scheduler import HintScheduler
from outrider.engines.vllm.sessions import SessionArgs, StepCounts, restore_output
from outrider.errors import ConfigurationError

DOOR: Final = "door"
"""Key of the settings: path of the target worker's socket."""
MAY_PAUSE: Final = "may_pause"
HINT_WAIT_MS: Final = "hint_wait_ms"


class _Sessions(Scheduler):
    """The part that both schedulers share; its methods stand before those of vLLM's own."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if lacks := list(missing(SESSION_METHODS, SESSION_SOURCES)):
            raise ConfigurationError(
                f"vLLM {vllm.__version__} lacks what a target worker relies on: {', '.join(lacks)}"
            )
        self._door = Door(settings_in(vllm_config)[DOOR])
        self._door.tie()
        super().__init__(vllm_config, *args, **kwargs)
        self._counts: dict[str, StepCounts] = {}
        self._num_steps = 0
        self._is_in_update = False
        self._scheduled_at = time.monotonic()

    def add_request(self, request: Any) -> None:
        session = SessionArgs.of(request.sampling_params)
        if session is not None and request.request_id not in self.requests:
            self._counts[request.request_id] = StepCounts()
            if session.num_committed:
                restore_output(request, session.num_committed)
                self._advance_grammar(request)
        super().add_request(request)

    def _advance_grammar(self, request: Any) -> None:
        """Lets the grammar read the committed output once it is compiled. If it does not permit that, vLLM ends the
        request as one whose grammar cannot be compiled."""
        structured = request.structured_output_request
        if structured is None:
            return
        compiling, token_ids = structured._grammar, list(request.output_token_ids)

        def advance() -> Any:
            grammar = compiling.result() if isinstance(compiling, Future) else compiling
            if not grammar.accept_tokens(request.request_id, token_ids):
                raise ValueError("the committed tokens leave the grammar")
            return grammar

        # Behind the compilation in the same queue, so that it never waits for a place that it takes itself.
        structured.grammar = self.structured_output_manager.executor.submit(advance)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self._scheduled_at = time.monotonic()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step_ms = (time.monotonic() - self._scheduled_at) * 1e3
        self._num_steps += 1
        self._is_in_update = True
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._is_in_update = False
        hints = scheduler_output.scheduled_spec_decode_tokens
        for of_client in outputs.values():
            for output in of_client.outputs:
                counts = self._counts.get(output.request_id)
                if counts is None:
                    continue
                if output.new_token_ids:
                    counts.count(hints.get(output.request_id, ()), output.new_token_ids)
                    counts.step, counts.step_ms = self._num_steps, step_ms
                output.ec_transfer_params = counts.to_message(is_last=output.finished)
                if output.finished:
                    del self._counts[output.request_id]
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_in_update:  # otherwise its last output follows
            self._counts.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


class HintedSessionScheduler(_Sessions, HintScheduler):
    """With hints of draft workers, which the target worker passes on."""

    def _make_hints(self, vllm_config: Any, given: dict[str, Any]) -> EngineHints:
        vocab_size = vllm_config.model_config.get_vocab_size()
        link = HintLink(hello({}, "", vocab_size, None), self._door.hand_over)
        requests = HintedRequests(
            vocab_size, may_pause=given.get(MAY_PAUSE, True), hint_wait_ms=given.get(HINT_WAIT_MS, 0.0)
        )
        return EngineHints(requests, link)

    def _announcement(self, request: Any) -> Any:
        session = SessionArgs.of(request.sampling_params)
        if session is None:
            return None
        made = announcement(request, session.name, "")
        made.speculation.always = session.is_always
        return made


class PlainSessionScheduler(_Sessions, Scheduler):
    """Without hints."""
