"""`python -m docs.generate`: writes the generated reference pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from docs.generate.command_line import command_line_page
from docs.generate.grpc import grpc_page
from docs.generate.helm_values import helm_values_page
from docs.generate.http import http_page
from docs.generate.metrics import metrics_page
from docs.generate.parameters import parameters_page
from docs.generate.settings import settings_page

FOLDER: Final = Path(__file__).resolve().parents[1] / "reference"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "cli.md": command_line_page,
    "grpc-api.md": grpc_page,
    "helm-values.md": helm_values_page,
    "http-api.md": http_page,
    "metrics.md": metrics_page,
    "parameters.md": parameters_page,
    "settings.md": settings_page,
}


def main() -> None:
    """Writes every page."""
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
