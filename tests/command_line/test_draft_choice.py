"""Which model drafts, and which flags do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line.checkout import DEMO_DRAFT
from command_line.start.deployment import Deployment, worker_specs
from command_line.start.draft_choice import DraftChoice, UnfitDraft, choose_draft
from outrider.engine.heads.kind import HeadKind
from outrider.engine.options import Dtype, Quantization

TARGET, DRAFT = Path("target"), Path("draft")


@pytest.mark.parametrize(
    ("draft", "flags", "expected"),
    [
        (None, {}, DraftChoice(DEMO_DRAFT)),
        (DRAFT, {}, DraftChoice(DRAFT)),
        (None, {"no_draft": True}, DraftChoice(None)),
        (DRAFT, {"draft_quantization": Quantization.FP8}, DraftChoice(DRAFT, Quantization.FP8)),
        (None, {"self_draft": True}, DraftChoice(TARGET, Quantization.INT8)),
        (
            None,
            {"self_draft": True, "draft_quantization": Quantization.FP8},
            DraftChoice(TARGET, Quantization.FP8),
        ),
        (None, {"early_exit_layer": 4}, DraftChoice(TARGET)),
        (
            None,
            {"early_exit_layer": 4, "draft_quantization": Quantization.INT8},
            DraftChoice(TARGET, Quantization.INT8),
        ),
        (DRAFT, {"kind": HeadKind.EAGLE3}, DraftChoice(DRAFT, head=DRAFT)),
        (
            DRAFT,
            {"kind": HeadKind.EAGLE3, "draft_quantization": Quantization.INT8},
            DraftChoice(DRAFT, Quantization.INT8, DRAFT),
        ),
        (DRAFT, {"kind": HeadKind.MEDUSA}, DraftChoice(None, head=DRAFT)),
        (TARGET, {"kind": HeadKind.MTP}, DraftChoice(None, head=TARGET)),
        (None, {"draft_head": DRAFT}, DraftChoice(None, head=DRAFT)),
        (
            DRAFT,
            {"target_quantization": Quantization.INT8, "draft_quantization": Quantization.INT8},
            DraftChoice(DRAFT, Quantization.INT8),
        ),
    ],
)
def test_the_draft_follows_from_the_flags(draft: Path | None, flags: dict[str, Any], expected: DraftChoice) -> None:
    assert choose_draft(TARGET, draft, **flags) == expected


@pytest.mark.parametrize(
    ("draft", "flags", "message"),
    [
        (DRAFT, {"no_draft": True}, "--draft and --no-draft exclude each other"),
        (DRAFT, {"self_draft": True}, "--draft and --self-draft exclude each other"),
        (DRAFT, {"early_exit_layer": 4}, "--draft and --early-exit-layer exclude each other"),
        (None, {"no_draft": True, "self_draft": True}, "--no-draft and --self-draft exclude each other"),
        (
            None,
            {"no_draft": True, "draft_quantization": Quantization.INT8},
            "--draft-quantization and --no-draft",
        ),
        (DRAFT, {"draft_head": DRAFT}, "--draft and --draft-head exclude each other"),
        (None, {"draft_head": DRAFT, "early_exit_layer": 4}, "--draft-head and --early-exit-layer exclude each other"),
        (
            DRAFT,
            {"kind": HeadKind.MEDUSA, "draft_quantization": Quantization.INT8},
            "--draft-quantization is of draft workers, and draft runs beside the target",
        ),
        (
            None,
            {"self_draft": True, "draft_quantization": Quantization.NONE},
            "takes as long as to do without",
        ),
        (
            None,
            {"self_draft": True, "target_quantization": Quantization.FP8},
            "--quantization fp8 makes it as coarse",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_named(draft: Path | None, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UnfitDraft, match=message):
        choose_draft(TARGET, draft, **flags)


def test_a_quantized_draft_is_computed_in_bfloat16_whatever_the_target_has() -> None:
    deployment = Deployment(TARGET, TARGET, Dtype.FLOAT32, draft_quantization=Quantization.INT8)
    target, draft = ([*spec.command] for spec in worker_specs(deployment, (), "x"))
    assert (target[target.index("--quantization") + 1], target[target.index("--dtype") + 1]) == (
        "none",
        "float32",
    )
    assert (draft[draft.index("--quantization") + 1], draft[draft.index("--dtype") + 1]) == (
        "int8",
        "bfloat16",
    )
