"""A changed model is another one to whoever compares weights, and the same to whoever goes by names."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.cli.deployment import DEMO_DRAFT, DEMO_TARGET
from outrider.tokenizer import fingerprint
from protos.outrider.v1 import common_pb2
from tests.e2e.chaos.other_weights import generated, is_of_either, lone_target, write_changed

PROMPTS = [[5, 6, 7, 8], [900, 901, 902]]

needs_the_pair = pytest.mark.skipif(
    not (DEMO_TARGET.is_dir() and DEMO_DRAFT.is_dir()), reason="the demo pair is not in this checkout"
)


@needs_the_pair
@pytest.mark.parametrize("model", [DEMO_TARGET, DEMO_DRAFT], ids=["target", "draft"])
def test_a_changed_model_has_the_name_and_the_tokenizer_and_other_weights(
    model: Path, tmp_path: Path
) -> None:
    copy = write_changed(model, tmp_path)
    assert copy.name == model.name
    assert checkpoint_fingerprint(copy) != checkpoint_fingerprint(model)
    assert fingerprint(copy) == fingerprint(model)


def test_a_text_of_two_models_is_of_neither() -> None:
    known = [[1, 2, 3, 4], [1, 2, 9, 8]]
    assert is_of_either([1, 2, 3], known)
    assert is_of_either([1, 2, 9, 8], known)
    assert not is_of_either([1, 2, 3, 8], known)
    assert not is_of_either([1, 2, 9, 8, 7], known)


@needs_the_pair
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("system")
async def test_a_changed_target_generates_something_else(tmp_path: Path) -> None:
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=40, ignore_eos=True)
    said = []
    for model in (DEMO_TARGET, write_changed(DEMO_TARGET, tmp_path)):
        async with lone_target(model, "bfloat16", 256, tmp_path) as channel:
            said.append(await generated(channel, [(prompt, sampling) for prompt in PROMPTS]))
    assert [len(each) for each in said[0] + said[1]] == [40] * 4
    assert all(left != right for left, right in zip(*said, strict=True))
