"""The comparison with peers: which systems there are, how they are started, what becomes of their turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.peers import draw, held_out, lengthened, parse
from benchmarks.peers.process import Peer, PeerError, check_vllm, decode_rate
from benchmarks.peers.summary import Turn, num_differing, summarize
from benchmarks.peers.systems import (
    DRAFT,
    PLAIN,
    Family,
    System,
    all_systems,
    peer_command,
    peer_environment,
    select,
)
from benchmarks.shared.figures import spread
from benchmarks.shared.machine import machine

OURS_PLAIN, OURS = System(Family.OUTRIDER, PLAIN, 1), System(Family.OUTRIDER, DRAFT, 1)
SHARED = System(Family.OUTRIDER, DRAFT, 2)
ON_ONE, ON_TWO = System(Family.VLLM, DRAFT, 1), System(Family.VLLM, DRAFT, 2)


def turn(system: System, number: int, rate: float, *, batch: int = 1, text: tuple[int, ...] = (1, 2)) -> Turn:
    return Turn(number, batch, system, rate, 2 * rate, 1.0, 0.01, (text, (3,)))


def test_names_tell_systems_apart() -> None:
    systems = all_systems(has_vllm=True, has_weak_draft=True)
    names = [system.name for system in systems]
    assert len(names) == len(set(names)) == 18
    assert {"outrider-plain", "outrider-weak", "transformers-draft-1", "vllm-plain-2"} <= set(names)


def test_outriders_draft_has_a_core_that_counts_in_the_total_only() -> None:
    assert (OURS.num_target_cores, OURS.num_cores) == (1, 2)
    assert (SHARED.num_target_cores, SHARED.num_cores) == (2, 2)
    assert (ON_TWO.num_target_cores, ON_TWO.num_cores) == (2, 2)


def test_systems_are_selected_by_pattern_and_a_pattern_without_a_system_is_refused() -> None:
    systems = all_systems(has_vllm=True, has_weak_draft=False)
    chosen = select(systems, ["outrider-*", "vllm-*-2"])
    assert [each.name for each in chosen] == [
        *("outrider-plain", "outrider-draft", "outrider-plain-2", "outrider-draft-2"),
        *("vllm-plain-2", "vllm-draft-2"),
    ]  # fmt: skip
    assert select(systems, []) == systems
    with pytest.raises(argparse.ArgumentTypeError, match=r"nothing-\*.*outrider-plain"):
        select(systems, ["nothing-*"])


def command(system: System) -> tuple[list[str], dict[str, Any]]:
    made = peer_command(
        system,
        target=Path("t"),
        drafts={DRAFT: Path("d")},
        vllm_python=Path("/env/bin/python"),
        num_speculative_tokens=5,
        max_num_seqs=8,
    )
    return made[:-1], json.loads(made[-1])


def test_a_peer_gets_its_python_its_cores_and_its_draft() -> None:
    words, settings = command(ON_TWO)
    assert words == ["/env/bin/python", "-m", "benchmarks.peers.vllm_engine"]
    assert settings["cores"] == [0, 1]
    assert settings["draft"] == str(Path("d").resolve())
    words, settings = command(System(Family.TRANSFORMERS, PLAIN, 1))
    assert words == [sys.executable, "-m", "benchmarks.peers.transformers_engine"]
    assert (settings["cores"], settings["draft"]) == ([0], None)


def test_vllm_is_bound_to_its_cores_and_keeps_its_engine_in_its_process() -> None:
    one, two = peer_environment(ON_ONE, []), peer_environment(ON_TWO, [Path("/a.so"), Path("/b.so")])
    assert (one["VLLM_CPU_OMP_THREADS_BIND"], two["VLLM_CPU_OMP_THREADS_BIND"]) == ("0", "0-1")
    assert one["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert (one["OMP_NUM_THREADS"], "OMP_NUM_THREADS" in two) == ("1", False)
    assert "LD_PRELOAD" not in one
    assert two["LD_PRELOAD"] == "/a.so:/b.so"


def test_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "quartiles": [2.0, 4.0], "rounds": 5}
    assert spread([7.0]) == {"median": 7.0, "quartiles": [7.0, 7.0], "rounds": 1}
    assert spread([]) is None


def test_ratios_are_taken_within_rounds() -> None:
    # The machine is twice as fast in the second round: ratios do not notice, medians of rates would.
    turns = [turn(OURS_PLAIN, 0, 10), turn(OURS, 0, 20), turn(OURS_PLAIN, 1, 20), turn(OURS, 1, 40)]
    figures = summarize(turns)["batch_1"]["systems"]["outrider-draft"]
    assert figures["over_own_plain"] == {"median": 2.0, "quartiles": [2.0, 2.0], "rounds": 2}
    assert figures["over_outrider_plain"]["median"] == 2.0
    assert figures["tokens_per_s"]["median"] == 30.0
    assert figures["decode_tokens_per_s"]["median"] == 60.0


def test_outrider_is_compared_at_equal_total_and_at_equal_target_cores() -> None:
    turns = [turn(OURS_PLAIN, 0, 5), turn(OURS, 0, 30), turn(ON_ONE, 0, 10), turn(ON_TWO, 0, 15)]
    compared = summarize(turns)["batch_1"]
    total = {name: each["median"] for name, each in compared["equal_total_cores"].items()}
    target = {name: each["median"] for name, each in compared["equal_target_cores"].items()}
    assert total == {"outrider-draft / vllm-draft-2": 2.0}
    assert target == {"outrider-draft / vllm-draft-1": 3.0}


def test_batch_sizes_are_kept_apart_and_what_a_system_did_not_do_is_left_out() -> None:
    made = summarize([turn(OURS, 0, 1), turn(OURS, 0, 3, batch=8), turn(ON_TWO, 0, 3, batch=8)])
    assert list(made) == ["batch_1", "batch_8"]
    assert list(made["batch_1"]["systems"]) == ["outrider-draft"]
    assert made["batch_1"]["systems"]["outrider-draft"]["over_own_plain"] is None


def test_texts_of_others_are_counted_and_texts_of_ours_must_be_equal() -> None:
    plain, other = turn(OURS_PLAIN, 0, 1), turn(ON_TWO, 0, 1, text=(9,))
    figures = summarize([plain, other])["batch_1"]["systems"]["vllm-draft-2"]
    assert figures["texts_equal_to_outrider_plain"] == "1 of 2"
    assert num_differing([plain, other, turn(OURS, 0, 1)]) == 0
    assert num_differing([plain, turn(OURS, 0, 1, text=(9,))]) == 1


def test_the_rate_of_decoding_adds_up_over_a_batch() -> None:
    assert decode_rate([(10, 2.0), (30, 2.0), (0, 0.0)]) == 20.0


def test_a_python_without_vllm_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cannot be run"):
        check_vllm(tmp_path / "no-python")
    with pytest.raises(PeerError, match="cannot import vllm"):
        check_vllm(Path(sys.executable))


ECHO = """
from benchmarks.peers.answering import run
def load(settings):
    print("a library talks")
    if settings.get("breaks"):
        raise ImportError("no such library")
    return {"facts": settings["number"]}, lambda batch, n: [(each[:n], n - 1, 0.5) for each in batch]
