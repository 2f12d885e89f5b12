"""A profile as `outrider tune --json` prints it, with only the fields that the simulator reads."""

from __future__ import annotations

from typing import Any, Final

PROFILE: Final[dict[str, Any]] = {
    "target": {"step_ms_by_num_tokens": {"1": 1.0, "8": 2.0}, "sequence_ms": 0.1},
    "draft": {"step_ms_by_num_tokens": {"1": 0.5, "8": 0.6}, "sequence_ms": 0.01},
    "overheads": {
        "step_ms": 0.25, "session_ms": 0.1, "hints_ms": 0.2, "hints_session_ms": 0.3,
        "draft_step_ms": 0.4, "draft_session_ms": 0.09, "link_ms": 0.15,
    },
    "texts": {"ranks": [[0, 0, 1], [4, 0]]},
}  # fmt: skip
