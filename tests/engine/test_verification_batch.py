"""A step's sequences are verified together: with the bits of one after the other, and the host waits twice at most."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.sampling import verification
from outrider.engine.sampling.logprobs import ScoredRows
from outrider.engine.sampling.verification import Verdict, verify
from outrider.sampling_params import AcceptanceRule, DecodingMode, SamplingParams
from tests.engine import one_by_one
from tests.engine.verification_cases import Case, random_case, verify_together

REJECTION = {"temperature": 0.9, "seed": None}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.9, "seed": 3},
    "rejection": REJECTION,
}


def verify_alone(case: Case) -> Verdict:
    """By the reference."""
    return one_by_one.verify(case.logits, case.hints, case.params, case.seed, case.text, case.rule)


@pytest.mark.parametrize("vocab_size", [5, 40, 1003])
def test_verdicts_are_those_of_one_sequence_after_the_other(vocab_size: int) -> None:
    luck = random.Random(vocab_size)
    num_accepted = num_ended = 0
    for _ in range(20):
        cases = [random_case(luck, vocab_size) for _ in range(luck.randint(1, 12))]
        for case, verdict in zip(cases, verify_together(cases), strict=True):
            assert verdict == verify_alone(case), case
            num_accepted += verdict.num_accepted
            num_ended += not verdict.token_ids
    assert num_accepted > 20
    assert num_ended > 0 or vocab_size > 5


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_large_vocabulary_and_several_threads_do_not_change_them(mode: str, num_threads: int) -> None:
    luck = random.Random(num_threads)
    filters = {"top_k": 30, "top_p": 0.9} if mode == "rejection" else {}
    cases = [random_case(luck, 32_003, **MODES[mode], **filters, num_logprobs=3) for _ in range(3)]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert verify_together(cases) == [verify_alone(case) for case in cases]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_a_sequence_does_not_depend_on_the_batch_composition(vocab_size: int) -> None:
    """I2, log probabilities to the last bit: alone, in any order, among sequences of other modes and lengths."""
    luck = random.Random(vocab_size)
    cases = [random_case(luck, vocab_size, num_logprobs=5) for _ in range(24)]
    alone = [verify_together([case])[0] for case in cases]
    for _ in range(8):
        chosen = luck.sample(range(len(cases)), luck.randint(2, len(cases)))
        assert verify_together([cases[index] for index in chosen]) == [alone[index] for index in chosen]


def test_a_row_without_any_number_leaves_the_others_alone() -> None:
    """I7: a model that broke for one sequence, or parameters that leave it no token."""
    luck = random.Random(1)
    for mode in MODES.values():
        cases = [random_case(luck, 30, **mode, num_logprobs=2, allowed_token_ids=frozenset()) for _ in range(3)]
        expected = [verify_together([case])[0] for case in cases]
        for broken in (torch.nan, -torch.inf):
            rows = torch.full_like(cases[1].logits, broken)
            verdicts = verify_together([cases[0], replace(cases[1], logits=rows), cases[2]])
            assert [verdicts[0], verdicts[2]] == [expected[0], expected[2]]
            assert all(0 <= token_id < 30 for token_id in verdicts[1].token_ids)


class HostReads(TorchFunctionMode):
    """Counts what brings elements of tensors to the host, by the methods that do so."""

    NAMES = ("tolist", "item", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(function, "__name__", "") in self.NAMES
        return function(*args, **(kwargs or {}))


class NoWaits(TorchDispatchMode):
    """Refuses operations for which a device has to be waited for: what they return depends on elements."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split("::")[1].split(".")[0]
        assert name not in self.NAMES, f"the host would wait in {name}"
        if name in ("index", "index_put", "index_put_"):
            assert all(each is None or each.dtype != torch.bool for each in args[1]), "a mask as an index waits"
        return function(*args, **(kwargs or {}))


def num_waits(cases: list[Case]) -> int:
    with HostReads() as reads, NoWaits():
        verify_together(cases)
    return reads.count


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_as_often_for_many_sequences_and_hints_as_for_one(mode: str, rule: AcceptanceRule) -> None:
    luck = random.Random(3)
    plain = MODES[mode] | {"num_logprobs": None}
    cases = [replace(random_case(luck, 40, **plain), rule=rule) for _ in range(30)]
    few = [case for case in cases if len(case.hints) == 1][:1]
    assert num_waits(cases) == num_waits(few) == (2 if mode == "rejection" else 1)


def test_the_host_waits_twice_where_everything_is_asked_for_and_once_for_plain_sampling() -> None:
    luck = random.Random(4)
    cases = [random_case(luck, 40) for _ in range(40)]
    assert {case.params.decoding_mode for case in cases} == set(DecodingMode)
    assert num_waits(cases) == 2
    params = SamplingParams(top_p=0.9)
    unhinted = [
        replace(case, logits=case.logits[:1], hints=[], params=params, text=replace(case.text, continuations=[[]]))
        for case in cases
        if case.text.grammar is None
    ]
    assert num_waits(unhinted) == 1


def test_nothing_but_the_transfers_needs_elements_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose tensors have shapes only, everything runs; what the host would read is made up."""

    def read(parts: list[torch.Tensor]) -> list[list[float]]:
        assert all(part.device.type == "meta" for part in parts)
        return [[0.25] * part.numel() if part.is_floating_point() else [0] * part.numel() for part in parts]

    monkeypatch.setattr(verification, "to_host", read)
    luck = random.Random(5)
    cases = [random_case(luck, 40, num_logprobs=luck.choice([None, 2])) for _ in range(40)]
    requests, first_row = [], 0
    for case in cases:
        requests.append(case.request(first_row))
        first_row += len(case.logits)
    logits = torch.empty(first_row, 40, device="meta")
    prompts = [ScoredRows(logits[:2], torch.empty(2, dtype=torch.int64, device="meta"), 3)]
    verdicts, scored = verify(logits, requests, prompts)
    assert len(verdicts) == len(cases)
    assert [len(each) for each in scored] == [2]
