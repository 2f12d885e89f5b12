"""A changed model is another one to whoever compares weights, and the same to whoever goes by names."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.text.tokenizer import fingerprint
from tests.e2e.chaos.other_weights import write_changed
from tests.e2e.system import needs_the_pair


@needs_the_pair
@pytest.mark.parametrize("model", [DEMO_TARGET, DEMO_DRAFT], ids=["target", "draft"])
def test_a_changed_model_has_the_name_and_the_tokenizer_and_other_weights(model: Path, tmp_path: Path) -> None:
    copy = write_changed(model, tmp_path)
    assert copy.name == model.name
    assert checkpoint_fingerprint(copy) != checkpoint_fingerprint(model)
    assert fingerprint(copy) == fingerprint(model)
