"""Settings of `outrider serve` beside those of the plan of its processes (`deployment.Deployment`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from command_line.checkout import DEMO_TARGET
from outrider.engine.options import Quantization
from outrider.registry.redis_connection import RedisSettings
from outrider.settings import MODEL, same_as, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings of `outrider serve` itself: which models, which Redis, which logs."""

    target: Path = setting(
        DEMO_TARGET, "model folder of the target, which determines the output", MODEL, shows="the demo's"
    )
    draft: Path | None = setting(
        None, "model folder of the draft, which proposes tokens; or folder of a draft head: EAGLE-3 runs on draft "
        "workers, Medusa and the target's own MTP layers beside the target",
        MODEL, shows="the demo's",
    )  # fmt: skip
    no_draft: bool = setting(False, "decode plainly, without a draft", MODEL)
    self_draft: bool = setting(
        False, "draft with a quantized copy of the target. Nearly all hints are accepted; it pays where a draft "
        "worker runs the small weights faster than the target worker its own",
        MODEL,
    )  # fmt: skip
    draft_quantization: Quantization | None = setting(
        None, "quantize the draft's weights while loading; it changes how many hints are accepted",
        MODEL, shows="none; int8 with --self-draft",
    )  # fmt: skip
    redis_url: str | None = same_as(RedisSettings, "redis_url", shows="OUTRIDER_REDIS_URL, else an embedded one")
    redis_url_file: Path | None = same_as(RedisSettings, "redis_url_file", shows="OUTRIDER_REDIS_URL_FILE")
    log_dir: Path | None = setting(None, "where each process's log goes", shows="in the cache")
    verbose: bool = setting(False, "show the processes' logs here too")
