"""Command line and result of a benchmark: which models it runs, what it prints and draws."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.grow import grow
from outrider.engine.options import Device, EngineOptions

if TYPE_CHECKING:
    from outrider.engine.model import Engine

DEMO = Path(__file__).resolve().parents[2] / "demo"


def parser_of(
    docstring: str, *, has_draft: bool = True, has_table: bool = False, draws: str = ""
) -> argparse.ArgumentParser:
    """The flags that choose the models; with `has_table`, --json; with `draws`, a plot's file. The help is the module's
    docstring."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target", help="model folder of the target")
    parser.add_argument("--grown", action="store_true", help="grow the target to 275 M parameters first")
    if has_draft:
        parser.add_argument("--draft", type=Path, default=DEMO / "draft", help="model folder of the draft")
    if has_table:
        parser.add_argument("--json", action="store_true", help="print everything as JSON")
    if draws:
        parser.add_argument("--plot", type=Path, metavar="FILE.svg", help=f"draw {draws}")
    return parser


@contextmanager
def target_model(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder of the chosen target; a grown one is deleted afterwards."""
    if not arguments.grown:
        yield arguments.target
        return
    with tempfile.TemporaryDirectory() as scratch:
        grown = Path(scratch) / "grown"
        grow(arguments.target, grown)
        yield grown


def load(model: Path, **options: Any) -> Engine:
    """A model's engine on the CPU."""
    from outrider.engine.loading.loading import load_model  # imports torch, which clients need not wait for

    return load_model(EngineOptions(model=model, device=Device.CPU, **options))


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """All flags, for the result; of files and folders only the names."""

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(each) for each in value]
        return value.name if isinstance(value, Path) else value

    return {name: shown(value) for name, value in vars(arguments).items()}


def say(words: str) -> None:
    """Prints progress."""
    print(words, file=sys.stderr, flush=True)


def report(
    arguments: argparse.Namespace,
    result: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any], Path], None] | None = None,
    table: Callable[[Mapping[str, Any]], str] | None = None,
) -> None:
    """Prints the result, as JSON where there is no table or --json asks for it, and draws it if --plot does."""
    print(json.dumps(result, indent=1) if table is None or arguments.json else table(result))
    if draw is not None and arguments.plot is not None:
        draw(result, arguments.plot)
