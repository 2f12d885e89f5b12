"""Objectives through the whole system: one that can be met is met, others count as missed, and no text changes."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from command_line.start.demo_prompts import DEMO_PROMPTS
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.system import needs_the_pair, running_system

pytestmark = [pytest.mark.timeout(300), needs_the_pair, pytest.mark.slow]

NUM_TOKENS = 60
EASY = {"ttft_ms": 600_000, "tpot_ms": 600_000}
HARD = {"tpot_ms": 0.01}


def test_objectives_are_honoured_over_http_and_grpc(tmp_path: Path) -> None:
    flags = ("--hosting", "plain", "--tenant-slo", "gold=tpot:0.01")
    with running_system(tmp_path / "cache", *flags) as system:
        prompt = DEMO_PROMPTS[0]
        plain = system.complete(prompt, max_tokens=NUM_TOKENS)
        assert "slo" not in plain["metrics"]
        for slo, is_met in ((EASY, True), (HARD, False)):
            answer = system.complete(prompt, max_tokens=NUM_TOKENS, slo=slo)
            assert answer["choices"] == plain["choices"]
            assert answer["metrics"]["slo"]["met"] is is_met
        of_tenant = system.complete(prompt, max_tokens=NUM_TOKENS, user="gold")["metrics"]["slo"]
        assert (of_tenant["tpot_ms"], of_tenant["met"]) == (0.01, False)
        refused = system.client.post("/v1/completions", json={"prompt": prompt, "slo": {"tpot_ms": 0}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slo.tpot_ms")
        with grpc.insecure_channel(system.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            sampling = common_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
            for slo, is_met in ((EASY, True), (HARD, False)):
                request = generation_pb2.GenerationRequest(
                    prompt=prompt, sampling=sampling, slo=common_pb2.Objective(**slo)
                )
                chunks = list(stub.Generate(request, timeout=60))
                assert "".join(chunk.text for chunk in chunks) == plain["choices"][0]["text"]
                assert chunks[-1].finished.slo_met is is_met
        assert system.own_metric("outrider_slo_requests_total") == 2 * 2 + 3 * 2 + 2
