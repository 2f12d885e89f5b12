"""Reference outputs of a target, without any of our engine: by transformers' model and transformers' logits processors.

One token at a time, the whole sequence through the model's own forward pass at every token, no cache or speculation.
Nothing here imports the engine; of the product it knows the parameters alone. Their order is that of transformers:
logit_bias, repetition_penalty, presence_penalty and frequency_penalty (OpenAI's, written out here, since transformers
has none), bad_words, min_tokens, allowed_token_ids, a grammar's mask; then, unless greedy, temperature, top_k, top_p,
min_p, typical_p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process

from outrider.sampling_params import SamplingParams

Mask = Callable[[Sequence[int]], torch.Tensor]
"""Output token ids -> which tokens a grammar permits next.  # bool [vocab_size]"""

MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Ending:
    """`stop_token_id` ended the text, unless it is None: then `max_tokens` did, or what is said below."""

    stop_token_id: int | None = None
    is_stuck: bool = False  # no token was left
    is_complete: bool = False  # the grammar permits nothing more, the end of sequence aside


@dataclass(frozen=True, slots=True)
class Output:
    """`margins[i]` says how clearly the choice at `i` was the best one; the choice of the ending comes last.

    Greedy: the difference of the two greatest logits; coupled: of the logarithms of the two greatest scores.
    """

    token_ids: list[int]
    ending: Ending
    margins: list[float]


Outcome = tuple[tuple[int, ...], Ending]


