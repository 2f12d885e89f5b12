"""Prepares a request for the workers: tokenizes, checks, fits it to the context and draws its seed.

Everything that can be refused is refused here, before any worker receives the request.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from coordinator.formats.answer_parts import AnswerRules, ToolUse
from coordinator.formats.output_format import PROMPT_END_TOKENS, AnswerPlan
from coordinator.intake.closed_schema import closed_grammar
from coordinator.intake.generation_request import (
    PROMPT_BYTES_MAX,
    GenerationInput,
    GenerationSpec,
    Origin,
    check_prompt_logprobs,
    effective_sampling,
    fit_to_context,
    identified,
    truncated,
)
from coordinator.intake.held_tools import Verdict, held_tools
from coordinator.intake.worker_threads import TenantThreads, WorkerThreads
from coordinator.models.served_model import ServedModel
from coordinator.settings import CoordinatorSettings
from outrider.errors import InvalidRequest, detached
from outrider.registry.worker_record import WorkerRecord
from outrider.sampling_params import DecodingMode, GrammarSpec, SamplingParams, SpeculationSettings
from outrider.text.message_forms import text_of
from outrider.text.template_limits import TemplateLimit
from outrider.text.tokenizer import LONG_TEXT_CHARS, LONG_TEXT_TOKENS, Tokenizer

if TYPE_CHECKING:
    from outrider.grammar import GrammarCompiler

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")

# Most entries handled on the event loop, which takes less time than handing them to a thread.
_INLINE_BAD_WORDS_MAX: Final = 8
_INLINE_MESSAGES_MAX: Final = 32
_INLINE_SCHEMA_CHARS_MAX: Final = 4096
_CHARS_PER_MESSAGE: Final = 64
"""Length of a text that takes as long to tokenize as a chat template takes for a message."""


class RequestPreparation:
    """Prepares the requests of one replica."""

    def __init__(self, settings: CoordinatorSettings, chance: random.Random, threads: WorkerThreads) -> None:
        """`chance` draws seeds if the operator wants every request to have one; `threads` do large work."""
        self._threads = threads
        self._settings = settings
        self._chance = chance

    async def prepare(
        self,
        request: GenerationInput,
        served: ServedModel,
        model: str,
        targets: Sequence[WorkerRecord],
        charge: Callable[[int], Awaitable[None]],
    ) -> GenerationSpec:
        """Prepares a request, checked by `check_input`, for any of `targets` (at least 1), which serve `served` under
        the name `model`. `charge` is told the tokens of the prompt before they cost more work. Raises InvalidRequest,
        and as `charge`."""
        vocab_size = min(target.vocab_size for target in targets)
        request.sampling.check_vocabulary(vocab_size)
        max_model_len = max(target.max_model_len for target in targets)
        prompt_token_ids = truncated(request, await self.tokenize(request, served.tokenizer), max_model_len)
        # Shared computation counts for each sequence: as many contexts take up room. What is too long is refused next.
        await charge(min(len(prompt_token_ids), max_model_len) * (request.best_of or request.n))
        max_tokens = fit_to_context(request, prompt_token_ids, max_model_len=max_model_len, vocab_size=vocab_size)
        request = await self._with_closed_schema(request)
        plan = _plan(request, served, prompt_token_ids)
        grammar, plan, loosened = await self._checked_grammar(request, served, plan, vocab_size)
        sampling = effective_sampling(
            dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, grammar=grammar)),
            max_tokens,
            bad_words=await self._unless_short(
                self._threads_of(request),
                len(request.bad_words) <= _INLINE_BAD_WORDS_MAX,
                _bad_word_token_ids,
                request,
                served.tokenizer,
            ),
            seed=self._seed(request.sampling, request.speculation),
        )
        deadline_s, deadline_max_s = self.deadline_s(request, served), self._settings.deadline_max_s
        if not 0 < deadline_s <= deadline_max_s:
            raise InvalidRequest("deadline_ms", f"the deadline may be at most {deadline_max_s:g} s")
        spec = GenerationSpec(
            request=request,
            model=model,
            prompt_token_ids=tuple(prompt_token_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            deadline_s=deadline_s,
            served=served,
            objective=request.objective.or_else(self._settings.objective_of(request.tenant)),
            num_speculative_tokens=_most_hints(request, targets),
            prediction_token_ids=await self._predicted(request, served.tokenizer, max_model_len, vocab_size),
            prompt_text=await self._echoed(request, served.tokenizer, prompt_token_ids),
            shows_special_tokens=not request.skip_special_tokens or _has_special_marks(plan, served.tokenizer),
            plan=plan,
            loosened=loosened,
        )
        check_prompt_logprobs(spec)
        return identified(spec)

    def deadline_s(self, request: GenerationInput, served: ServedModel) -> float:
        """Time for the whole request, from its arrival."""
        if request.deadline_s is not None:
            return request.deadline_s
        return served.deadline_default_s or self._settings.deadline_default_s

    async def _checked_grammar(
        self, request: GenerationInput, served: ServedModel, plan: AnswerPlan | None, vocab_size: int
    ) -> tuple[GrammarSpec | None, AnswerPlan | None, tuple[str, ...]]:
        """Returns the grammar of the whole answer, how that is parsed, and what tools' schemas have lost.

        Raises InvalidRequest naming the parameter that does not compile.
        """
        structure = request.sampling.grammar
        if structure is not None:
            compiler = await self._compiler(served, vocab_size)
            await _check_grammar(compiler, structure, request.grammar_parameter, request.tenant)
        if plan is None:
            return structure, None, ()
        if request.tools is not None:
            plan, loosened = await self._with_held_tools(request, request.tools, served, plan, vocab_size)
            return plan.grammar(served.tokenizer.added_token_ids), plan, loosened
        with _grammar_errors_name(request.grammar_parameter):
            grammar = plan.grammar(served.tokenizer.added_token_ids)
        if grammar is not None and grammar != structure:
            compiler = await self._compiler(served, vocab_size)
            await _check_grammar(compiler, grammar, request.grammar_parameter, request.tenant)
        return grammar, plan, ()

    async def _with_held_tools(
        self, request: GenerationInput, use: ToolUse, served: ServedModel, plan: AnswerPlan, vocab_size: int
    ) -> tuple[AnswerPlan, tuple[str, ...]]:
        """Returns the plan with schemas of tools that the grammar holds, and what these have lost."""
        compiler = await self._compiler(served, vocab_size)

        async def check(use: ToolUse) -> Verdict:
            try:
                with _grammar_errors_name("tools"):
                    grammar = plan.with_tools(use).grammar(served.tokenizer.added_token_ids)
            except InvalidRequest as error:
                return Verdict(detached(error), 0.0)
            if grammar is None:
                return Verdict(None, 0.0)
            refusal, compile_s = await compiler.judge_async(grammar, request.tenant)
            return Verdict(refusal and _renamed(refusal, "tools"), compile_s)

        held, loosened = await held_tools(use, check, self._threads_of(request).run)
        return plan.with_tools(held), loosened

    async def _with_closed_schema(self, request: GenerationInput) -> GenerationInput:
        """Returns the request with objects of its JSON schema closed."""
        grammar = request.sampling.grammar
        if grammar is None:
            return request
        is_short = len(grammar.text) <= _INLINE_SCHEMA_CHARS_MAX
        with _grammar_errors_name(request.grammar_parameter):
            grammar = await self._unless_short(self._threads_of(request), is_short, closed_grammar, grammar)
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, grammar=grammar))

    async def tokenize(self, request: GenerationInput, tokenizer: Tokenizer) -> list[int]:
        """Tokenizes the prompt. Raises InvalidRequest if it is too long or the chat template refuses the messages."""
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.messages is not None:
            text = await self._chat_text(request, tokenizer)
        else:
            text = request.text or ""
            _check_text(text, "prompt")
        adds_special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
        is_short, threads = len(text) <= LONG_TEXT_CHARS, self._threads_of(request, len(text))
        token_ids = await self._unless_short(threads, is_short, tokenizer.encode, text, add_special_tokens=adds_special)
        if request.prompt_limit is not None:
            request.prompt_limit.check(len(token_ids))
        return token_ids

    async def _chat_text(self, request: GenerationInput, tokenizer: Tokenizer) -> str:
        """Renders the chat template: here, if the chat is short and the template takes few steps, else in a thread."""
        if _is_short_chat(request):
            with suppress(TemplateLimit):
                return _rendered(request, tokenizer.render_short_chat)
        threads = self._threads_of(request, len(request.messages or ()) * _CHARS_PER_MESSAGE)
        return await threads.run(_rendered, request, tokenizer.render_chat)

    async def _predicted(
        self, request: GenerationInput, tokenizer: Tokenizer, max_model_len: int, vocab_size: int
    ) -> Sequence[int]:
        """Tokenizes the prediction, as far as it is of use. Raises InvalidRequest."""
        predicted = request.prediction
        if not predicted or request.speculation.is_plain:
            return ()
        if not isinstance(predicted, str):
            if not 0 <= min(predicted) <= max(predicted) < vocab_size:
                raise InvalidRequest(
                    "prediction_token_ids", f"prediction_token_ids must lie between 0 and {vocab_size - 1}"
                )
            return array("I", predicted[:max_model_len])
        _check_text(predicted, "prediction", "the prediction")
        is_short, threads = len(predicted) <= LONG_TEXT_CHARS, self._threads_of(request, len(predicted))
        token_ids = await self._unless_short(threads, is_short, tokenizer.encode, predicted, add_special_tokens=False)
        # A tokenizer may have tokens beyond its model's vocabulary. The output has none of them.
        return array("I", [token_id for token_id in token_ids[:max_model_len] if token_id < vocab_size])

    def _threads_of(self, request: GenerationInput, num_chars: int = 0) -> TenantThreads:
        """The threads for work on a request, or on so long a text of it: an earlier response may be longer than its
        body."""
        return self._threads.of(request.origin.caller.tenant, max(num_chars, request.origin.num_bytes))

    async def _unless_short(
        self,
        threads: TenantThreads,
        is_short: bool,
        work: Callable[Arguments, ResultT],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> ResultT:
        """Does `work` here if it is short, else in a thread."""
        return work(*args, **kwargs) if is_short else await threads.run(work, *args, **kwargs)

    def _seed(self, sampling: SamplingParams, speculation: SpeculationSettings) -> int | None:
        is_greedy = sampling.decoding_mode is DecodingMode.GREEDY
        is_drawn = self._settings.seed_requests and not is_greedy and not speculation.asks_for_rejection
        # Clients that store numbers as doubles can send 53 bits back unchanged.
        return self._chance.getrandbits(53) if is_drawn and sampling.seed is None else sampling.seed

    async def decode(
        self, token_ids: Sequence[int], tokenizer: Tokenizer, origin: Origin, *, skip_special_tokens: bool
    ) -> str:
        """Decodes token ids to text."""
        if len(token_ids) <= LONG_TEXT_TOKENS:
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        threads = self._threads.of(origin.caller.tenant, len(token_ids))
        return await threads.run(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)

    async def _echoed(
        self, request: GenerationInput, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
    ) -> str | None:
        if not request.echo:
            return None
        if request.messages is not None:  # as in vLLM, the part of the answer that the client wrote
            last = request.messages[-1]
            return text_of(last["content"]) if last["role"] == "assistant" else ""
        if request.text is not None and request.truncate_prompt_tokens is None:
            return request.text
        is_plain = request.skip_special_tokens
        return await self.decode(prompt_token_ids, tokenizer, request.origin, skip_special_tokens=is_plain)

    async def _compiler(self, served: ServedModel, vocab_size: int) -> GrammarCompiler:
        grammars = served.grammars
        compiler = grammars.compilers.get(vocab_size)
        if compiler is None:  # in a thread, since it may have modules to import
            new = await self._threads.of(None).run(grammars.new_compiler, vocab_size)
            compiler = grammars.compilers.setdefault(vocab_size, new)
        return compiler


def _plan(request: GenerationInput, served: ServedModel, prompt_token_ids: Sequence[int]) -> AnswerPlan | None:
    """Plans how the answer is parsed; None if all of it is content."""
    if not request.is_parsed:
        return None
    prompt_end = served.tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    reasoning = served.output_format.reasoning_after(prompt_end)
    plan = AnswerPlan(served.output_format, AnswerRules(request.tools, request.sampling.grammar, reasoning))
    return None if plan.new_parser() is None else plan


def _has_special_marks(plan: AnswerPlan | None, tokenizer: Tokenizer) -> bool:
    """Whether skipping special tokens would hide the marks of the parts of an answer."""
    marks = () if plan is None else plan.form.marks
    return any(tokenizer.is_special(tokenizer.added_token_ids.get(mark, -1)) for mark in marks)


def _rendered(request: GenerationInput, render: Callable[..., str]) -> str:
    messages = request.messages or ()
    variables = dict(request.chat_template_kwargs)
    if request.continue_final_message:
        variables["continue_final_message"] = True
    try:
        text = render(messages, **variables)
    except InvalidRequest:
        merged = _with_one_system_message(messages)
        if not request.merges_system or merged == list(messages):
            raise
        text = render(merged, **variables)
    _check_text(text, "messages")
    return text


def _with_one_system_message(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with all that the system says at the beginning."""
    said = [text_of(message["content"]) for message in messages if message["role"] == "system"]
    first = [{"role": "system", "content": "\n\n".join(said)}] if said else []
    return [*first, *(message for message in messages if message["role"] != "system")]


