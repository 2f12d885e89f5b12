"""Which hints become tokens, for all sequences of a step at once.

One forward pass over a sequence's last committed token and v hints gives v + 1 distributions, rows of the step's
logits [num_rows, vocab_size]. The host waits for the device at most twice in a step, however many sequences and hints
there are: for the choices of greedy and coupled decoding and what rejection sampling has to know to accept hints; then
for tokens that are sampled where hints end, and for log probabilities.

A row's bits depend on its own sequence alone (invariant I2): sequences that are decided in the same way are rows of the
same operations, and each of these keeps to its row.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.engine.sampling.logit_processing import NEVER, apply_edits
from outrider.engine.sampling.logprobs import ScoredRows
from outrider.engine.sampling.rejection import (
    Acceptance,
    accept,
    draft_distribution,
    residuals,
    sample_number,
)
from outrider.engine.sampling.sampling import (
    coupled_choices,
    coupled_keys,
    greedy_tokens,
    row_probabilities,
    sample_rows,
)
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engine.sampling.transfers import NOTHING, filled, to_host
from outrider.engine.sampling.verdict import Verdict as Verdict
from outrider.engine.sampling.verdict import VerificationRequest as VerificationRequest
from outrider.hints.hint_tree import Branch, Hint
from outrider.sampling_params import DecodingMode

NO_TOKEN = -1
"""Follows the accepted hints where the parameters leave no token, or the last hint was not fed and is accepted."""


class _Group(enum.IntEnum):
    """Sequences that are decided in the same way. The rows of all but the first are processed, in this order."""

    GREEDY_RAW = 0  # on the model's own logits
    GREEDY_EDITED = 1  # on processed logits
    COUPLED = 2
    REJECTION = 3

    @classmethod
    def of(cls, request: VerificationRequest) -> _Group:
        match request.params.decoding_mode:
            case DecodingMode.GREEDY:
                return cls.GREEDY_RAW if request.edits is None else cls.GREEDY_EDITED
            case DecodingMode.COUPLED:
                return cls.COUPLED
        return cls.REJECTION


@dataclass(slots=True)
class _Decision:
    """The part of a verdict that is known after the first transfer."""

    num_matched: int
    token_id: int | None  # that follows; None: it is to be sampled
    scale: float = 1.0  # of the residual that it is sampled from
    trail: tuple[int, ...] = ()  # as in a verdict

    @property
    def num_tokens(self) -> int:
        return self.num_matched + len(self.trail) + (self.token_id != NO_TOKEN)


def verify(
    logits: torch.Tensor, requests: Sequence[VerificationRequest], prompts: Sequence[ScoredRows] = ()
) -> tuple[list[Verdict], list[list[TokenLogprobs]]]:
    """Decides each request's tokens, as far as its hints are accepted; and scores tokens of prompts.

    logits: the model's own, float32 [num_rows, vocab_size], left as they are.
    """
    batch = _Batch(logits, requests)
    decisions = batch.decide(to_host(batch.evidence()))
    sampled = batch.sample(decisions)
    by_num_top = batch.wanting_logprobs(decisions)
    scored = [*prompts]
    scored += [batch.scored_rows(decisions, sampled, *each) for each in by_num_top.items()]
    sampled_ids, *scores = to_host([sampled, *(part for each in scored for part in each.scores())])
    following = iter(sampled_ids)
    verdicts = []
    for request, decision in zip(requests, decisions, strict=True):
        token_id = int(next(following)) if decision.token_id is None else decision.token_id
        trail = decision.trail
        verdicts.append(verdict(request.hints, decision.num_matched, token_id, request.branches, trail))
    logprobs = [each.read(scores[4 * index : 4 * index + 4]) for index, each in enumerate(scored)]
    for members, rows in zip(by_num_top.values(), logprobs[len(prompts) :], strict=True):
        end = 0
        for index in members:
            start, end = end, end + len(verdicts[index].token_ids)
            verdicts[index] = replace(verdicts[index], logprobs=rows[start:end])
    return verdicts, logprobs[: len(prompts)]


def greedy_verdicts(
    logits: torch.Tensor, parts: Sequence[tuple[Sequence[Hint], Sequence[Branch], int]]
) -> list[Verdict | None]:
    """Decides, as `verify` does, sequences whose tokens are the most likely ones of the model's own logits.

    parts: hints, branches and number of rows of each sequence, in the order of the rows; None is decided by no rows.
    """
    choices = to_host([greedy_tokens(logits)])[0]
    verdicts: list[Verdict | None] = []
    end = 0
    for hints, branches, num_rows in parts:
        start, end = end, end + num_rows
        if not num_rows:
            verdicts.append(None)
            continue
        num_matched, token_id, trail = _choose(choices[start:end], hints, branches)
        verdicts.append(verdict(hints, num_matched, token_id, branches, trail))
    return verdicts


class _Batch:
    """The requests in groups, and their rows on the device."""

    def __init__(self, logits: torch.Tensor, requests: Sequence[VerificationRequest]) -> None:
        self._logits = logits  # [num_rows of the step, vocab_size]
        self._requests = requests
        self._groups = [_Group.of(request) for request in requests]
        # First row of each request in `_processed`, and of each group.
        self._starts: dict[int, int] = {}
        self._bounds = [0] * len(_Group)
        rows: list[int] = []
        for group in list(_Group)[1:]:
            for index in self._members(group):
                first_row = requests[index].first_row
                self._starts[index] = len(rows)
                rows += range(first_row, first_row + requests[index].num_rows)
            self._bounds[group] = len(rows)
        self._is_dead: torch.Tensor | None = None  # rows of `_processed` that leave no token; None: there are none
        self._processed = self._process(rows) if rows else NOTHING
        self._num_greedy = self._bounds[_Group.GREEDY_EDITED]  # rows that need no probabilities
        self._probs = NOTHING
        if len(rows) > self._num_greedy:
            self._probs = self._processed[self._num_greedy :]
            sampled = [index for index in self._starts if self._starts[index] >= self._num_greedy]
            params = [requests[index].params for index in sampled for _ in range(requests[index].num_rows)]
            self._probs = row_probabilities(self._probs, params)

    def _members(self, group: _Group) -> Iterator[int]:
        return (index for index, own in enumerate(self._groups) if own is group)

    def _process(self, rows: list[int]) -> torch.Tensor:
        """The rows after everything that greedy decoding heeds too."""
        first_row = rows[0]
        if rows == list(range(first_row, first_row + len(rows))):
            own = self._logits[first_row : first_row + len(rows)]
        else:
            own = self._logits.index_select(0, filled(rows, np.int64, self._logits.device))
        edits = [(start, self._requests[index].edits) for index, start in self._starts.items()]
        processed = apply_edits(own, [(start, each) for start, each in edits if each is not None])
        if processed is not own:  # the model's own logits leave every token
            self._is_dead = processed.amax(dim=-1) == NEVER
        return processed

    def evidence(self) -> list[torch.Tensor]:
        """The numbers that the host needs: choices of the logits' rows and of the processed greedy and coupled rows;
        which processed rows leave no token; target_probs at the tokens that the draft could have sent."""
        coupled = slice(0, self._bounds[_Group.COUPLED] - self._num_greedy)
        row_keys = [
            row_key
            for index in self._members(_Group.COUPLED)
            for row_key in coupled_keys(self._requests[index].seed, self._requests[index].text.positions)
        ]
        indices = [
            flat_index
            for index in self._members(_Group.REJECTION)
            for row, hint in enumerate(self._requests[index].hints, self._starts[index] - self._num_greedy)
            for flat_index in self._drafted_indices(row, hint)
        ]
        device = self._logits.device
        return [
            greedy_tokens(self._logits) if _Group.GREEDY_RAW in self._groups else NOTHING,
            self._processed[: self._num_greedy].argmax(dim=-1) if self._num_greedy else NOTHING,
            coupled_choices(self._probs[coupled], row_keys) if row_keys else NOTHING,
            NOTHING if self._is_dead is None else self._is_dead,
            torch.take(self._probs, filled(indices, np.int64, device)) if indices else NOTHING,
        ]

    def _drafted_indices(self, row: int, hint: Hint) -> Iterator[int]:
        """Positions, in the flattened rows, of the tokens that the draft could have sent in place of a hint."""
        start = row * self._logits.shape[-1]
        return (start + token_id for token_id in draft_distribution(hint).token_ids)

    def decide(self, evidence: Sequence[Sequence[float]]) -> list[_Decision]:
        """How many of each request's hints are accepted."""
        maxima, greedy, coupled, is_dead, target_at = evidence
        choices = [*greedy, *coupled]
        remaining = iter(target_at)
        decisions = []
        for index, (request, group) in enumerate(zip(self._requests, self._groups, strict=True)):
            num_alive = request.num_rows
            if group is _Group.GREEDY_RAW:
                first_row = request.first_row
                decisions.append(_chosen(maxima[first_row : first_row + num_alive], request))
                continue
            start = self._starts[index]
            rows = slice(start, start + num_alive)
            has_dead = bool(is_dead) and any(is_dead[rows])
            if group is not _Group.REJECTION:
                own_choices = choices[rows]
                if has_dead:
                    own_choices = [
                        NO_TOKEN if dead else choice for choice, dead in zip(own_choices, is_dead[rows], strict=True)
                    ]
                decisions.append(_chosen(own_choices, request))
                continue
            if has_dead:
                num_alive = is_dead.index(True, start) - start
            own = [[next(remaining) for _ in draft_distribution(hint).token_ids] for hint in request.hints]
            # Beyond a position that leaves no token nothing can be decided. Where that is depends on the hints before
            # it only, so that it biases nothing.
            hints = request.hints[:num_alive]
            accepted = accept(request.acceptance_rule, own, hints, request.seed, request.position)
            token_id = None if accepted.num_accepted < num_alive else NO_TOKEN
            decisions.append(_Decision(accepted.num_accepted, token_id, accepted.scale))
        return decisions

    def sample(self, decisions: Sequence[_Decision]) -> torch.Tensor:
        """The tokens that are to be sampled, int64 [num_sampled, 1], in the order of their requests."""
        rows: list[int] = []
        numbers: list[list[float]] = []
        scales: list[list[float]] = []
        indices: list[int] = []
        draft_probs: list[float] = []
        for index, decision in enumerate(decisions):
            if decision.token_id is not None:
                continue
            request, num_accepted = self._requests[index], decision.num_matched
            if num_accepted < len(request.hints):
                rejected = request.hints[num_accepted]
                distribution = draft_distribution(rejected)
                indices += self._drafted_indices(len(rows), rejected)
                draft_probs += (weight / distribution.total for weight in distribution.weights)
            rows.append(self._starts[index] - self._num_greedy + num_accepted)
            scales.append([decision.scale])
            acceptance = Acceptance(num_accepted, decision.scale)
            numbers.append([sample_number(acceptance, len(request.hints), request.seed, request.position)])
        if not rows:
            return NOTHING
        device = self._logits.device
        weights = self._probs.index_select(0, filled(rows, np.int64, device)).double()
        if indices:
            scale, drafted = filled(scales, np.float64, device), filled(draft_probs, np.float64, device)
            weights = residuals(weights, scale, filled(indices, np.int64, device), drafted)
        return sample_rows(weights, filled(numbers, np.float64, device))

    def wanting_logprobs(self, decisions: Sequence[_Decision]) -> dict[int, list[int]]:
        """Requests whose new tokens are asked for log probabilities, by the number of likeliest tokens beside.

        They are scored together, but not with others: which of two equals is among the likeliest depends on how many
        are taken.
        """
        members: dict[int, list[int]] = defaultdict(list)
        for index, (request, decision) in enumerate(zip(self._requests, decisions, strict=True)):
            if request.params.num_logprobs is not None and decision.num_tokens:
                members[request.params.num_logprobs].append(index)
        return members

    def scored_rows(
        self, decisions: Sequence[_Decision], sampled: torch.Tensor, num_top: int, members: Sequence[int]
    ) -> ScoredRows:
        """The rows of these requests' new tokens."""
        order = [index for index, decision in enumerate(decisions) if decision.token_id is None]
        token_ids: list[int] = []
        indices, sources = [], []
        for index in members:
            request, decision = self._requests[index], decisions[index]
            token_ids += (hint.token_id for hint in request.hints[: decision.num_matched])
            token_ids += (request.branches[branch].hint.token_id for branch in decision.trail)
            if decision.token_id is None:
                indices.append((len(token_ids), order.index(index)))
            if decision.token_id != NO_TOKEN:
                token_ids.append(decision.token_id or 0)  # a sampled one overwrites the 0 below
            sources.append(self._source(index, decision))
        device = self._logits.device
        on_device = filled(token_ids, np.int64, device)
        if indices:
            to, of = filled(indices, np.int64, device).unbind(dim=-1)
            on_device = on_device.index_copy(0, to, sampled.view(-1).index_select(0, of))
        return ScoredRows(sources[0] if len(sources) == 1 else torch.cat(sources), on_device, num_top)

    def _source(self, index: int, decision: _Decision) -> torch.Tensor:
        """The rows that the log probabilities of a request's new tokens are taken from."""
        request, group = self._requests[index], self._groups[index]
        if not request.params.are_logprobs_processed or group is _Group.GREEDY_RAW:
            rows, start = self._logits, request.first_row
        elif group is _Group.GREEDY_EDITED:
            rows, start = self._processed, self._starts[index]
        else:
            rows, start = self._probs, self._starts[index] - self._num_greedy
        if not decision.trail:
            own = rows[start : start + decision.num_tokens]
        else:
            numbers = [*range(decision.num_matched + 1), *(request.num_path_rows + branch for branch in decision.trail)]
            chosen = [start + number for number in numbers[: decision.num_tokens]]
            own = rows.index_select(0, filled(chosen, np.int64, rows.device))
        return own.log() if rows is self._probs else own


