"""A real vLLM server takes hints with the commands of the compose file, which are those of the chart and the guide."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from outrider.local.free_ports import free_ports
from tests.engines.vllm_server import ROOT, START_S, needs_vllm, running, start, wait_ready, wait_until

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(1500)]

SERVICES = yaml.safe_load((ROOT / "k8s/images/compose.vllm.yaml").read_text(encoding="utf-8"))["services"]
PROMPT = (ROOT / "demo" / "held_out.txt").read_text(encoding="utf-8")[:160]


def here(words: list[str], places: dict[str, str]) -> list[str]:
    """The words with ports and names of this machine. Raises AssertionError for a place that is not among them."""
    for written, instead in places.items():
        assert any(written in word for word in words), written
        words = [word.replace(written, instead) for word in words]
    return words


def test_a_pool_drafts_for_vllm_as_the_file_starts_both(tmp_path: Path) -> None:
    draft_port, hints_port = free_ports(2)
    places = {"/models": str(ROOT / "demo"), "50051": str(draft_port), "9100": "0"}
    log = tmp_path / "draft.log"
    draft = start([sys.executable, "-m", *here(SERVICES["draft"]["command"], places)], log)
    # Hints that pay or not are all the same here; on a busy machine they may not.
    hosts = {
        "draft:50051": f"localhost:{draft_port}",
        "7100": str(hints_port),
        '"is_insecure"': '"may_pause": false, "is_insecure"',
    }
    _, _, *flags = here(SERVICES["vllm"]["command"], hosts)  # the model and its name are the helper's
    try:
        with running(tmp_path, "vllm", *flags, hints_port=hints_port) as server:
            wait_until(lambda: '"event": "ready"' in log.read_text(), "the draft worker is ready", START_S)
            wait_ready(server)
            text = server.completion(PROMPT, max_tokens=120)["choices"][0]["text"]
            assert server.num_accepted > 0, server.process.tail()
            assert (
                text
                == server.completion(PROMPT, max_tokens=120, vllm_xargs={"outrider_hints": 0})["choices"][0]["text"]
            )
    finally:
        draft.stop()