async def _check_grammar(compiler: GrammarCompiler, grammar: GrammarSpec, parameter: str, tenant: str) -> None:
    with _grammar_errors_name(parameter):
        await compiler.check_async(grammar, tenant)


def _most_hints(request: GenerationInput, targets: Sequence[WorkerRecord]) -> int:
    """Returns the most hints that a step of the request can verify; 0 if targets of an older release do not tell."""
    limit = max(target.num_speculative_tokens for target in targets)
    return min(request.speculation.num_speculative_tokens or limit, limit)


@contextmanager
def _grammar_errors_name(parameter: str) -> Iterator[None]:
    """Renames errors about a grammar to the parameter that the client used."""
    try:
        yield
    except InvalidRequest as error:
        raise _renamed(error, parameter) from error


def _renamed(error: InvalidRequest, parameter: str) -> InvalidRequest:
    return InvalidRequest(parameter, error.message if parameter == "grammar" else f"{parameter}: {error.message}")


def _is_short_chat(request: GenerationInput) -> bool:
    """Whether a chat is short enough to render its template on the event loop, by its size."""
    messages = request.messages or ()
    if request.chat_template_kwargs or len(messages) > _INLINE_MESSAGES_MAX:
        return False
    if any("tool_calls" in message for message in messages):
        return False
    return sum(len(text_of(message["content"])) for message in messages) <= LONG_TEXT_CHARS


def _check_text(text: str, parameter: str, what: str = "the prompt") -> None:
    """Checks a text's length and encoding. Raises InvalidRequest."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:  # a tool call's arguments, JSON within JSON, can contain one
        raise InvalidRequest(parameter, f"{parameter} contains an unpaired surrogate: {error}") from error
    if num_bytes > PROMPT_BYTES_MAX:
        raise InvalidRequest(parameter, f"{parameter}: {what} is longer than {PROMPT_BYTES_MAX} bytes")


def _bad_word_token_ids(request: GenerationInput, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Tokenizes each bad word as at the start of a text and, if different, as after a space."""
    found: list[tuple[int, ...]] = []
    for word in request.bad_words:
        word = word.lstrip() or word
        bare = tuple(tokenizer.encode(word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word, add_special_tokens=False))
        found.append(bare)
        # A sequence that ends like the bare one can never be completed, since the bare one is forbidden.
        if spaced[-len(bare) :] != bare:
            found.append(spaced)
    return found
