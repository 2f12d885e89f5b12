"""Runs a benchmark by its name, or lists all of them: `python -m benchmarks NAME --help`."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def benchmarks() -> dict[str, Path]:
    """Modules with a `main`, by their short names."""
    modules = (path for path in sorted(HERE.glob("*/*.py")) if path.parent.name != "shared")
    return {path.stem: path for path in modules if "\ndef main(" in path.read_text(encoding="utf-8")}


def purpose(path: Path) -> str:
    """First line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def main() -> int | None:
    known, (name, *rest) = benchmarks(), sys.argv[1:] or ["--help"]
    if name not in known:
        listing = "\n".join(f"{each:18}{purpose(path)}" for each, path in known.items())
        if name in ("-h", "--help"):
            print(f"python -m benchmarks NAME [--help]\n\n{listing}")
            return 0
        print(f"there is no benchmark {name!r}; there are:\n{listing}", file=sys.stderr)
        return 2
    sys.argv[:] = [f"python -m benchmarks {name}", *rest]
    status: int | None = importlib.import_module(f"benchmarks.{known[name].parent.name}.{name}").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
