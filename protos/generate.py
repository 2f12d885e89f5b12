"""Writes the committed gRPC stubs: `python -m protos.generate` from the repository root. A test proves them fresh."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_FILES = sorted((ROOT / "protos" / "outrider" / "v1").glob("*.proto"))


def generate(out_dir: Path) -> None:
    """Compiles every .proto file into `out_dir`, laid out as `protos/outrider/v1`. Raises RuntimeError on failure."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{well_known}",
            f"--python_out={out_dir}",
            f"--pyi_out={out_dir}",
            f"--grpc_python_out={out_dir}",
            *(str(path.relative_to(ROOT)) for path in PROTO_FILES),
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc exited with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