def _chosen(choices: Sequence[float], request: VerificationRequest) -> _Decision:
    num_matched, token_id, trail = _choose(choices, request.hints, request.branches)
    return _Decision(num_matched, token_id, trail=trail)


def _choose(
    choices: Sequence[float], hints: Sequence[Hint], branches: Sequence[Branch]
) -> tuple[int, int, tuple[int, ...]]:
    """Greedy and coupled: the target's choices are known, a hint is accepted when it is the same token.

    choices: of a sequence's rows, NO_TOKEN where there is none. Returns how many hints match, the token that follows or
    NO_TOKEN, and the branches between them.
    """
    num_path_rows = len(choices) - len(branches)
    num_matched = 0
    for hint, choice in zip(hints, choices[:num_path_rows], strict=False):
        if hint.token_id != choice:
            break
        num_matched += 1
    if num_matched == num_path_rows:  # the last hint, which was not fed, is the last token
        return num_matched, NO_TOKEN, ()
    token_id = int(choices[num_matched])
    trail: tuple[int, ...] = ()
    for index, branch in enumerate(branches):  # each comes after those that lead to it
        if branch.on_path == num_matched and branch.trail[:-1] == trail and branch.hint.token_id == token_id:
            trail, token_id = branch.trail, int(choices[num_path_rows + index])
    return num_matched, token_id, trail


def verdict(
    hints: Sequence[Hint],
    num_matched: int,
    token_id: int,
    branches: Sequence[Branch] = (),
    trail: tuple[int, ...] = (),
) -> Verdict:
    """So many hints are accepted, then the branches of a trail, and then a token follows unless it is NO_TOKEN."""
    token_ids = [hint.token_id for hint in hints[:num_matched]]
    token_ids += (branches[branch].hint.token_id for branch in trail)
    if token_id != NO_TOKEN:
        return Verdict([*token_ids, token_id], num_matched, num_matched, trail=trail)
    # A step has one token more than accepted hints: without a token of its own the last accepted one, of the trail or
    # else of the path, counts as that.
    return Verdict(token_ids, max(num_matched - (not trail), 0), num_matched, trail=trail[:-1])
