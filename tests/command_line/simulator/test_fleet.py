"""Fleet files: what is right is read, what is wrong is refused by name."""

from __future__ import annotations

import pytest

from command_line.simulator.fleet import Fleet, RequestKind, TargetPool, example, parse_fleet, with_pair
from outrider.errors import InvalidRequest
from tests.command_line.simulator.profile import PROFILE


def test_the_example_is_the_default_fleet() -> None:
    assert parse_fleet(example()) == Fleet() == parse_fleet("")


def test_every_setting_is_in_the_example() -> None:
    for name in ("count", "price", "step_ms", "jitter", "rate", "concurrency", "streaks", "coordinators"):
        assert name in example()


def test_a_file_is_read() -> None:
    fleet = parse_fleet(
        """
        seed = 3
        [target]
        count = 7
        step_ms = { 1 = 20.0, 8 = 22, 32 = 54.5 }
        [draft]
        count = 2
        fixed_ms = 1
        [traffic]
        rate = 12
        [[request]]
        share = 3
        prompt_tokens = 100
        [[request]]
        output_tokens = [10, 20]
        """
    )
    assert fleet.seed == 3
    assert fleet.target.count == 7
    assert fleet.target.step_ms is not None
    assert fleet.target.forward_ms(20, 0, 0) == pytest.approx((22 + 54.5) / 2)
    assert fleet.draft.fixed_ms == 1.0
    assert fleet.traffic.rate == 12.0
    assert [kind.prompt_tokens for kind in fleet.kinds] == [(100, 100), (256, 256)]
    assert fleet.kinds[1].output_tokens == (10, 20)


def test_a_step_costs_what_it_feeds_whom_it_serves_and_what_it_reads() -> None:
    pool = TargetPool(fixed_ms=10.0, token_ms=0.5, sequence_ms=0.25, context_ms=2.0)
    assert pool.forward_ms(8, 4, 3000) == pytest.approx(10.0 + 4.0 + 1.0 + 6.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[target]\ncuont = 3", ["[target]", "'cuont'", "count", "max_num_seqs"]),
        ("[targets]", ["'targets'", "target, draft, network, traffic", "[[request]]"]),
        ("[target]\ncount = 0", ["[target]", "count", "0", "a whole number from 1"]),
        ("[target]\ncount = 1.5", ["count", "1.5"]),
        ("[target]\ncount = true", ["count", "True"]),
        ("[target]\nfixed_ms = nan", ["fixed_ms", "nan", "a number from 0"]),
        ("[target]\nstep_ms = 3", ["step_ms", "milliseconds by number of tokens"]),
        ("[target]\nstep_ms = { x = 3 }", ["step_ms"]),
        ("[target]\nstep_ms = {}", ["step_ms"]),
        ("[target]\nalways_listen = 1", ["always_listen", "true or false"]),
        ("[target]\nmax_num_seqs = 400\nmax_num_batched_tokens = 300", ["--max-num-batched-tokens is 300"]),
        ("[target]\nkv_tokens = 64", ["kv_tokens", "512 tokens"]),
        ("[target]\nmax_model_len = 300", ["max_model_len", "512 tokens"]),
        ("[network]\njitter = -1", ["[network]", "jitter", "0 to 100"]),
        ("[traffic]\nrate = 1\nconcurrency = 1", ["rate", "concurrency", "give one"]),
        ("[[request]]\nacceptance = 1.5", ["[[request]]", "acceptance", "0 to 1"]),
        ("[[request]]\nprompt_tokens = [9, 3]", ["prompt_tokens", "[least, most]"]),
        ("[[request]]\nshare = 0", ["share"]),
        ("[[request]]\nprompt_tokens = 4\nshared_prefix = 5", ["shared_prefix"]),
        ("request = 3", ["[[request]] is not a table"]),
        ("request = []", ["[[request]]"]),
        ("seed = -1", ["seed", "-1"]),
        ("seed = [", ["not TOML"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(text: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_fleet(text)
    assert not [word for word in words if word not in raised.value.message], raised.value.message


def test_what_is_not_said_follows_from_the_rest() -> None:
    fleet = Fleet(target=TargetPool(count=10, max_num_seqs=8))
    assert fleet.concurrency == fleet.with_pools(3, 1).concurrency == 40, "50 % of all slots"
    assert fleet.price == 10 * 4.0 + 4 * 1.0


def test_a_measured_pair_takes_the_place_of_costs_and_chances() -> None:
    fleet = with_pair(Fleet(kinds=(RequestKind(output_tokens=(5, 5)),)), PROFILE)
    # One session's plain step: the forward pass, and what the worker adds to a step and to a session.
    assert fleet.target.forward_ms(1, 1, 0) == pytest.approx(1.0 + 0.25 + 0.1)
    # Of two sessions the second one costs a row, a sequence, and its own overhead.
    assert fleet.target.forward_ms(8, 2, 0) == pytest.approx(2.0 + 0.1 + 0.25 + 2 * 0.1)
    assert fleet.draft.forward_ms(8, 1, 0) == pytest.approx(0.6 + 0.4 + 0.09)
    assert (fleet.target.hinted_ms, fleet.target.hinted_sequence_ms, fleet.network.worker_ms) == (
        0.2,
        0.3,
        0.15,
    )
    assert fleet.texts == ((0, 0, 1), (4, 0))


@pytest.mark.parametrize(("device", "has_branches"), [("cpu", True), ("cuda", False)])
def test_targets_verify_branches_on_the_device_where_the_pair_was_measured(device: str, has_branches: bool) -> None:
    fleet = with_pair(Fleet(), PROFILE | {"settings": {"device": device}})
    assert fleet.target_limits().verifies_branches is has_branches
    assert not Fleet().target_limits().verifies_branches


@pytest.mark.parametrize("missing", list(PROFILE))
def test_another_json_file_is_no_pair(missing: str) -> None:
    with pytest.raises(InvalidRequest, match="outrider tune --json"):
        with_pair(Fleet(), {name: value for name, value in PROFILE.items() if name != missing})
