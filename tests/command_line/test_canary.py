"""`outrider canary` on a real Redis, with replicas that the test plays."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner, Result

from command_line import app
from command_line.canary import command
from command_line.canary.command import parse_duration
from command_line.canary.report import in_words
from outrider.canary.plan import ArmName, CanaryState
from outrider.canary.statistics import ArmStatistics, Count, RequestFigures
from outrider.canary.store import Batch, CanaryStore, CanaryView
from outrider.errors import ConfigurationError, OutriderError, RegistryUnavailable
from outrider.local.free_ports import free_ports
from outrider.local.system_folder import new_system_folder, redis_url_files, write_redis_url
from outrider.registry.registry import Registry

RUNNER = CliRunner(env={"COLUMNS": "160"})
ResultT = TypeVar("ResultT")


class Operator:
    """An operator who runs `outrider canary` at a terminal, on a given Redis."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_batches = 0

    def run(self, *words: object, exits: int = 0) -> str:
        result = self.invoke(*words)
        assert result.exit_code == exits, result.output
        return result.stdout

    def invoke(self, *words: object) -> Result:
        return RUNNER.invoke(app, ["canary", *map(str, words), "--redis-url", self.url])

    def refused(self, *words: object) -> OutriderError:
        """The error that `main` prints."""
        error = self.invoke(*words).exception
        assert isinstance(error, OutriderError)
        return error

    def status(self, exits: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", "--json", exits=exits))
        return found

    def with_store(self, work: Callable[[CanaryStore], Awaitable[ResultT]]) -> ResultT:
        async def run() -> ResultT:
            registry = Registry(self.url)
            try:
                return await work(CanaryStore(registry))
            finally:
                await registry.close()

        return asyncio.run(run())

    def see(self, num: int, canary_ms: float = 10.0, **counts: int) -> None:
        """Requests of both arms finish at some replica; control's need 10 ms a token on average."""
        sums = {}
        for arm, tpot_ms in ((ArmName.CONTROL, 10.0), (ArmName.CANARY, canary_ms)):
            statistics = ArmStatistics()
            for number in range(num):
                factor = 1.2 if number % 2 else 0.8
                statistics.add(
                    RequestFigures(
                        ttft_ms=100 * factor, tpot_ms=tpot_ms * factor, e2e_ms=1000.0, num_draft_tokens=10,
                        num_accepted_draft_tokens=7,
                    ),
                    number // 2,
                )  # fmt: skip
            if arm is ArmName.CANARY:
                for what, count in counts.items():
                    for group in range(count):
                        statistics.lose(Count(what), group)
            sums[arm] = statistics.sums
        self.num_batches += 1
        self.with_store(lambda store: self._hand_over(store, sums))

    async def _hand_over(self, store: CanaryStore, sums: dict[ArmName, dict[str, float]]) -> CanaryView:
        canary = (await store.exchange()).canary
        assert canary is not None
        return await store.exchange(Batch(canary.plan.canary_id, "a replica", self.num_batches, sums))


@pytest.fixture
def operator(redis_url: str) -> Operator:
    made = Operator(redis_url)
    made.with_store(lambda store: store.forget())
    return made


def test_a_canary_is_started_as_the_flags_say(operator: Operator) -> None:
    shown = operator.run(
        "start", "--draft-model", "v2", "--num-speculative-tokens", 4, "--share", 0.25, "--objective", "ttft",
        "--margin", 0.1, "--min-requests", 60, "--alpha", 0.01, "--duration", "90m", "--auto", "--audit-share", 0.5,
        "--model", "large",
    )  # fmt: skip
    assert "draft model v2, at most 4 speculative tokens, 25.0% of the keys, waiting" in shown
    assert "90 min left; acts as the rule says" in shown
    canary = operator.status(exits=3)["canary"]
    canary_id = canary.pop("canary_id")
    assert len(canary_id) == 8
    assert canary.pop("seconds_left") == pytest.approx(5400, abs=30)
    assert canary == {
        "change": {"speculates": True, "draft_model": "v2", "num_speculative_tokens": 4},
        "share": 0.25, "model": "large", "audit_share": 0.5, "duration_s": 5400.0, "is_automatic": True,
        "state": "waiting", "share_now": 0.0, "reason": "",
        "rule": {
            "objective": "ttft", "margin": 0.1, "failure_margin": 0.005, "requests_min": 60, "alpha": 0.01,
        },
    }  # fmt: skip


def test_without_flags_it_recommends_and_audits_a_little_where_there_is_speculation(
    operator: Operator,
) -> None:
    operator.run("start", "--num-speculative-tokens", 2)
    canary = operator.status(exits=3)["canary"]
    assert (canary["share"], canary["audit_share"], canary["is_automatic"]) == (0.1, 0.02, False)
    operator.run("abort")
    operator.run("start", "--off")
    assert operator.status(exits=3)["canary"]["audit_share"] == 0.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no other than the control"),
        (("--off", "--draft-model", "x"), "without speculation"),
        (("--off", "--audit-share", 0.1), "nothing to audit"),
        (("--off", "--duration", "soon"), "is not a time of up to 30d"),
        (("--off", "--duration", "31d"), "is not a time of up to 30d"),
        (("--off", "--share", 1), "0.999"),
    ],
)
def test_a_plan_that_makes_no_sense_is_a_wrong_command_line(
    operator: Operator, words: tuple[object, ...], says: str
) -> None:
    result = operator.invoke("start", *words)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
    assert operator.status(exits=5) == {"canary": None}


