"""Runs the rendered chart without a cluster: `python -m tests.cluster --help`."""

from __future__ import annotations

import sys

from tests.cluster.isolation import parser, run, why_not


def main() -> int:
    parser().parse_args()
    if reason := why_not():
        print(f"cluster: {reason}", file=sys.stderr)
        return 2
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
