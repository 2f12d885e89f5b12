"""Which model drafts for `outrider serve`, and in what precision. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from command_line.checkout import DEMO_DRAFT
from outrider.engine.heads.kind import HeadKind
from outrider.engine.options import Quantization


class UnfitDraft(ValueError):
    """Flags that do not go together; the message names them."""


@dataclass(frozen=True)
class DraftChoice:
    """The model that draft workers load, None for no draft workers, and the draft head that the target knows of."""

    folder: Path | None
    quantization: Quantization = Quantization.NONE
    head: Path | None = None


def choose_draft(
    target: Path,
    draft: Path | None,
    *,
    kind: HeadKind | None = None,
    draft_head: Path | None = None,
    no_draft: bool = False,
    self_draft: bool = False,
    early_exit_layer: int | None = None,
    target_quantization: Quantization = Quantization.NONE,
    draft_quantization: Quantization | None = None,
) -> DraftChoice:
    """From the flags of the same names. `kind`: of the draft head in the folder `draft`; None: it has a model. Raises
    UnfitDraft."""
    given = {
        "--draft": draft is not None,
        "--draft-head": draft_head is not None,
        "--no-draft": no_draft,
        "--self-draft": self_draft,
        "--early-exit-layer": early_exit_layer is not None,
    }
    if len(named := [flag for flag, is_given in given.items() if is_given]) > 1:
        raise UnfitDraft(f"{' and '.join(named)} exclude each other")
    if no_draft:
        if draft_quantization is not None:
            raise UnfitDraft("--draft-quantization and --no-draft exclude each other")
        return DraftChoice(None)
    beside_target = draft if kind in (HeadKind.MEDUSA, HeadKind.MTP) else draft_head
    if beside_target is not None:
        if draft_quantization is not None:
            raise UnfitDraft(f"--draft-quantization is of draft workers, and {beside_target} runs beside the target")
        return DraftChoice(None, head=beside_target)
    if kind is HeadKind.EAGLE3:
        return DraftChoice(draft, draft_quantization or Quantization.NONE, head=draft)
    if early_exit_layer is not None:
        return DraftChoice(target, draft_quantization or Quantization.NONE)
    if not self_draft:
        return DraftChoice(draft or DEMO_DRAFT, draft_quantization or Quantization.NONE)
    quantization = draft_quantization or Quantization.INT8
    if quantization is Quantization.NONE:
        raise UnfitDraft(
            "--self-draft with --draft-quantization none drafts with the target itself, which takes as long as to do "
            "without: choose int8 or fp8"
        )
    if target_quantization is not Quantization.NONE:
        raise UnfitDraft(
            f"--self-draft needs a target of higher precision than its draft, and --quantization "
            f"{target_quantization.value} makes it as coarse: leave one of them out"
        )
    return DraftChoice(target, quantization)