def test_the_status_tells_both_arms_the_rule_and_what_is_recommended(operator: Operator) -> None:
    assert "There is no canary" in operator.run("status", exits=5)
    operator.run("start", "--off", "--share", 0.5)
    operator.see(50)
    shown = operator.run("status", exits=3)
    assert "It goes on (open: requests" in shown
    operator.see(950, canary_ms=8.0)
    shown = operator.run("status", exits=0)
    assert "Recommended: promote" in shown
    assert "passed  TPOT better: mean TPOT is certainly below control's" in shown
    assert "70% [70, 70]" in shown
    found = operator.status(exits=0)
    assert found["verdict"] == "promote"
    assert {guard["standing"] for guard in found["guards"]} == {"passed"}
    control, canary = found["arms"]["control"], found["arms"]["canary"]
    assert control["requests"]["ended"] == canary["requests"]["finished"] == 1000
    assert control["tpot_ms"]["mean"]["value"] == pytest.approx(10)
    assert canary["tpot_ms"]["p50"]["value"] == pytest.approx(8.0, rel=0.011)
    low, high = found["differences"]["tpot_ms"]["interval"]
    assert low < -1.9 < high < 0


def test_a_divergence_is_told_at_once(operator: Operator) -> None:
    operator.run("start", "--num-speculative-tokens", 2)
    operator.see(2, audited=1, diverged=1)
    shown = operator.run("status", exits=4)
    assert "broken  divergences" in shown
    assert "Recommended: abort (1 of 1 audited requests have another output" in shown


def test_audits_that_were_asked_for_and_did_not_come_are_told(operator: Operator) -> None:
    operator.run("start", "--num-speculative-tokens", 2)
    operator.see(1000, canary_ms=8.0, unaudited=7)
    shown = operator.run("status", exits=3)
    assert "open    divergences: no greedy or seeded request has been audited, as was asked for" in shown
    (line,) = (line for line in shown.splitlines() if "in the sample, not audited" in line)
    assert line.replace("│", " ").split()[-1] == "7"


def test_requests_that_ran_out_of_time_or_were_left_are_shown_and_count(operator: Operator) -> None:
    operator.run("start", "--off", "--share", 0.5)
    operator.see(400, canary_ms=8.0, late=150, left=100)
    shown = operator.run("status", exits=4)
    assert "broken  departures: 38.46% of the canary's requests run out of time or are left" in shown
    found = operator.status(exits=4)["arms"]["canary"]
    assert (found["requests"]["late"], found["requests"]["left"], found["requests"]["ended"]) == (
        150,
        100,
        650,
    )
    assert found["departure_rate"]["value"] == pytest.approx(250 / 650)


def test_the_mean_of_five_requests_has_no_interval(operator: Operator) -> None:
    operator.run("start", "--off")
    operator.see(10)  # two for each of five groups of keys
    assert operator.status(exits=3)["arms"]["canary"]["tpot_ms"]["mean"]["interval"] == [None, None]
    assert "10 ms [?, ?]" in operator.run("status", exits=3)


def test_promotion_is_for_everybody_until_it_is_aborted(operator: Operator) -> None:
    operator.run("start", "--off")
    assert "Promoted: all traffic has it" in operator.run("promote", "--reason", "half the power")
    found = operator.status(exits=0)["canary"]
    assert (found["state"], found["share_now"], found["reason"]) == ("promoted", 1.0, "half the power")
    assert found["seconds_left"] is None
    assert "everybody is back at control" in operator.run("abort")
    found = operator.status(exits=4)["canary"]
    assert (found["state"], found["share_now"]) == ("aborted", 0.0)


def test_draft_workers_of_an_aborted_canary_stay_nobodys_until_it_is_cleared(operator: Operator) -> None:
    operator.run("start", "--draft-model", "v2")
    assert "in force; promote or abort it first" in operator.refused("clear").message
    assert "Draft workers of v2 are nobody's until" in operator.run("abort")
    operator.run("clear")
    operator.status(exits=5)


