"""`python -m tests.engines.sglang_rank RANK NUM_RANKS GROUP_PORT DRAFT_PORT FILE`, in SGLang's environment: one rank.

SGLang's worker with hints, over decode batches that are made here, with overlap: tokens of a step reach `output_ids`
one step later, and stand in `spec_info` meanwhile. The file has what the target generates after each prompt. Prints, as
JSON, the drafts of each step, the tokens accepted, and whether each row began with its request's last token.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WIDTH = 8
VOCAB_SIZE = 4096
NUM_STEPS = 30
STEP_S = 0.1
PROMPTS = [list(range(10, 60)), list(range(200, 230))]


def request(rid: str, prompt: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=900, temperature=0.0)
    params.normalize(None)
    return Req(rid, "", array("q", prompt), params, vocab_size=VOCAB_SIZE, eos_token_ids={1})


def worker(rank: int, num_ranks: int, draft_port: int) -> Any:
    import torch

    from outrider.engines.engine_hints import EngineHints, hello
    from outrider.engines.hint_link import HintLink
    from outrider.engines.hinted_requests import HintedRequests
    from outrider.engines.sglang.batches import BatchHints
    from outrider.engines.sglang.worker import HintWorker

    made = object.__new__(HintWorker)
    made.draft_token_num, made.enable_overlap, made._batches = WIDTH, True, None
    made._group = SimpleNamespace(
        world_size=num_ranks, rank_in_group=rank, ranks=list(range(num_ranks)), cpu_group=torch.distributed.group.WORLD
    )
    if rank == 0:
        told = hello({"draft_workers": [f"127.0.0.1:{draft_port}"]}, "m", VOCAB_SIZE, None)
        requests = HintedRequests(VOCAB_SIZE, may_pause=False, has_fixed_width=True)
        hints = EngineHints(requests, HintLink(told))
        hints.start()
        made._batches = BatchHints(hints, WIDTH)
    return made


def run(own: Any, texts: list[list[int]]) -> tuple[list[list[int]], int, bool]:
    import torch

    requests = [request(name, prompt) for name, prompt in zip("ab", PROMPTS, strict=True)]
    rest = dict(zip("ab", texts, strict=True))
    if own._batches is not None:
        own._batches.prefill(requests)
    latest = {each.rid: [rest[each.rid].pop(0)] for each in requests}  # the first token, of the prefill
    drafts, num_accepted, is_right = [], 0, True
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            own.note_request_finished(rid="b", natural_stop=True)
            requests.pop()
        time.sleep(STEP_S)
        rows = [latest[each.rid] + [0] * (WIDTH - len(latest[each.rid])) for each in requests]
        batch = SimpleNamespace(
            reqs=requests,
            grammar_needs_sync=lambda: False,
            spec_info=SimpleNamespace(
                accept_tokens=torch.tensor(rows, dtype=torch.int32).flatten(),
                accept_lens=torch.tensor([len(latest[each.rid]) for each in requests], dtype=torch.int32),
            ),
        )
        tokens, masks = own._prepare_draft_tokens(batch)
        assert tokens.shape == (len(requests) * WIDTH,)
        assert masks.shape == (len(requests) * WIDTH * WIDTH,)
        drafts.append(tokens.tolist())
        for each, row in zip(requests, tokens.reshape(-1, WIDTH).tolist(), strict=True):
            is_right &= row[0] == latest[each.rid][-1]
            each.output_ids.extend(latest[each.rid])
            text = rest[each.rid]
            num_right = next((at for at, token_id in enumerate(row[1:]) if token_id != text[at]), WIDTH - 1)
            latest[each.rid], rest[each.rid] = text[: num_right + 1], text[num_right + 1 :]
            num_accepted += num_right
    return drafts, num_accepted, is_right


def main(words: list[str]) -> None:
    import torch

    rank, num_ranks, group_port, draft_port = map(int, words[:4])
    texts = json.loads(Path(words[4]).read_text())
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{group_port}", rank=rank, world_size=num_ranks
    )
    own = worker(rank, num_ranks, draft_port)
    try:
        found = run(own, texts)
    finally:
        if own._batches is not None:
            own._batches.turn_off()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
