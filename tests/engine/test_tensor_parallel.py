"""A model cut between processes says what it says in one, and a process that is gone is noticed by the others."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.kv.kv_plan import DeviceMemory
from outrider.engine.layers import linear
from outrider.engine.loading import loading
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.memory_plan import ServingShape, plan_memory
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import Engine, ModelLoadError
from outrider.engine.rank_messages import decode_pairs, decode_step, encode_pairs, encode_step
from outrider.engine.ranks.rank_group import RankGroup, join_ranks
from outrider.engine.sequence_chunk import SequenceChunk
from outrider.local.free_ports import free_ports
from outrider.worker.worker_process import leave
from outrider.worker.worker_ranks import EXIT_ALONE
from tests import models
from tests.engine.conformance import has_plan
from tests.engine.forks import forks
from tests.engine.sequences import feed, sharing, text
from tests.families import FAMILIES as ALL_FAMILIES
from tests.families import Family

# Of 4 heads and 2 KV heads, so that four ranks share them. Qwen's are of a width that the compiled kernels lack.
FAMILIES = {2: ("llama", "qwen3", "family-qwen3_moe"), 4: ("llama",)}
SERVED = [family for family in ALL_FAMILIES if family.refused is None]
NUM_NEW_TOKENS = 48
PROMPT_LENS = (5, 33, 61)
TIMEOUT_S = 3.0


def greedy(engine: Engine, prompt: list[int]) -> list[int]:
    kv = engine.new_sequence()
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + NUM_NEW_TOKENS:
        token_ids.append(int(feed(engine, kv, token_ids[kv.length :], 1)[-1].argmax()))
    kv.free()
    return token_ids


def greedy_with_hints(engine: Engine, prompt: list[int], right: list[int], seed: int) -> list[int]:
    """The greedy output with verification of hints, some of which are wrong; rejected hints are rolled back."""
    chance = random.Random(seed)
    kv = engine.new_sequence()
    token_ids = list(prompt)
    while len(token_ids) < len(right):
        hints = right[len(token_ids) :][: chance.randrange(6)]
        hints = [hint if chance.random() < 0.8 else (hint + 1) % engine.vocab_size for hint in hints]
        rows = feed(engine, kv, token_ids[kv.length :] + hints, len(hints) + 1).argmax(dim=-1).tolist()
        num_right = next((i for i, hint in enumerate(hints) if hint != rows[i]), len(hints))
        token_ids += rows[: num_right + 1]
        kv.truncate(len(token_ids) - 1)
    kv.free()
    return token_ids[: len(right)]


def texts(engine: Engine) -> dict[str, Any]:
    """Results that must not depend on the number of ranks: plain outputs, those that hints change, and the next tokens
    after a fork and after entries were moved."""
    plain = [greedy(engine, text(length, length, engine.vocab_size)) for length in PROMPT_LENS]
    hinted = [
        greedy_with_hints(engine, said[:length], said, seed=length)
        for length, said in zip(PROMPT_LENS, plain, strict=True)
    ]
    # A fork shares a full block, and computes the rest again; entries are moved back and forth.
    kv = engine.new_sequence()
    feed(engine, kv, plain[1][:20], 1)
    fork = sharing(engine, kv, plain[1][:20])
    feed(engine, kv, [1, 2, 3], 1)
    after_fork = feed(engine, fork, plain[1][fork.length : 21], 1)
    slots = fork.slots(0, 2)
    engine.move_entries(slots, slots[::-1].copy())
    engine.move_entries(slots[::-1].copy(), slots)
    after_moves = feed(engine, fork, [plain[1][21]], 1)
    kv.free()
    fork.free()
    return {
        "plain": plain,
        "hints change": [i for i in range(len(plain)) if plain[i] != hinted[i]],
        "fork": [int(after_fork.argmax()), int(after_moves.argmax())],
    }


class Ranks:
    """The processes of a group, with the environment that torchrun would give them."""

    def __init__(self, size: int, folder: Path, task: str, *arguments: object, **variables: str) -> None:
        """variables: of their environment."""
        self.folder = folder
        environment = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            **variables,
        }
        words = (task, folder, *map(str, arguments))
        self.processes = [
            forks.Process(target=run_rank, args=(environment | {"RANK": str(rank)}, *words)) for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout_s: float = 120.0) -> list[int | None]:
        """Their exit statuses; None for one that still runs."""
        return statuses(self.processes, timeout_s)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("said-*")))

    def wait_for(self, name: str, timeout_s: float = 120.0) -> None:
        """Until one of them has written this file."""
        deadline = time.monotonic() + timeout_s
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, self.said()
            assert all(each.is_alive() for each in self.processes), self.said()
            time.sleep(0.05)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes:
            each.kill()
            each.join()


def statuses(processes: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    deadline = time.monotonic() + timeout_s
    for each in processes:
        each.join(max(deadline - time.monotonic(), 0.1))
    return [each.exitcode for each in processes]


def run_rank(environment: dict[str, str], task: str, folder: Path, *arguments: str) -> None:
    """Runs in a process of its own; what it prints is in a file."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with (folder / f"said-{environment['RANK']}").open("w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    joined = join_ranks(TIMEOUT_S)
    assert joined is not None
    tasks: dict[str, Callable[..., None]] = {
        "speak": speak, "talk": talk, "weigh": weigh, "dawdle": dawdle, "size": size_kv,
    }  # fmt: skip
    tasks[task](joined, folder, *arguments)
    leave(0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_shards_say_what_the_whole_says(tmp_path: Path, size: int) -> None:
    """In float32 the greedy text of one process, speculation on and off; in bfloat16 the same bits in any batch."""
    folders = [models.model_dir(family) for family in FAMILIES[size]]
    with Ranks(size, tmp_path, "speak", *folders) as ranks:
        assert ranks.wait() == [0] * size, ranks.said()
    found = json.loads((tmp_path / "found.json").read_text())
    for family in FAMILIES[size]:
        alone = models.engine(family)
        expected = texts(alone) | {"variance": [], "parameters": alone.num_parameters}
        numerics = found[family].pop("numerics")
        assert found[family] == expected
        # The order of sums depends on the number of ranks: a text does not move from a group to a single process.
        assert f"ranks={size}" in numerics.split()
        assert numerics != alone.numerics


@pytest.mark.long
@pytest.mark.parametrize("family", [pytest.param(each, id=each.model_type) for each in SERVED])
def test_every_family_with_a_plan_is_cut_between_two_ranks(tmp_path: Path, family: Family) -> None:
    """All that the page of models names; where there is no plan that is said."""
    with Ranks(2, tmp_path, "speak", models.model_dir(family.key)) as ranks:
        ended = ranks.wait()
    if not has_plan(family.key):
        assert ended == [1, 1]
        assert re.search("no plan to shard|has no `tp_plan`", ranks.said())
        return
    assert ended == [0, 0], ranks.said()
    found = json.loads((tmp_path / "found.json").read_text())[family.key]
    del found["numerics"]
    alone = models.engine(family.key)
    expected = texts(alone) | {"variance": [], "parameters": alone.num_parameters}
    assert found == expected


def speak(group: RankGroup, folder: Path, *model_dirs: str) -> None:
    found = {}
    for model_dir in map(Path, model_dirs):
        found[model_dir.name.rpartition("-")[0]] = {
            **on_shards(group, texts, model_dir),
            "variance": on_shards(group, batch_invariance_failures, model_dir, dtype="bfloat16"),
        }
    if group.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def on_shards(group: RankGroup, task: Callable[[Engine], Any], model_dir: Path, **options: Any) -> Any:
    engine = load_model(models.engine_config(model_dir, **options), group)
    if group.rank > 0:
        engine.follow()
        return {}
    engine.lead()
    found = task(engine)
    if isinstance(found, dict):
        found |= {"parameters": engine.num_parameters, "numerics": engine.numerics}
    engine.dismiss()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("products", ["as chosen here", "oneDNN's"])
def test_a_rank_needs_memory_for_its_share_alone(tmp_path: Path, products: str) -> None:
    """While it loads as well: what transformers reads of a file that is mapped is nobody's memory.

    oneDNN's products are what a processor with AMX uses. What they compile is told apart from weights by keeping none.
    """
    config = transformers.LlamaConfig(
        vocab_size=16_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole_mib = 2 * sum(parameter.numel() for parameter in model.parameters()) / 2**20
    model.save_pretrained(tmp_path / "model")
    del model
    models.write_tokenizer(tmp_path / "model")
    keep_none = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}
    with Ranks(4, tmp_path, "weigh", tmp_path / "model", products, **keep_none) as ranks:
        assert ranks.wait() == [0] * 4, ranks.said()
    for rank in range(4):
        found = json.loads((tmp_path / f"memory-{rank}.json").read_text())
        assert found["after_mib"] < whole_mib / 4 + 32, found
        assert found["most_mib"] < 0.85 * whole_mib, found


def weigh(group: RankGroup, folder: Path, model_dir: str, products: str) -> None:
    """Writes how much memory of its own loading takes, KV left out."""
    if products == "oneDNN's":
        vars(linear)["products"] = lambda: None
    before = most = own_memory_mib()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.002):
            most = max(most, own_memory_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    config = models.engine_config(Path(model_dir), "bfloat16", kv_cache_gib=2**-8, max_model_len=64)
    engine = load_model(config, group)
    is_done.set()
    watcher.join()
    found = {
        "most_mib": most - before,
        "after_mib": own_memory_mib() - before,
        "blocks": engine.allocator.num_blocks,
    }
    (folder / f"memory-{group.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_ranks_with_different_memory_have_equally_many_blocks(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, "size", models.model_dir("llama")) as ranks:
        assert ranks.wait() == [0] * 2, ranks.said()
    first, second = (json.loads((tmp_path / f"blocks-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["max_model_len"] < models.MAX_MODEL_LEN


def size_kv(group: RankGroup, folder: Path, model_dir: str) -> None:
    """Writes how long a sequence may be, and how many blocks there are. Rank 1 has the least memory."""
    config = models.engine_config(Path(model_dir), "bfloat16", memory_utilization=1.0, max_model_len="auto")
    needs = plan_memory(config.model, ServingShape.of(config, 2, "cpu"))
    free = needs.fixed + (4000 if group.rank == 0 else 400) * needs.kv_per_token
    vars(loading)["machine_memory"] = lambda: DeviceMemory(free, free, is_own=True)
    engine = load_model(config, group)
    found = {"blocks": engine.allocator.num_blocks, "max_model_len": engine.max_model_len}
    (folder / f"blocks-{group.rank}.json").write_text(json.dumps(found))


def own_memory_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", [pytest.param(0, id="rank 0"), pytest.param(1, id="another one", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="dies"),
        pytest.param(signal.SIGSTOP, id="hangs", marks=pytest.mark.thorough),
    ],
)
def test_the_ranks_end_when_one_of_them_is_gone(tmp_path: Path, who: int, number: int) -> None:
    with Ranks(4, tmp_path, "talk", models.model_dir("llama")) as ranks:
        ranks.wait_for("talks")
        started = time.monotonic()
        pid = ranks.processes[who].pid
        assert pid is not None
        os.kill(pid, number)
        others = [each for rank, each in enumerate(ranks.processes) if rank != who]
        assert statuses(others, TIMEOUT_S + 10.0) == [EXIT_ALONE] * 3, ranks.said()
        assert time.monotonic() - started < TIMEOUT_S + 5.0


def talk(group: RankGroup, folder: Path, model_dir: str) -> None:
    """Without end, now and then with nothing to do for as long as that is allowed."""
    engine = load_model(models.engine_config(Path(model_dir)), group)
    try:
        if group.rank > 0:
            engine.follow()
        engine.lead()
        kv = engine.new_sequence()
        while True:
            feed(engine, kv, [1, 2, 3], 1)
            kv.truncate(0)
            time.sleep(0.6 * TIMEOUT_S)
            engine.idle()
            (folder / "talks").touch()
    except RuntimeError:
        leave(EXIT_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_ranks_that_load_at_different_speeds_wait_for_each_other(tmp_path: Path, who: int) -> None:
    """One takes longer than an operation may take, before its model runs for the first time and before it serves."""
    with Ranks(2, tmp_path, "dawdle", models.model_dir("llama"), who) as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
    assert (tmp_path / "has led").exists()


def dawdle(group: RankGroup, folder: Path, model_dir: str, who: str) -> None:
    def late(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if group.rank == int(who):
                time.sleep(TIMEOUT_S + 2.0)
            return work(*arguments, **named)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "fuse", late(Engine.fuse))  # packing weights, for minutes where they are many
        patch.setattr("outrider.engine.loading.loading._return_weights_memory", late(lambda: None))
        engine = load_model(models.engine_config(Path(model_dir)), group)
    if group.rank > 0:
        engine.follow()
        return
    engine.lead()
    feed(engine, engine.new_sequence(), [1, 2, 3], 1)
    engine.dismiss()
    (folder / "has led").touch()


def test_heads_that_the_ranks_cannot_share_are_named(tmp_path: Path) -> None:
    group = RankGroup(0, 3, tensors=None, messages=None)
    with pytest.raises(ModelLoadError, match="3 ranks cannot share 4 attention heads and 2 KV heads"):
        load_model(models.engine_config(models.model_dir("llama")), group)


def test_without_torchrun_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_ranks(1.0) is None


numbers = st.lists(st.integers(0, 2**31 - 1), max_size=9)


@given(st.lists(st.tuples(numbers, numbers, st.none() | st.lists(numbers, max_size=4), *[st.integers(0, 999)] * 3)))
def test_a_step_arrives_as_it_was_sent(parts: list[tuple[Any, ...]]) -> None:
    allocator = BlockAllocator(2, 8)
    chunks = [
        SequenceChunk(KVSequence(allocator, blocks, length), token_ids, num_logits, tree_start, paths)
        for token_ids, blocks, paths, length, num_logits, tree_start in parts
    ]
    arrived = decode_step(encode_step(chunks), allocator)
    assert [(each.kv.block_ids, each.kv.length) for each in arrived] == [
        (each.kv.block_ids, each.kv.length) for each in chunks
    ]
    assert [(each.token_ids, each.num_logits, each.tree_start, each.paths) for each in arrived] == [
        (each.token_ids, each.num_logits, each.tree_start, each.paths) for each in chunks
    ]


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))))
def test_pairs_arrive_as_they_were_sent(pairs: list[tuple[int, int]]) -> None:
    firsts, seconds = decode_pairs(encode_pairs([pair[0] for pair in pairs], [pair[1] for pair in pairs]))
    assert list(zip(firsts.tolist(), seconds.tolist(), strict=True)) == pairs
