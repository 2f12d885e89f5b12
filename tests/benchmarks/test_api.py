"""HTTP servers side by side: how they are started, who has which turn, what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers.process import PeerError
from benchmarks.serving.api import SYSTEMS, commands, compare, draw, parse, schedule
from benchmarks.serving.http_servers import HttpServer, ServerCommand, outrider_server, vllm_server
from command_line.bench.cells import TurnResult, cells
from command_line.load.load import Level, Loop
from command_line.load.summary import RequestResult, Slo
from outrider.local.free_ports import free_ports

LEVEL = Level(Loop.CLOSED, 8)


def test_outrider_is_one_server_and_two_systems() -> None:
    servers = [system.server for system in SYSTEMS]
    assert servers.count("outrider") == 2
    assert SYSTEMS[0].extra == {"speculation": {"enabled": False}}


def test_every_server_is_started_once_on_a_port_of_its_own() -> None:
    arguments, systems, _ = parse(["--vllm-python", "/env/bin/python"])
    made = commands(arguments, systems, Path("t"))
    assert [each.name for each in made] == ["outrider", "vllm-plain", "vllm-draft"]
    assert len({each.port for each in made}) == 3


def test_vllm_has_both_cores_and_only_the_speculating_one_a_draft() -> None:
    options = {"port": 1, "num_speculative_tokens": 5, "max_num_seqs": 32, "cores": "0-1"}
    with_draft = vllm_server(Path("p"), Path("t"), Path("d"), **options)  # type: ignore[arg-type]
    place = with_draft.command.index("--speculative-config")
    assert json.loads(with_draft.command[place + 1]) == {
        "method": "draft_model", "model": str(Path("d").resolve()), "num_speculative_tokens": 5,
    }  # fmt: skip
    assert with_draft.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    plain = vllm_server(Path("p"), Path("t"), None, **options)  # type: ignore[arg-type]
    assert plain.name == "vllm-plain"
    assert "--speculative-config" not in plain.command


def test_outrider_is_started_by_its_command_line() -> None:
    made = outrider_server(Path("t"), Path("d"), port=5, grpc_port=6)
    assert made.command[:4] == (sys.executable, "-m", "command_line", "serve")
    assert made.url == "http://127.0.0.1:5"


async def test_a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = ServerCommand("broken", free_ports(1)[0], (sys.executable, "-c", "print('no model'); exit(3)"), {})
    with pytest.raises(PeerError, match="broken did not start:\nno model"):
        await HttpServer.start(broken, tmp_path)


def test_systems_take_turns_and_the_first_one_rotates() -> None:
    taken = list(schedule([LEVEL], 3, 3))
    assert [each.server for each in taken] == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert [each.number for each in taken] == [0] * 3 + [1] * 3 + [2] * 3


def result(num_tokens: int) -> RequestResult:
    return RequestResult(0, 0.0, 1.0, ttft_s=0.1, e2el_s=1.0, itl_s=(0.1,), num_output_tokens=num_tokens)


def test_ratios_are_taken_within_rounds(tmp_path: Path) -> None:
    # The machine is twice as fast in the second round.
    rates = {"outrider-draft": (300, 600), "vllm-draft": (100, 200)}
    measured = [
        TurnResult(turn, (result(list(rates.values())[turn.server][turn.number]),), 0.1, 1.0)
        for turn in schedule([LEVEL], 2, 2)
    ]
    found = cells(list(rates), measured, Slo())
    assert compare(found) == {
        "concurrency 8": {"outrider-draft / vllm-draft": {"median": 3.0, "quartiles": [3.0, 3.0], "rounds": 2}}
    }
    draw(tmp_path / "api.svg", found, "Title")
    drawn = (tmp_path / "api.svg").read_text()
    assert "outrider-draft" in drawn
    assert "streams" in drawn


def test_levels_are_streams_or_requests_per_second() -> None:
    assert parse(["--concurrency", "1,32"])[2] == (Level(Loop.CLOSED, 1), Level(Loop.CLOSED, 32))
    assert parse(["--rate", "2.5"])[2] == (Level(Loop.OPEN, 2.5),)


def test_vllm_is_left_out_without_its_python_and_refused_where_it_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [system.name for system in parse([])[1]] == ["outrider-plain", "outrider-draft"]
    with pytest.raises(SystemExit):
        parse(["--systems", "vllm-plain"])
    assert "need --vllm-python" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--concurrency", "none"])
