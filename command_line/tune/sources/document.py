"""A comparison of sources as JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from command_line.report import rounded
from command_line.tune.document import profile_dict
from command_line.tune.sources.commands import flags
from command_line.tune.sources.comparison import Comparison, Judged
from command_line.tune.sources.report import verdict, warnings


def as_dict(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON: times in milliseconds, shares from 0 to 1, the fastest source at the smallest batch
    first."""
    best = found.best
    return rounded({
        "machine": found.machine,
        "settings": {"target": str(found.target), **asdict(found.settings)},
        "target": profile_dict(found.target_profile),
        "overheads": asdict(found.overheads),
        "texts": {"num_prompts": found.num_texts, "num_tokens": found.num_tokens},
        "sources": [_source(judged) for judged in found.judged],
        "best": None if best is None else {"name": best.source.name, "place": best.source.place.value},
        "verdict": verdict(found),
        "warnings": warnings(found),
        "flags": flags(found),
    })  # fmt: skip


def _source(judged: Judged) -> dict[str, Any]:
    source = judged.source
    return {
        "name": source.name,
        "kind": source.offer.kind.value,
        "place": source.place.value,
        "folder": str(source.offer.folder),
        "num_layers": source.offer.num_layers,
        "num_masks": source.num_masks,
        "num_tokens": source.num_tokens,
        "draft": None if source.profile is None else profile_dict(source.profile),
        "acceptance": [asdict(each) for each in judged.acceptance],
        "passes": source.pair.passes,
        "forecasts": [asdict(each) | {"speedup": each.speedup, "highest": each.highest} for each in judged.forecasts],
    }
