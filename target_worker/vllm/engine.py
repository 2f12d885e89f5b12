"""vLLM's AsyncLLM as the target worker uses it. The only module here that touches vLLM, which it imports late."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engines.tokenizer_dir import tokenizer_dir
from outrider.engines.vllm.checks import ANY_VERSION, CONFIG_KEY, PROPOSER
from outrider.engines.vllm.contract import TESTED_VERSIONS
from outrider.engines.vllm.sessions import StepCounts
from outrider.errors import ConfigurationError, InvalidRequest, WorkerFailed
from target_worker.vllm.options import VllmOptions, setting_given
from target_worker.vllm.parameters import LLGUIDANCE, EngineFacts

logger = logging.getLogger(__name__)

_SCHEDULERS: Final = "outrider.engines.vllm.session_scheduler"
_EXTENSION: Final = "outrider.engines.vllm.worker_extension.SessionExtension"
_GRAMMARS: Final = ("--structured-outputs-config", "--reasoning-parser")
_ENVIRONMENT: Final = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner takes no draft tokens from a scheduler
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # this process has threads, which a fork would cut off
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output has the ready line
    "VLLM_NO_USAGE_STATS": "1",
}
_CLOSE_S: Final = 5.0


class EngineLost(WorkerFailed):
    """vLLM's engine process has ended; this worker can do nothing without it."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to vLLM."""

    request_id: str
    token_ids: list[int]
    parameters: Mapping[str, Any]  # `vllm_parameters`
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """New tokens of a request: of one step, or of a few that came together."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt from its second token on, with the first output
    finish_reason: str | None = None  # stop, length, abort, error or repetition
    counts: StepCounts | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load after a step."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of the blocks


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The running engine, for `WorkerInfo` and the translation of parameters."""

    model_dir: Path
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    numerics: str
    is_batch_invariant: bool
    facts: EngineFacts


def prepare(options: VllmOptions) -> None:
    """Sets the variables that vLLM reads when it is imported. Raises ConfigurationError where it is not installed."""
    variables = dict(_ENVIRONMENT)
    if options.cpu_affinity is not None:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = options.cpu_affinity
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise ConfigurationError(
            f"vLLM cannot be imported by this Python ({error}); run the target worker with the Python of the "
            "environment that vLLM is installed in, with Outrider beside it (docs/guides/vllm.md)"
        ) from error
    if ".".join(vllm.__version__.split(".")[:2]) not in TESTED_VERSIONS and not options.is_any_version:
        raise ConfigurationError(
            f"target workers were tried with vLLM {', '.join(TESTED_VERSIONS)}, and this is {vllm.__version__}; "
            "--any-vllm-version tries it all the same"
        )


_LOOK_S = 0.5
"""Between two looks whether an engine that does not answer is there."""


class VllmEngine:
    """A running engine. Its methods are for one event loop."""

    def __init__(self, llm: Any, description: EngineDescription) -> None:
        self._llm = llm
        self.description = description

    @classmethod
    def load(cls, options: VllmOptions, name: str, door: str, on_step: Callable[[EngineLoad], None]) -> Self:
        """Starts vLLM, which takes minutes; `on_step` is called on the event loop. Raises ConfigurationError."""
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            config = _configuration(options, name, door)
            llm = AsyncLLM.from_vllm_config(config, stat_loggers=[_load_logger(on_step)])
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"vLLM did not start: {error}") from error
        return cls(llm, _describe(config, options))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput]:
        """Yields what is generated; closing the generator aborts the request. Raises InvalidRequest, EngineLost and
        WorkerFailed."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        parameters = dict(request.parameters)
        bad_words = parameters.pop("bad_words")
        grammar = parameters.pop("structured_outputs")
        prompt = tokens_input(request.token_ids, cache_salt=request.cache_salt or None)
        try:
            params = SamplingParams(
                **parameters,
                structured_outputs=None if grammar is None else StructuredOutputsParams(**grammar),
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            params._bad_words_token_ids = bad_words or None
            generating = self._llm.generate(prompt, params, request.request_id, priority=request.priority)
            async with aclosing(generating) as outputs:
                async for output in outputs:
                    yield _converted(output, request.parameters)
        except EngineDeadError as error:
            raise EngineLost("vLLM's engine process has ended") from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise InvalidRequest(getattr(error, "parameter", None), f"vLLM refuses this request: {error}") from error
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            _raise(error)

    async def ping(self) -> None:
        """Returns when the engine has answered, between two steps. Raises EngineLost."""
        from vllm.v1.engine.exceptions import EngineDeadError

        asking = asyncio.ensure_future(self._llm.is_paused())
        try:
            while not asking.done():
                # vLLM never answers a question that its engine has died over.
                if self._llm.errored:
                    raise EngineLost("vLLM's engine process has ended")
                await asyncio.wait([asking], timeout=_LOOK_S)
            await asking
        except EngineDeadError as error:
            raise EngineLost("vLLM's engine process has ended") from error
        finally:
            asking.cancel()

    def close(self) -> None:
        """Ends vLLM's processes."""
        self._llm.shutdown(timeout=_CLOSE_S)


