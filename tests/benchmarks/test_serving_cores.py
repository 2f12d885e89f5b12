"""Cores apart and shared through the public API: what is started, and the table of what was measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serving.api import schedule
from benchmarks.serving.http_servers import outrider_server
from benchmarks.serving.serving_cores import SERVERS, SYSTEMS, compare, parse, table
from command_line.bench.cells import TurnResult, cells
from command_line.load.load import Level, Loop
from command_line.load.summary import RequestResult, Slo

LEVEL = Level(Loop.CLOSED, 8)


def result(num_tokens: int, *gaps_s: float) -> RequestResult:
    return RequestResult(0, 0.0, 1.0, ttft_s=0.1, e2el_s=1.0, itl_s=gaps_s, num_output_tokens=num_tokens)


def test_the_default_is_compared_with_shared_cores_and_both_have_turns_with_and_without_hints() -> None:
    made = {name: outrider_server(Path("t"), Path("d"), *words, port=5, grpc_port=6) for name, words in SERVERS.items()}
    assert [name for name, server in made.items() if "--share-cores" in server.command] == ["shared"]
    assert [(system.server, "speculation" in system.extra) for system in SYSTEMS] == [
        ("apart", False), ("apart", True), ("shared", False), ("shared", True),
    ]  # fmt: skip
    assert parse([])[1] == tuple(Level(Loop.CLOSED, streams) for streams in (1, 8, 32))


def test_the_table_has_speeds_within_rounds_and_the_longest_gap_of_all() -> None:
    # The machine is twice as fast in the second round; the server that shares cores has half the speed in both.
    measured = [
        TurnResult(
            turn,
            (result((100 if turn.server < 2 else 50) * (turn.number + 1), 0.01, 0.02 + turn.server / 100),),
            0.1,
            1.0,
        )
        for turn in schedule([LEVEL], 2, 4)
    ]
    rows = compare(cells([system.name for system in SYSTEMS], measured, Slo()))
    assert [(row["streams"], row["hints"]) for row in rows] == [(8, "hints"), (8, "plain")]
    assert [row["shared_over_apart"] for row in rows] == [[0.5, 0.5, 0.5]] * 2
    assert [row[server]["gap_ms_max"] for row in rows for server in SERVERS] == [20.0, 40.0, 30.0, 50.0]
    shown = table({"machine": "two cores", "targets": {"small": rows}}).splitlines()
    assert shown[4].startswith("| 8, hints | apart | 150 (100 to 200) | 20 ms | 20 ms |")
    assert shown[5].endswith("| 0.5 (0.5 to 0.5) |")
    assert shown[-1] == "0 requests failed."