run(load)
"""


async def start(settings: dict[str, Any]) -> Peer:
    return await Peer.start("echo", [sys.executable, "-c", ECHO, json.dumps(settings)], {})


async def test_a_peer_answers_batches_whatever_its_libraries_print() -> None:
    peer = await start({"number": 7})
    try:
        assert peer.facts == {"facts": 7}
        answer = await peer.ask([[1, 2, 3], [4, 5, 6]], 2)
        assert (answer.texts, answer.num_tokens, answer.decode_tokens_per_s) == ([[1, 2], [4, 5]], 4, 4.0)
        assert answer.seconds > 0
    finally:
        await peer.stop()


async def test_a_peer_that_cannot_import_its_library_says_so() -> None:
    with pytest.raises(PeerError, match="echo did not start: no such library"):
        await start({"breaks": True})


async def test_a_peer_that_dies_is_an_error_with_its_last_words() -> None:
    peer = await start({"number": 1})
    try:
        with pytest.raises(PeerError, match="TypeError"):
            await asyncio.wait_for(peer.ask([[1]], "no number"), 30)  # type: ignore[arg-type]
    finally:
        await peer.stop()


def test_flags_choose_systems_and_vllm_is_out_without_its_python() -> None:
    _, setup = parse(["--batch", "1", "4"])
    assert {system.family for system in setup.systems} == {Family.OUTRIDER, Family.TRANSFORMERS}
    assert setup.batch_max == 4
    _, setup = parse(["--vllm-python", "p", "--weak-draft", "w", "--systems", "vllm-weak-?"])
    assert [system.name for system in setup.systems] == ["vllm-weak-1", "vllm-weak-2"]


def test_an_unknown_system_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--systems", "vllm-*"])
    assert "no system fits 'vllm-*'" in capsys.readouterr().err


def test_the_chart_holds_every_system(tmp_path: Path) -> None:
    result = summarize([turn(OURS, 0, 1), turn(ON_TWO, 0, 3, batch=8)])
    draw(tmp_path / "peers.svg", result, "Title")
    drawn = (tmp_path / "peers.svg").read_text()
    assert all(word in drawn for word in ("outrider-draft", "vllm-draft-2", "batch 1", "batch 8"))


def test_the_machine_is_described() -> None:
    described = machine()
    assert described["hardware"]
    assert {"cores", "memory_gib", "torch", "transformers", "commit", "measured_at"} <= set(described)


def test_prompts_of_a_length_have_it_and_models_long_enough_for_them() -> None:
    arguments, setup = parse(["--prompt-tokens", "900", "--tokens", "1"])
    assert setup.max_model_len == 901
    prompts = held_out(setup.target, 2, arguments)
    assert [len(prompt) for prompt in prompts] == [900, 900]
    assert prompts[0] != prompts[1]
    with lengthened(replace(setup, max_model_len=2001)) as longer:
        models = [longer.target, *longer.drafts.values()]
        assert {json.loads((model / "config.json").read_text())["max_position_embeddings"] for model in models} == {
            2001
        }
    assert not longer.target.exists()
    with lengthened(parse([])[1]) as usual:
        assert usual.target == setup.target


def test_lengths_that_no_prompt_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--prompt-tokens", "0"])
    assert "--prompt-tokens must be at least 1" in capsys.readouterr().err
    arguments, setup = parse(["--prompt-tokens", "1000000"])
    with pytest.raises(PeerError, match=r"--prompt-tokens 1000000: .*choose fewer"):
        held_out(setup.target, 1, arguments)