class Reference:
    """One target model.

    `model` is a transformers causal language model in float32; `end_of_sequence_ids` are its own.
    """

    def __init__(self, model: Any, end_of_sequence_ids: Sequence[int]) -> None:
        self._model = model
        self._end_of_sequence_ids = sorted(end_of_sequence_ids)
        self._noise: dict[tuple[int, int], list[float]] = {}

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """The model's own, after each of `texts`, which have one length.  # float32 [num_sequences, vocab_size]"""
        return self._model(input_ids=torch.tensor(texts), use_cache=False).logits[:, -1].float()

    @torch.inference_mode()
    def all_logits(self, text: Sequence[int]) -> torch.Tensor:
        """The model's own, after every token of `text`.  # float32 [text length, vocab_size]"""
        return self._model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()

    def scores(
        self,
        logits: torch.Tensor,
        texts: Sequence[Sequence[int]],
        num_prompt_tokens: int,
        params: SamplingParams,
        mask: Mask | None = None,
    ) -> torch.Tensor:
        """`logits` after everything that `params` ask for; what is ruled out is -inf.  # [num_sequences, vocab_size]"""
        input_ids = torch.tensor(texts)
        scores = logits
        if params.logit_bias:
            biases: list[list[list[int] | float]] = [[[token_id], float(bias)] for token_id, bias in params.logit_bias]
            scores = logits_process.SequenceBiasLogitsProcessor(biases)(input_ids, scores)
        if params.repetition_penalty != 1.0:
            penalty = logits_process.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
            scores = penalty(input_ids, scores)
        if params.presence_penalty or params.frequency_penalty:
            scores = _without_penalties(scores, input_ids[:, num_prompt_tokens:], params)
        bad_words = [list(word) for word in params.bad_words]
        if any(word not in [[end] for end in self._end_of_sequence_ids] for word in bad_words):
            no_bad_words = logits_process.NoBadWordsLogitsProcessor(bad_words, self._end_of_sequence_ids or None)
            scores = no_bad_words(input_ids, scores)
        ends = sorted({*self._end_of_sequence_ids, *params.stop_token_ids})
        if params.min_tokens and ends:
            min_tokens = logits_process.MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, ends)
            scores = min_tokens(input_ids, scores)
        if params.allowed_token_ids:
            permitted = torch.zeros(scores.shape[-1], dtype=torch.bool)
            permitted[sorted(params.allowed_token_ids)] = True
            scores = scores.masked_fill(~permitted, -math.inf)
        if mask is not None:
            masks = torch.stack([mask(text[num_prompt_tokens:]) for text in texts])
            scores = scores.masked_fill(~masks, -math.inf)
        return scores if params.temperature == 0.0 else _warped(scores, input_ids, params)

    def ends(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a text and are not shown."""
        own = () if params.ignore_eos else self._end_of_sequence_ids
        return frozenset(own) | params.stop_token_ids

    def greedy(self, prompt: Sequence[int], params: SamplingParams, mask: Mask | None = None) -> Output:
        """The text of temperature 0."""

        def choose(scores: torch.Tensor, position: int) -> tuple[int, float]:
            best = scores.topk(2).values
            return int(scores.argmax()), float(best[0] - best[1])

        return self._decode(prompt, params, choose, mask)

    def coupled(self, prompt: Sequence[int], params: SamplingParams, mask: Mask | None = None) -> Output:
        """The text of `params.seed`: argmax of probability / exponential noise, in Python's own numbers."""
        assert params.seed is not None
        seed = params.seed

        def choose(scores: torch.Tensor, position: int) -> tuple[int, float]:
            noise = self._exponentials(seed, position, len(scores))
            probs = torch.softmax(scores.double(), dim=-1).tolist()
            raced = [prob / wait for prob, wait in zip(probs, noise, strict=True)]
            second, first = sorted(raced)[-2:]
            margin = math.log(first) - math.log(second) if second > 0.0 else math.inf
            return raced.index(first), margin

        return self._decode(prompt, params, choose, mask)

    def joint(self, prompt: Sequence[int], params: SamplingParams, mask: Mask | None = None) -> dict[Outcome, float]:
        """The exact probability of every output of at most `params.max_tokens` tokens."""
        finished: dict[Outcome, float] = {}
        open_prefixes: dict[tuple[int, ...], float] = {(): 1.0}
        ends = self.ends(params)
        for num_tokens in range(1, params.max_tokens + 1):
            texts = [[*prompt, *prefix] for prefix in open_prefixes]
            scores = self.scores(self.logits(texts), texts, len(prompt), params, mask)
            longer: dict[tuple[int, ...], float] = {}
            for (prefix, reach), row in zip(open_prefixes.items(), scores, strict=True):
                if bool(row.isneginf().all()):
                    finished[prefix, Ending(is_stuck=True)] = reach
                    continue
                for token_id, prob in enumerate(torch.softmax(row.double(), dim=-1).tolist()):
                    if prob == 0.0:
                        continue
                    if token_id in ends:
                        finished[prefix, Ending(token_id)] = reach * prob
                    elif self._is_complete((*prefix, token_id), mask):
                        finished[(*prefix, token_id), Ending(is_complete=True)] = reach * prob
                    elif num_tokens == params.max_tokens:
                        finished[(*prefix, token_id), Ending()] = reach * prob
                    else:
                        longer[(*prefix, token_id)] = reach * prob
            open_prefixes = longer
            if not open_prefixes:
                break
        return finished

    def _decode(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        choose: Callable[[torch.Tensor, int], tuple[int, float]],
        mask: Mask | None,
    ) -> Output:
        text, margins = list(prompt), []
        ends = self.ends(params)
        ending = Ending()
        while len(text) - len(prompt) < params.max_tokens:
            scores = self.scores(self.logits([text]), [text], len(prompt), params, mask)[0]
            if bool(scores.isneginf().all()):
                ending = Ending(is_stuck=True)
                break
            token_id, margin = choose(scores, len(text))
            margins.append(margin)
            if token_id in ends:
                ending = Ending(token_id)
                break
            text.append(token_id)
            if self._is_complete(text[len(prompt) :], mask):
                ending = Ending(is_complete=True)
                break
        return Output(text[len(prompt) :], ending, margins)

    def _is_complete(self, output: Sequence[int], mask: Mask | None) -> bool:
        if mask is None:
            return False
        permitted = mask(output).clone()
        permitted[self._end_of_sequence_ids] = False
        return not bool(permitted.any())

    def _exponentials(self, seed: int, position: int, count: int) -> list[float]:
        key = (seed, position)
        if key not in self._noise:
            self._noise[key] = exponentials(seed, position, count)
        return self._noise[key]


def _without_penalties(scores: torch.Tensor, output_ids: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """OpenAI's two penalties.  # [num_sequences, vocab_size], [num_sequences, num_output_tokens]"""
    counts = torch.zeros_like(scores)
    for row, token_ids in enumerate(output_ids.tolist()):
        for token_id in token_ids:
            counts[row, token_id] += 1.0
    return scores - params.presence_penalty * (counts > 0).float() - params.frequency_penalty * counts


def _warped(scores: torch.Tensor, input_ids: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.temperature != 1.0:
        scores = logits_process.TemperatureLogitsWarper(float(params.temperature))(input_ids, scores)
    if params.top_k:
        scores = logits_process.TopKLogitsWarper(params.top_k)(input_ids, scores)
    if params.top_p < 1.0:
        scores = logits_process.TopPLogitsWarper(params.top_p)(input_ids, scores)
    if params.min_p > 0.0:
        scores = logits_process.MinPLogitsWarper(params.min_p)(input_ids, scores)
    if params.typical_p < 1.0:
        scores = logits_process.TypicalLogitsWarper(params.typical_p)(input_ids, scores)
    return scores


# The shared noise of coupled decoding, after Steele, Lea and Flood (OOPSLA 2014).


def split_mix(seed: int, index: int) -> int:
    """The `index`-th output, from 1, of SplitMix64's stream that starts at `seed`."""
    z = (seed + index * 0x9E3779B97F4A7C15) & MASK_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK_64
    return z ^ (z >> 31)


def exponentials(seed: int, position: int, count: int) -> list[float]:
    """The exponential variates of tokens 0 to `count - 1` at one position of the text of one seed."""
    gumbel = 1  # the purpose that these numbers serve
    stream = split_mix(split_mix(split_mix(seed, 1) ^ position, 1) ^ gumbel, 1)
    return [-math.log(((split_mix(stream, token_id + 1) >> 12) + 0.5) * 2.0**-52) for token_id in range(count)]
