"""Other words for what the chart names and this branch does not have yet.

TODO(lead): remove this module, and its one call in `story.py`, when these are merged: `--announce` without a port, and
`--settings` of `python -m coordinator --hosting=plain` with the setting `models_file`.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Sequence
from typing import Any

import yaml

from tests.k8s.pods import Object


def with_stand_ins(objects: Sequence[Object]) -> list[dict[str, Any]]:
    """The objects with commands that this branch understands."""
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    changed = copy.deepcopy(list(objects))
    for each in changed:
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                words: list[str] = []
                for word in container["args"]:
                    if word.startswith("--settings="):
                        words += _flags(maps["outrider-coordinator"], maps["outrider-models"])
                    else:
                        words.append(word.replace("--announce=$(POD_IP)", "--announce=$(POD_IP):50051"))
                container["args"] = words
    return [dict(each) for each in changed]


def _flags(settings_map: Object, models_map: Object) -> list[str]:
    settings = yaml.safe_load(settings_map["settings.yaml"])
    (model,) = tomllib.loads(models_map["models.toml"])["models"]
    flags = {
        "--tokenizer": model["tokenizer"],
        "--served-model-name": model["name"],
        "--max-requests": settings["requests_max"],
        "--log-format": settings["log_format"],
        "--metrics-port": settings["metrics_port"],
    }
    switches = [f"--{name.replace('_', '-')}" for name in ("seed_requests",) if settings.get(name)]
    return [*(f"{flag}={value}" for flag, value in flags.items()), "--log-requests", *switches]
