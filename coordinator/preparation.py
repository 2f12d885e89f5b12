"""From a request to what is known to be possible: tokenized, checked, fitted to the context, seeded.

Everything that can be refused is refused here, before any worker hears of the request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from coordinator.generation_request import (
    PROMPT_BYTES_MAX,
    GenerationInput,
    GenerationSpec,
    effective_sampling,
    fit_to_context,
)
from coordinator.settings import CoordinatorSettings
from coordinator.tool_calls import OPENING, tool_grammar
from outrider.errors import InvalidRequest
from outrider.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from outrider.tokenizer import Tokenizer
from outrider.worker_record import WorkerRecord

if TYPE_CHECKING:
    from outrider.grammar import GrammarCompiler

# Below this many characters tokenizing takes less time than handing the work to a thread.
_TOKENIZE_INLINE_CHARS_MAX: Final = 8192


class RequestPreparation:
    """One per replica; it keeps the compilers of grammars, which take a while to load."""

    def __init__(self, tokenizer: Tokenizer, settings: CoordinatorSettings, chance: random.Random) -> None:
        """`chance` draws seeds where the operator wants requests to have one."""
        self._tokenizer = tokenizer
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
                compiler = self._compiler(vocab_size)
                await compiler.check_async(request.sampling.grammar, request.tenant)
        sampling = effective_sampling(
            request,
            max_tokens,
            bad_words=_bad_word_token_ids(request, tokenizer),
            seed=self._seed(request.sampling),
        )
        deadline_s = settings.deadline_default_s if request.deadline_s is None else request.deadline_s
        if not 0 < deadline_s <= settings.deadline_max_s:
            raise InvalidRequest("deadline_ms", f"the deadline may be at most {settings.deadline_max_s:g} s")
        return GenerationSpec(
            request=request,
            model=model,
            prompt_token_ids=tuple(prompt_token_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            deadline_s=deadline_s,
            prompt_text=self._echoed(request),
            # A model whose marks of a call are special tokens would hide its calls.
            shows_special_tokens=not request.skip_special_tokens
            or (
                request.tools is not None and tokenizer.is_special(tokenizer.added_token_ids.get(OPENING, -1))
            ),
        )

    async def tokenize(self, request: GenerationInput, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt as token ids. Raises InvalidRequest when it is too long or the chat template refuses the
        messages."""
        if request.token_ids is not None:
            return list(request.token_ids)
        tokenizer = self._tokenizer
        if request.messages is not None:
            parameter, text = (
                "messages",
                tokenizer.render_chat(request.messages, **request.chat_template_kwargs),
            )
            add_special_tokens = False  # the template writes them
        else:
            parameter, text = "prompt", request.text or ""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:  # a call's arguments are JSON within JSON, which can spell it too
            raise InvalidRequest(parameter, f"{parameter} holds half of a surrogate pair: {error}") from error
        if num_bytes > PROMPT_BYTES_MAX:
            raise InvalidRequest(
                parameter, f"{parameter}: the prompt is longer than {PROMPT_BYTES_MAX} bytes"
            )
        if len(text) <= _TOKENIZE_INLINE_CHARS_MAX:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _seed(self, sampling: SamplingParams) -> int | None:
        is_drawn = self._settings.seed_requests and sampling.temperature > 0
        # Clients that keep numbers as floating-point ones can give 53 bits back unchanged.
        return self._chance.getrandbits(53) if is_drawn and sampling.seed is None else sampling.seed

    def _echoed(self, request: GenerationInput) -> str | None:
        if not request.echo:
            return None
        if request.text is not None:
            return request.text
        return self._tokenizer.decode(
            request.token_ids or (), skip_special_tokens=request.skip_special_tokens
        )

    def _compiler(self, vocab_size: int) -> GrammarCompiler:
        compiler = self._compilers.get(vocab_size)
        if compiler is None:
            # Imported with the first grammar: most deployments never see one.
            from outrider.grammar import GrammarCompiler

            tokenizer = self._tokenizer
            compiler = self._compilers[vocab_size] = GrammarCompiler(
                tokenizer.model_dir / "tokenizer.json",
                vocab_size=vocab_size,
                eos_token_ids=tokenizer.eos_token_ids,
            )
        return compiler


@contextmanager
def _grammar_errors_name(parameter: str) -> Iterator[None]:
    """Errors about a grammar name what the client called it."""
    try:
        yield
    except InvalidRequest as error:
        message = error.message if parameter == "grammar" else f"{parameter}: {error.message}"
        raise InvalidRequest(parameter, message) from error


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
