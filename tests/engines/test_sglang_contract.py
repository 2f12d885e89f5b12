"""The installed SGLang has what the worker relies on; a release that moves some of it fails here, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engines.sglang.contract import WORKER
from tests.engines.sglang_server import needs_sglang, said_by_sglang

pytestmark = [needs_sglang, pytest.mark.long, pytest.mark.timeout(600)]


def test_nothing_that_is_relied_on_has_moved(tmp_path: Path) -> None:
    code = "import json; from outrider.engines.sglang.contract import missing; print(json.dumps(list(missing())))"
    assert said_by_sglang(tmp_path, code) == []


def test_what_has_moved_is_named(tmp_path: Path) -> None:
    code = """
import json
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from outrider.engines.sglang.contract import WORKER, missing
del NGRAMWorker._update_ngram_corpus
NGRAMWorker._prepare_draft_tokens = lambda self, requests: None
print(json.dumps(list(missing())))
"""
    named = said_by_sglang(tmp_path, code)
    assert f"{WORKER}._update_ngram_corpus" in named
    assert f"{WORKER}._prepare_draft_tokens(self, batch, …)" in named


def test_the_worker_overrides_methods_that_sglang_has_and_no_others(tmp_path: Path) -> None:
    """A method of SGLang's that is renamed would leave its override without effect."""
    code = """
import json
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from outrider.engines.sglang.worker import HintWorker
own = {name for name in vars(HintWorker) if not name.startswith(('__', '_abc'))}
print(json.dumps(sorted(name for name in own if hasattr(NGRAMWorker, name))))
"""
    expected = ["_prepare_draft_tokens", "_update_ngram_corpus", "forward_batch_generation", "note_request_finished"]
    assert said_by_sglang(tmp_path, code) == expected


def test_sglang_finds_the_algorithm_and_asks_nothing_that_it_cannot_answer(tmp_path: Path) -> None:
    """Its own class for plugins lacks methods that the scheduler calls."""
    code = """
import inspect, json, re
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers import overlap_utils, schedule_batch, scheduler
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.speculative import base_spec_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
algorithm = SpeculativeAlgorithm.from_string("outrider")
asked = set()
for module in (overlap_utils, schedule_batch, scheduler, model_runner, decode_cuda_graph_runner, base_spec_worker):
    asked |= set(re.findall(r"spec_algo(?:rithm)?\\.([a-z]\\w+)", inspect.getsource(module)))
print(json.dumps([algorithm.is_ngram(), sorted(asked), sorted(name for name in asked if not hasattr(algorithm, name))]))
"""
    is_ngram, asked, unanswered = said_by_sglang(tmp_path, code)
    assert is_ngram
    assert {"create_future_map", "carries_draft_hidden_states"} <= set(asked)
    assert unanswered == []


def test_the_plugin_imports_little_unless_it_is_asked(tmp_path: Path) -> None:
    code = """
import json, sys
import outrider.engines.sglang.plugin
before = set(sys.modules)
print(json.dumps(sorted(name for name in before if name.startswith(("sglang", "torch", "numpy", "grpc", "google")))))
"""
    assert said_by_sglang(tmp_path, code) == []


@pytest.mark.parametrize(("hints", "width"), [([3, 4, 5, 6, 7, 8, 9], 8), ([3, 4, 5], 4)])
def test_a_chain_has_the_form_of_sglangs_own_ngram_cache(tmp_path: Path, hints: list[int], width: int) -> None:
    """The compiled cache of the package, which has seen the same chain."""
    code = f"""
import json
import numpy as np
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
from outrider.engines.sglang.batches import chain_masks, chains
hints, width = {hints}, {width}
corpus = NgramCorpus(max_trie_depth=18, max_bfs_breadth=1, draft_token_num=width)
corpus.batch_put([[1, 2, *hints, 10, 11]])
corpus.synchronize()
tokens, masks = corpus.batch_get(["a", "b"], [[1, 2], [1, 2]], [2, 2])
ours, ours_masks = chains([2, 2], [hints, hints], width), chain_masks(2, width)
print(json.dumps([tokens.tolist(), ours.tolist(), bool((masks == ours_masks).all()),
    [str(each.dtype) + str(each.shape) for each in (tokens, masks)],
    [str(each.dtype) + str(each.shape) for each in (ours, ours_masks)]]))
"""
    theirs, ours, has_equal_masks, form, our_form = said_by_sglang(tmp_path, code)
    assert theirs == ours
    assert has_equal_masks
    assert form == our_form
