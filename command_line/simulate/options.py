"""Settings of `outrider simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.settings import check, setting

_FLEET = "Which fleet (instead of what the file says)"
_WHAT = "What to find out"
_RESULT = "What to make of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Settings of `outrider simulate`. Raises SettingError."""

    fleet_file: Path | None = setting(
        None, "fleet file: pools, step times, network and traffic. --example prints one",
        "", "[fleet]", shows="every setting's default", flag=None,
    )  # fmt: skip
    example: bool = setting(False, "print a fleet file that explains every setting, and exit")
    targets: int | None = setting(None, "target workers", _FLEET, "workers", at_least=1, shows="the file's")
    drafts: int | None = setting(None, "draft workers", _FLEET, "workers", at_least=0, shows="the file's")
    concurrency: int | None = setting(
        None, "closed loop: number of requests in flight at all times", _FLEET, "requests", at_least=1,
        shows="the file's, or 50 % of all slots",
    )  # fmt: skip
    rate: float | None = setting(
        None, "open loop instead: requests per second, with Poisson arrivals", _FLEET, at_least=1e-6
    )
    seconds: float | None = setting(
        None, "virtual time of the measurement", _FLEET, "seconds", at_least=0.01, shows="the file's"
    )
    warmup_s: float | None = setting(
        None, "virtual time before the measurement", _FLEET, "seconds", at_least=0, shows="the file's"
    )
    seed: int | None = setting(None, "seed of all random numbers", _FLEET, at_least=0, shows="the file's")
    pair: Path | None = setting(
        None, "costs and agreement that [cyan]outrider tune --json[/cyan] measured, instead of the file's",
        _FLEET, "file",
    )  # fmt: skip
    ratios: str | None = setting(
        None,
        "compare these ratios of draft to target workers at the price of the fleet, or auto",
        _WHAT,
        "d:t[,d:t...]",
    )
    plain: bool = setting(True, "simulate the same targets without draft workers too", _WHAT)
    jobs: int = setting(1, "simulations at once, a process each", _WHAT, at_least=1, at_most=256)
    json: Path | None = setting(None, "write everything there; - prints it", _RESULT, "file|-")

    def __post_init__(self) -> None:
        check(self)
