"""From a request to what is known to be possible: tokenized, checked, fitted to the context, seeded.

Everything that can be refused is refused here, before any worker hears of the request.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from coordinator.generation_request import (
    PROMPT_BYTES_MAX,
    GenerationInput,
    GenerationSpec,
    check_prompt_logprobs,
    effective_sampling,
    fit_to_context,
    identified,
)
from coordinator.settings import CoordinatorSettings
from coordinator.tool_calls import OPENING, tool_grammar
from coordinator.worker_threads import WorkerThreads
from outrider.errors import ConfigurationError, InvalidRequest
from outrider.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from outrider.tokenizer import LONG_TEXT_CHARS, LONG_TEXT_TOKENS, Tokenizer
from outrider.worker_record import WorkerRecord

if TYPE_CHECKING:
    from outrider.grammar import GrammarCompiler

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")

# What the event loop does itself, in less time than it takes to hand the work to a thread.
_INLINE_BAD_WORDS_MAX: Final = 8
_INLINE_MESSAGES_MAX: Final = 32


class RequestPreparation:
    """One per replica; it keeps the compilers of grammars, which take a while to load."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: CoordinatorSettings,
        chance: random.Random,
        threads: WorkerThreads,
    ) -> None:
        """`chance` draws seeds where the operator wants requests to have one; `threads` take what is large."""
        self._tokenizer = tokenizer
        self._threads = threads
        self._settings = settings
        self._chance = chance
        self._compilers: dict[int, GrammarCompiler] = {}  # by vocabulary size

    async def prepare(
        self, request: GenerationInput, model: str, targets: Sequence[WorkerRecord]
    ) -> GenerationSpec:
        """`request` has passed `check_input`; `targets`, at least one, serve the model. Raises InvalidRequest."""
        vocab_size = min(target.vocab_size for target in targets)
        request.sampling.check_vocabulary(vocab_size)
        prompt_token_ids = await self.tokenize(request)
        max_tokens = fit_to_context(
            request,
            prompt_token_ids,
            max_model_len=max(target.max_model_len for target in targets),
            vocab_size=vocab_size,
        )
        tokenizer, settings = self._tokenizer, self._settings
        with _grammar_errors_name(request.grammar_parameter):
            if request.tools is not None:
                grammar = GrammarSpec(
                    GrammarKind.LARK, tool_grammar(request.tools, tokenizer.added_token_ids)
                )
                sampling = dataclasses.replace(request.sampling, grammar=grammar)
                request = dataclasses.replace(request, sampling=sampling)
            if request.sampling.grammar is not None:
                compiler = await self._compiler(vocab_size)
                await compiler.check_async(request.sampling.grammar, request.tenant)
        sampling = effective_sampling(
            request,
            max_tokens,
            bad_words=await self._unless_short(
                len(request.bad_words) <= _INLINE_BAD_WORDS_MAX, _bad_word_token_ids, request, tokenizer
            ),
            seed=self._seed(request.sampling),
        )
        deadline_s = settings.deadline_default_s if request.deadline_s is None else request.deadline_s
        if not 0 < deadline_s <= settings.deadline_max_s:
            raise InvalidRequest("deadline_ms", f"the deadline may be at most {settings.deadline_max_s:g} s")
        spec = GenerationSpec(
            request=request,
            model=model,
            prompt_token_ids=tuple(prompt_token_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            deadline_s=deadline_s,
            prompt_text=await self._echoed(request),
            # A model whose marks of a call are special tokens would hide its calls.
            shows_special_tokens=not request.skip_special_tokens
            or (
                request.tools is not None and tokenizer.is_special(tokenizer.added_token_ids.get(OPENING, -1))
            ),
        )
        check_prompt_logprobs(spec)
        return identified(spec)

    async def tokenize(self, request: GenerationInput, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt as token ids. Raises InvalidRequest when it is too long or the chat template refuses the
        messages."""
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.messages is not None:
            text = await self._unless_short(_is_short_chat(request), self._rendered, request)
            add_special_tokens = False  # the template writes them
        else:
            text = request.text or ""
            _check_prompt(text, "prompt")
        encode = self._tokenizer.encode
        return await self._unless_short(
            len(text) <= LONG_TEXT_CHARS, encode, text, add_special_tokens=add_special_tokens
        )

    async def _unless_short(
        self,
        is_short: bool,
        work: Callable[Arguments, ResultT],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> ResultT:
        """What `work` returns; by a thread where that may take long."""
        return work(*args, **kwargs) if is_short else await self._threads.run(work, *args, **kwargs)

    def _rendered(self, request: GenerationInput) -> str:
        text = self._tokenizer.render_chat(request.messages or (), **request.chat_template_kwargs)
        _check_prompt(text, "messages")
        return text

    def _seed(self, sampling: SamplingParams) -> int | None:
        is_drawn = self._settings.seed_requests and sampling.temperature > 0
        # Clients that keep numbers as floating-point ones can give 53 bits back unchanged.
        return self._chance.getrandbits(53) if is_drawn and sampling.seed is None else sampling.seed

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Their text."""
        decode = self._tokenizer.decode
        return await self._unless_short(
            len(token_ids) <= LONG_TEXT_TOKENS, decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    async def _echoed(self, request: GenerationInput) -> str | None:
        if not request.echo or request.text is not None:
            return request.text if request.echo else None
        return await self.decode(request.token_ids or (), skip_special_tokens=request.skip_special_tokens)

    async def _compiler(self, vocab_size: int) -> GrammarCompiler:
        compiler = self._compilers.get(vocab_size)
        if compiler is None:  # a thread makes it, for what it imports may not have been yet
            made = await self._threads.run(self._new_compiler, vocab_size)
            compiler = self._compilers.setdefault(vocab_size, made)
        return compiler

    def load_grammars(self) -> None:
        """Before the first request: what the first grammar would need otherwise, half a second of imports and the
        vocabulary, which llguidance reads in one call that keeps the interpreter's lock. Blocks."""
        from outrider.grammar.tokenizer import load_tokenizer

        with suppress(ConfigurationError):  # who asks for a grammar is told
            load_tokenizer(self._tokenizer.model_dir / "tokenizer.json")

    def _new_compiler(self, vocab_size: int) -> GrammarCompiler:
        from outrider.grammar import GrammarCompiler

        tokenizer = self._tokenizer
        return GrammarCompiler(
            tokenizer.model_dir / "tokenizer.json",
            vocab_size=vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
        )


@contextmanager
def _grammar_errors_name(parameter: str) -> Iterator[None]:
    """Errors about a grammar name what the client called it."""
    try:
        yield
    except InvalidRequest as error:
        message = error.message if parameter == "grammar" else f"{parameter}: {error.message}"
        raise InvalidRequest(parameter, message) from error


def _is_short_chat(request: GenerationInput) -> bool:
    """Whether its template is rendered in no time, as far as can be seen from outside."""
    messages = request.messages or ()
    if request.chat_template_kwargs or len(messages) > _INLINE_MESSAGES_MAX:
        return False
    if any("tool_calls" in message for message in messages):
        return False
    return sum(len(message["content"]) for message in messages) <= LONG_TEXT_CHARS


def _check_prompt(text: str, parameter: str) -> None:
    """Raises InvalidRequest."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:  # a call's arguments are JSON within JSON, which can spell it too
        raise InvalidRequest(parameter, f"{parameter} holds half of a surrogate pair: {error}") from error
    if num_bytes > PROMPT_BYTES_MAX:
        raise InvalidRequest(parameter, f"{parameter}: the prompt is longer than {PROMPT_BYTES_MAX} bytes")


def _bad_word_token_ids(request: GenerationInput, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each bad word as the tokens it begins a text with and, where they differ, those it follows a space with."""
    found: list[tuple[int, ...]] = []
    for word in request.bad_words:
        word = word.lstrip() or word
        bare = tuple(tokenizer.encode(word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word, add_special_tokens=False))
        found.append(bare)
        # One that ends as the bare one does can never be completed anyway.
        if spaced[-len(bare) :] != bare:
            found.append(spaced)
    return found
