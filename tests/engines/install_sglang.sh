#!/usr/bin/env bash
# Makes a virtual environment with SGLang, and what its hints need beside it (`docs/guides/sglang.md`), for machines without
# a GPU: without CUDA's libraries and SGLang's compiled kernels, which tests/engines/sglang_kernels stands in for.
# usage: tests/engines/install_sglang.sh FOLDER      (Linux on x86-64, Python 3.11 or 3.12; minutes; does nothing twice)
set -euo pipefail
folder=${1:?usage: tests/engines/install_sglang.sh FOLDER}
version=0.5.23
python=${PYTHON:-python3}
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
if "$folder/bin/python" -c "import sglang, grpc_status, cryptography" 2>/dev/null; then exit 0; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install -q torch==2.13.0 triton
"${pip[@]}" download -q --no-deps -d "$work" "sglang==$version"
# Its own requirements, less torch, packages of CUDA, and those of images, sound, data sets and tools.
"$folder/bin/python" - "$work"/sglang-*.whl >"$work/requirements.txt" <<'PYTHON'
import re, sys, zipfile

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
left_out = re.compile(
    r"(torch|torchaudio|torchvision|torchcodec|torch_memory_saver|cuda-python|flash-attn-4|flashinfer_python|humming-kernels"
    r"|kernels|nvidia-[a-z-]+|nvshmem4py-cu13|quack-kernels|sgl-[a-z-]+|sglang-kernel|tilelang|smg-grpc-servicer"
    r"|deepseek-recipe|tml-renderers|av|decord2|timm|modelscope|datasets|outlines|blobfile|py-spy|build)\b"
)
for line in wheel.read(metadata).decode().splitlines():
    requirement = line.removeprefix("Requires-Dist: ")
    if line != requirement and "extra ==" not in requirement and not left_out.match(requirement):
        print(requirement.partition(";")[0])
PYTHON
"${pip[@]}" install -q -r "$work/requirements.txt" torch==2.13.0 nvidia-ml-py dill
"${pip[@]}" install -q --no-deps "$work"/sglang-*.whl
"${pip[@]}" install -q 'grpcio-status>=1.85.1,<2' 'cryptography>=46,<51'
"$folder/bin/python" -c "import sglang; print('sglang', sglang.__version__)"
