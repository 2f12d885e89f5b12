"""The sources of hints that the folders of a target and its drafts offer, each as changes to a deployment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from command_line.draft_kinds import Kind, kind_of_folder, usual_exit
from outrider.engine.heads.kind import has_mtp_layers
from outrider.errors import ConfigurationError


class DrafterName(StrEnum):
    """A kind of source; `all` are those that the folders offer."""

    ALL = "all"
    DRAFT = "draft"
    PARALLEL = "parallel"
    HEAD = "head"
    LOCAL_HEAD = "local-head"
    EARLY_EXIT = "early-exit"
    LOOKUP = "lookup"


@dataclass(frozen=True)
class Drafter:
    """A source of hints, and what a deployment that has no other needs for it."""

    name: DrafterName
    words: str  # what it is, for people
    changes: Mapping[str, Any] = field(default_factory=dict)  # of `Deployment`'s fields
    flags: Sequence[str] = ()  # of `outrider serve`, that do the same

    @property
    def has_draft_worker(self) -> bool:
        return self.changes.get("draft") is not None


def offered(target: Path, drafts: Iterable[Path]) -> list[Drafter]:
    """All sources of these folders. Raises ConfigurationError for a folder that cannot be read."""
    found = [each for folder in drafts for each in _of_folder(folder)]
    if has_mtp_layers(target):
        found.append(_local_head(target, "the target's MTP layer, beside it"))
    if (layer := usual_exit(target)) is not None:
        found.append(
            Drafter(
                DrafterName.EARLY_EXIT,
                f"the target's first {layer} layers",
                {"draft": target, "early_exit_layer": layer},
                ("--early-exit-layer", str(layer)),
            )
        )
    found.append(Drafter(DrafterName.LOOKUP, "the request's own text", {}, ("--no-draft",)))
    return found


def chosen(names: Sequence[DrafterName], sources: Sequence[Drafter]) -> list[Drafter]:
    """The sources of these names, all of them for `all`. Raises ConfigurationError for one that no folder offers."""
    if DrafterName.ALL in names:
        return list(sources)
    there = {each.name for each in sources}
    if missing := [name for name in names if name not in there]:
        raise ConfigurationError(
            f"no folder offers --drafter {missing[0]}; offered: {', '.join(sorted(there))}. Name further folders with "
            "--draft"
        )
    return [each for each in sources if each.name in names]


def _of_folder(folder: Path) -> list[Drafter]:
    flags = "--draft", str(folder)
    match kind_of_folder(folder):
        case Kind.MODEL:
            return [Drafter(DrafterName.DRAFT, f"{folder.name}, a model", {"draft": folder}, flags)]
        case Kind.MASKS:
            words = f"{folder.name}, several tokens a pass"
            return [Drafter(DrafterName.PARALLEL, words, {"draft": folder}, flags)]
        case Kind.EAGLE3:
            changes = {"draft": folder, "draft_head": folder}
            remote = Drafter(DrafterName.HEAD, f"{folder.name}, on a draft worker", changes, flags)
            return [remote, _local_head(folder, f"{folder.name}, beside the target")]
    return [_local_head(folder, f"{folder.name}, beside the target")]


def _local_head(folder: Path, words: str) -> Drafter:
    return Drafter(DrafterName.LOCAL_HEAD, words, {"draft_head": folder}, ("--draft-head", str(folder)))
