"""vLLM's scheduler, with hints of draft workers as its draft tokens. The only module here that imports vLLM.

vllm serve MODEL --scheduler-cls outrider.engines.vllm.scheduler.HintScheduler --no-async-scheduling
    --speculative-config '{"method": "custom_class", "model": "outrider.engines.vllm.no_drafts.NoDrafts",
                           "num_speculative_tokens": 7}'
    --additional-config '{"outrider": {"draft_workers": ["HOST:PORT"]}}'

Before each step it sets the draft tokens of requests that decode to the hints that have arrived, and waits for some for
a few milliseconds where that pays. vLLM verifies them with its own sampler. After the step draft workers are told what
was committed.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from typing import Any

import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from outrider.engines.engine_hints import EngineHints, hello
from outrider.engines.hint_link import HintLink
from outrider.engines.hint_settings import HintSettings
from outrider.engines.hinted_requests import Fed, HintedRequests
from outrider.engines.tokenizer_dir import tokenizer_dir
from outrider.engines.vllm.checks import ANY_VERSION, check_configuration, check_version, settings_in
from outrider.engines.vllm.contract import missing
from outrider.engines.vllm.requests import announcement, hint_limit, is_hintable, is_sampled
from outrider.errors import ConfigurationError

logger = logging.getLogger(__name__)

KV_USAGE_MAX = 0.95
"""Share of KV blocks in use from which no hints are fed: the room that they need could cost another request its own."""


class HintScheduler(Scheduler):
    """vLLM's scheduler with hints. Raises ConfigurationError at start, and nothing of its own afterwards."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(settings_in(vllm_config))
        check_version(vllm.__version__, given)
        given.pop(ANY_VERSION, None)
        if lacks := list(missing()):
            raise ConfigurationError(f"vLLM {vllm.__version__} lacks what HintScheduler relies on: {', '.join(lacks)}")
        check_configuration(vllm_config)
        self._hints = self._make_hints(vllm_config, given)
        super().__init__(vllm_config, *args, **kwargs)
        self._session_ids = (f"vllm-{secrets.token_hex(8)}-{number}" for number in itertools.count(1))
        self._hint_limits: dict[str, int] = {}  # of the open requests that may have hints
        self._is_in_step = False
        self._step_began_at = time.monotonic()
        self._hints.start()

    def _make_hints(self, vllm_config: Any, given: dict[str, Any]) -> EngineHints:
        return _engine_hints(HintSettings.from_mapping(given), given, vllm_config)

    def _announcement(self, request: Any) -> Any:
        """How draft workers are told of a request; None: it gets no hints."""
        return announcement(request, next(self._session_ids), secrets.token_hex(16))

    def add_request(self, request: Any) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new and request.sampling_params is not None:
            self._open(request)

    def _open(self, request: Any) -> None:
        limit = hint_limit(request) if is_hintable(request) else 0
        limit = self.num_spec_tokens if limit is None else min(limit, self.num_spec_tokens)
        self._hint_limits[request.request_id] = limit
        self._hints.open(
            request.request_id,
            request.all_token_ids,
            self._announcement(request) if limit else None,
            frozenset(request.sampling_params.all_stop_token_ids),
            is_sampled=is_sampled(request),
        )

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Every end of a request comes here: stop, length, abort, error.
        if self._hint_limits.pop(request.request_id, None) is not None:
            self._hints.close(request.request_id, in_step=self._is_in_step)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._hints.collect()
        self._set_draft_tokens()
        output = super().schedule(*args, **kwargs)
        self._step_began_at = time.monotonic()
        return output

    def _set_draft_tokens(self) -> None:
        """Sets the hints that the next step verifies."""
        if self.kv_cache_manager.usage > KV_USAGE_MAX:
            return
        limits = {request.request_id: self._room_for_hints(request) for request in self.running}
        num_decoding = sum(limit >= 0 for limit in limits.values())
        budget = self.max_num_scheduled_tokens - num_decoding
        if num_decoding < len(self.requests):  # prompts wait, and get half of it
            budget //= 2
        else:
            self._hints.wait(limits, num_decoding)
        for request_id, token_ids in self._hints.choose(limits, len(self.running), budget).items():
            request = self.requests[request_id]
            request.spec_token_ids = self.structured_output_manager.validate_tokens(request, token_ids)

    def _room_for_hints(self, request: Any) -> int:
        """Most hints of a request in the next step; -1 for one that is not decoding."""
        if (
            request.num_computed_tokens != request.num_tokens - 1
            or request.num_output_placeholders
            or request.num_in_flight_tokens
        ):
            return -1
        return max(
            min(
                self._hint_limits.get(request.request_id, 0),
                request.max_tokens - request.num_output_tokens - 1,
                self.max_model_len - request.num_tokens - 1,
            ),
            0,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step_ms = (time.monotonic() - self._step_began_at) * 1e3
        self._is_in_step = True
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._is_in_step = False
        num_tokens = scheduler_output.num_scheduled_tokens
        num_hints = {key: len(each) for key, each in scheduler_output.scheduled_spec_decode_tokens.items()}
        self._hints.finish_step(
            [Fed(request_id, num_hints.get(request_id, 0)) for request_id in num_tokens],
            scheduler_output.total_num_scheduled_tokens,
            step_ms,
            only_decodes=all(number == 1 + num_hints.get(key, 0) for key, number in num_tokens.items()),
        )
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Does nothing: the proposer has no draft tokens, and those of draft workers are set when a step begins."""

    def shutdown(self) -> None:
        self._hints.turn_off()
        super().shutdown()


def _engine_hints(settings: HintSettings, given: dict[str, Any], vllm_config: Any) -> EngineHints:
    model = vllm_config.model_config
    name = model.served_model_name
    # Engines of a data-parallel group share a configuration, and each has ports of its own.
    rank = vllm_config.parallel_config.data_parallel_rank
    ports = {key: given[key] + rank for key in ("port", "metrics_port") if given.get(key)}
    told = hello(
        {**given, **ports},
        name[0] if isinstance(name, list) else str(name),
        model.get_vocab_size(),
        tokenizer_dir(model.tokenizer),
    )
    requests = HintedRequests(model.get_vocab_size(), may_pause=settings.may_pause, hint_wait_ms=settings.hint_wait_ms)
    return EngineHints(requests, HintLink(told))