def test_what_is_in_force_is_in_the_way_of_another(operator: Operator) -> None:
    operator.run("start", "--off")
    error = operator.refused("start", "--num-speculative-tokens", 2)
    assert isinstance(error, ConfigurationError)
    assert "end it first, with `outrider canary abort`" in error.message


@pytest.mark.parametrize("command", ["promote", "abort"])
def test_there_is_nothing_to_decide_without_a_canary(operator: Operator, command: str) -> None:
    assert "there is no canary in force" in operator.refused(command).message


def test_one_that_waits_cannot_be_promoted(operator: Operator) -> None:
    operator.run("start", "--draft-model", "v2")
    assert "is waiting; only one that runs can be promoted" in operator.refused("promote").message


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["table", "json"])
def test_watching_ends_when_it_is_decided(
    operator: Operator, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.run("start", "--off", "--duration", "2s")
    has_looked, exchange = threading.Event(), CanaryStore.exchange

    async def noticed(store: CanaryStore, *batch: Any) -> Any:
        found = await exchange(store, *batch)
        has_looked.set()
        return found

    monkeypatch.setattr(CanaryStore, "exchange", noticed)

    async def decide_later() -> Result:
        watching = asyncio.create_task(asyncio.to_thread(operator.invoke, "status", "--watch", "--every", 0.5, *words))
        assert await asyncio.to_thread(has_looked.wait, 20)
        registry = Registry(operator.url)
        store = CanaryStore(registry)
        canary = (await store.exchange()).canary
        assert canary is not None
        assert await store.decide(canary, CanaryState.PROMOTED, "by the test")
        await registry.close()
        return await watching

    result = asyncio.run(decide_later())
    assert result.exit_code == 0
    if words:
        states = [json.loads(line)["canary"]["state"] for line in result.stdout.splitlines()]
        assert states[0] == "running"
        assert states[-1] == "promoted"


def test_without_redis_it_says_so_and_what_to_do() -> None:
    away = Operator(f"redis://127.0.0.1:{free_ports(1)[0]}/0")
    error = away.refused("status")
    assert isinstance(error, RegistryUnavailable)
    assert "start one there" in error.message
    result = Operator("http://x").invoke("status")
    assert result.exit_code == 2


def test_the_url_may_be_in_a_file_that_the_environment_names(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a coordinator's pod, where `outrider canary` needs no flag."""
    operator.run("start", "--off", "--share", 0.25)
    path = tmp_path / "url"
    path.write_text(operator.url + "\n")
    assert RUNNER.invoke(app, ["canary", "status", "--redis-url-file", str(path)]).exit_code == 3
    monkeypatch.setenv("OUTRIDER_REDIS_URL_FILE", str(path))
    for words in (["promote"], ["abort"], ["clear"]):
        assert RUNNER.invoke(app, ["canary", *words]).exit_code == 0
    assert RUNNER.invoke(app, ["canary", "status"]).exit_code == 5


class TestWithoutAnUrl:
    """`outrider serve` leaves its Redis' URL in a folder that its own user can find."""

    @pytest.fixture(autouse=True)
    def base(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.delenv("OUTRIDER_REDIS_URL", raising=False)
        monkeypatch.delenv("OUTRIDER_REDIS_URL_FILE", raising=False)
        monkeypatch.setattr(command, "redis_url_files", lambda: redis_url_files(tmp_path))
        return tmp_path

    def test_the_one_system_that_runs_here_is_asked(self, operator: Operator, base: Path) -> None:
        operator.run("start", "--off", "--share", 0.25)
        write_redis_url(new_system_folder(base), operator.url)
        assert RUNNER.invoke(app, ["canary", "status"]).exit_code == 3

    def test_where_none_runs_the_flags_are_named(self) -> None:
        said = self.refused()
        assert "no `outrider serve` of yours runs on this machine" in said
        assert "OUTRIDER_REDIS_URL" in said

    def test_between_several_nobody_chooses(self, base: Path) -> None:
        files = [write_redis_url(new_system_folder(base), "redis://127.0.0.1:1/0") for _ in range(2)]
        said = self.refused()
        assert "several systems run on this machine" in said
        assert all(path.name in said for path in files)

    def refused(self) -> str:
        result = RUNNER.invoke(app, ["canary", "status"])
        assert result.exit_code == 2
        return " ".join(result.output.replace("│", "").split())


def test_times_are_read_and_written_with_their_units() -> None:
    assert [parse_duration(text) for text in ("90s", "1.5m", "24h", "7d")] == [90, 90, 86400, 604800]
    assert [in_words(each) for each in (30, 119, 600, 9000, 200_000)] == [
        "30 s", "119 s", "10 min", "2.5 h", "2.31 d",
    ]  # fmt: skip