def _raise(error: Exception) -> NoReturn:
    """Raises an error of vLLM as one of ours, by its cause."""
    cause = error.__cause__
    if isinstance(cause, ValueError | TypeError):
        raise InvalidRequest(None, f"vLLM refuses this request: {cause}") from error
    raise WorkerFailed(f"vLLM failed on this request: {cause or error}") from error


def _configuration(options: VllmOptions, name: str, door: str) -> Any:
    """vLLM's own configuration, from its flags and ours. Raises ConfigurationError."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigurationError(f"vLLM's flags, behind the --: {message}")

    flags = [*options.vllm_flags]
    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", add_help=False))
    words = [*flags, "--model", options.model, "--served-model-name", name]
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    arguments.worker_extension_cls = _EXTENSION
    scheduler = "HintedSessionScheduler" if options.takes_hints else "PlainSessionScheduler"
    arguments.scheduler_cls = f"{_SCHEDULERS}.{scheduler}"
    arguments.async_scheduling = False
    arguments.disable_log_stats = False
    told = {
        "door": door,
        "may_pause": options.may_pause,
        "hint_wait_ms": options.hint_wait_ms_max,
        ANY_VERSION: options.is_any_version,
    }
    arguments.additional_config = {CONFIG_KEY: told}
    if options.takes_hints:
        arguments.speculative_config = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": options.num_speculative_tokens,
        }
    if not setting_given(flags, "--scheduling-policy"):
        arguments.scheduling_policy = "priority"
    if not setting_given(flags, *_GRAMMARS):
        arguments.structured_outputs_config.backend = LLGUIDANCE
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if config.parallel_config.data_parallel_size > 1:
        raise ConfigurationError("--data-parallel-size: start a target worker for each replica of the model instead")
    if config.model_config.runner_type != "generate" or config.model_config.is_encoder_decoder:
        raise ConfigurationError(f"--model {options.model} does not generate one token after the other")
    return config


def _describe(config: Any, options: VllmOptions) -> EngineDescription:
    import torch
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    model, parallel, grammars = config.model_config, config.parallel_config, config.structured_outputs_config
    found = tokenizer_dir(model.model)
    if found is None:
        raise ConfigurationError(
            f"--model {options.model} has no tokenizer.json, by which workers and coordinator agree"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    numerics = [
        f"vllm {vllm.__version__}",
        f"torch {torch.__version__}",
        str(current_platform.get_device_name()),
        model.quantization or dtype,
        f"kv {config.cache_config.cache_dtype}",
        f"tp {parallel.tensor_parallel_size}",
        f"pp {parallel.pipeline_parallel_size}",
        f"attention {getattr(config.attention_config.backend, 'name', 'auto')}",
        "eager" if model.enforce_eager else "compiled",
        *(["batch-invariant"] if envs.VLLM_BATCH_INVARIANT else []),
    ]
    return EngineDescription(
        model_dir=Path(found),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        dtype=model.quantization or dtype,
        numerics=", ".join(numerics),
        is_batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        facts=EngineFacts(
            has_speculation=config.speculative_config is not None,
            logprobs_mode=str(model.logprobs_mode),
            max_logprobs=model.max_logprobs,
            grammar_backend=grammars.backend,
            is_json_compact=grammars.disable_any_whitespace,
        ),
    )


def _load_logger(on_step: Callable[[EngineLoad], None]) -> Any:
    """vLLM's interface for whoever wants to know its statistics after each step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None:
                stats = scheduler_stats
                num_waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
                on_step(EngineLoad(stats.num_running_reqs, num_waiting, stats.kv_cache_usage))

        def log_engine_initialized(self) -> None:
            pass

    return LoadLogger


def _converted(output: Any, parameters: Mapping[str, Any]) -> EngineOutput:
    """vLLM's output as ours."""
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    logprobs: list[TokenLogprobs] | None = None
    if completion.logprobs is not None:
        own = zip(completion.logprobs, token_ids, strict=True)
        logprobs = [_logprobs(row, each, parameters["logprobs"]) for row, each in own]
    prompt: list[TokenLogprobs] | None = None
    if output.prompt_logprobs:  # the first token has none, and in each row the prompt's own comes first
        rows = ((row, next(iter(row))) for row in output.prompt_logprobs if row)
        prompt = [_logprobs(row, each, parameters["prompt_logprobs"]) for row, each in rows]
    times = output.metrics
    return EngineOutput(
        token_ids,
        logprobs,
        prompt,
        completion.finish_reason,
        StepCounts.from_message(output.ec_transfer_params),
        output.num_cached_tokens or 0,
        0 if times is None else times.num_preemptions,
        0.0 if times is None else max(times.scheduled_ts - times.queued_ts, 0.0) * 1e3,
        0.0 if times is None else max(times.first_token_ts - times.scheduled_ts, 0.0) * 1e3,
    )


def _logprobs(row: Mapping[int, Any], token_id: int, num_top: int) -> TokenLogprobs:
    """A row has the token itself and the likeliest ones, of which it may be one."""
    own = row[token_id]
    ranked = sorted(row.items(), key=lambda item: item[1].rank)
    return TokenLogprobs(own.logprob, own.rank, tuple((each, at.logprob) for each, at in ranked[:num_top]))
