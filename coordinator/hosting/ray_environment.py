"""The environment that Ray's processes inherit from the coordinator; unsafe values are replaced. Pure.

Invariant: no port of Ray's answers without its token, whatever the coordinator's own environment says. An inherited
value that would open one is replaced, and named.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

TOKEN_CHARS_MIN: Final = 32
"""Shortest inherited token that cannot be guessed: Ray's ports are reachable from other machines."""
_MODE: Final = "RAY_AUTH_MODE"
_TOKEN: Final = "RAY_AUTH_TOKEN"
_IMPOSED: Final = {
    # Without an explicit mode Ray writes a token into the home directory.
    _MODE: "token",
    # Ray's own metrics would be open to everybody, without its token. The latter two do not accept "none": an
    # impossible port is an error in their logs and no listener.
    "RAY_enable_metrics_collection": "false",
    "DASHBOARD_METRIC_PORT": "-1",
    "AUTOSCALER_METRIC_PORT": "-1",
}
_DEFAULTS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ray's workers have niceness 15 by default. On a machine busy with computation, as under overload, refusals would
    # then take many seconds and answers would stutter.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def ray_environment(
    inherited: Mapping[str, str], ingress: Mapping[str, str], root: str, new_token: str
) -> tuple[dict[str, str], list[str]]:
    """The variables to set, and a sentence for each inherited value that is not taken over.

    `ingress` comes from the choice of the proxy; `root` is the folder of our packages, from which replicas import them.
    `new_token` lives as long as the process and is secret; a good inherited one stays, so that Ray's own tools work
    beside the coordinator.
    """
    environment = {name: inherited.get(name, value) for name, value in _DEFAULTS.items()}
    environment |= _IMPOSED | dict(ingress)
    told = [
        f"{name}={inherited[name]} from the environment is not taken over, for Ray's ports would answer strangers: it "
        f"is {value} here"
        for name, value in _IMPOSED.items()
        if inherited.get(name, value) != value
    ]
    token = inherited.get(_TOKEN)
    is_good = token is not None and len(token.strip()) >= TOKEN_CHARS_MIN
    if token is not None and not is_good:
        told.append(f"{_TOKEN} from the environment has fewer than {TOKEN_CHARS_MIN} characters; a new one is used")
    environment[_TOKEN] = token if token is not None and is_good else new_token
    others = [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    environment["PYTHONPATH"] = os.pathsep.join([root, *others])
    return environment, told
