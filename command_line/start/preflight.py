"""Checks a deployment before anything starts, so that a mistake is reported early, with the flag to change.

Each check returns or raises ConfigurationError with one paragraph for the operator.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from math import floor, prod
from pathlib import Path
from typing import Any, Final

from command_line.checkout import ROOT, check_installed, engine_path, module
from command_line.start.deployment import Deployment, WorkerMemory, flatten
from coordinator.access.api_keys import KeyFile
from coordinator.settings import Hosting
from outrider.addresses import bound_socket, join_address
from outrider.engine.heads.kind import HeadKind, folder_kind, tensor_names
from outrider.engine.loading.checkpoint_files import tensors_of, weight_map
from outrider.engine.loading.machine import GIB, available_memory
from outrider.engine.options import Dtype, Quantization
from outrider.errors import ConfigurationError, TokenizerMismatch
from outrider.security.tls import LOOPBACK_HOSTS, Role, TlsFiles, check_role
from outrider.text import chat_template
from outrider.text.tokenizer import fingerprint
from outrider.text.vocabulary_map import has_same_base
from target_worker.limits import EngineName

LAYER_OF_TENSOR: Final = re.compile(r"\.(?:layers|h)\.(\d+)\.")
"""A layer's number in the name of a tensor, as transformers has it."""
SMALL_SHARE = 0.02
"""Weights below this share of the free memory leave enough room without a plan, which takes seconds."""
PLAN_TIMEOUT_S = 120.0
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def check(deployment: Deployment) -> dict[str, WorkerMemory]:
    """Checks everything that needs no connection. Returns what the workers of each role are told of their memory."""
    is_plain = deployment.hosting is Hosting.PLAIN
    is_vllm = deployment.engine is EngineName.VLLM
    own = [] if is_vllm and deployment.draft is None else ["draft_worker"]
    check_installed("coordinator" if is_plain else "ray_serve", *own, *([] if is_vllm else ["target_worker"]))
    if is_vllm:
        check_engine(deployment.engine_python or Path(sys.executable), engine_path())
    check_model(deployment.target, "--target")
    if deployment.draft_head is not None:
        check_head(deployment.draft_head, deployment.target)
    if deployment.draft is not None and not deployment.drafts_with_head:
        check_model(deployment.draft, "--draft")
        if not deployment.allow_heterogeneous_vocab:
            check_tokenizers(deployment.target, deployment.draft)
    if deployment.chat_template is not None:
        check_chat_template(deployment.chat_template)
    free = available_memory()
    weights = check_memory(deployment, free)
    check_access(deployment)
    if deployment.port == deployment.grpc_port != 0:
        raise ConfigurationError(f"--port and --grpc-port are both {deployment.port}; they must differ")
    check_port(deployment.host, deployment.port, "--port")
    check_port(deployment.host, deployment.grpc_port, "--grpc-port")
    return divide_memory(deployment, weights, free)


def check_engine(python: Path, path: str) -> None:
    """A Python with vLLM and Outrider. path: its PYTHONPATH."""
    look = "import importlib.util as u; print(*(name for name in ('vllm', 'target_worker') if not u.find_spec(name)))"
    try:
        done = subprocess.run(
            [str(python), "-c", look],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=PLAN_TIMEOUT_S, check=False,
        )  # fmt: skip
    except OSError as error:
        raise ConfigurationError(f"--engine-python {python} cannot be run: {error.strerror}") from error
    missing = done.stdout.split()
    if done.returncode or missing:
        what = " and ".join("vLLM" if name == "vllm" else "Outrider" for name in missing) or done.stderr.strip()[-200:]
        raise ConfigurationError(
            f"{python} cannot import {what}; name the Python of the environment that vLLM is installed in with "
            "--engine-python, and install Outrider there, too: pip install --no-deps outrider (docs/guides/vllm.md)"
        )


def check_access(deployment: Deployment) -> None:
    """Checks keys and certificates, and that the API is not open to the network by mistake."""
    if deployment.api_keys is not None:
        KeyFile(deployment.api_keys)
    if not deployment.knows_callers and deployment.host not in LOOPBACK_HOSTS and not deployment.is_insecure:
        raise ConfigurationError(
            f"--host {deployment.host} without --api-keys lets whoever reaches it in. Make keys with `outrider keys`, "
            "name an identity provider with --oidc-issuer, or give --insecure where the network itself keeps strangers "
            "out."
        )
    for role in (Role.COORDINATOR, Role.TARGET, Role.DRAFT):
        folder = deployment.certificates_of(role)
        if folder is not None:
            check_role(TlsFiles(folder).current(), role)


def check_model(folder: Path, flag: str) -> None:
    """A transformers model folder with configuration, tokenizer and complete safetensors weights."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"{flag} {folder}: there is no such folder. Give a folder with config.json, tokenizer.json and "
            "safetensors weights; models are not downloaded."
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigurationError(f"{flag} {folder}: {name} is missing; is this a transformers model folder?")
    missing = [name for name in _weight_files(folder, flag) if not (folder / name).is_file()]
    if missing:
        raise ConfigurationError(f"{flag} {folder}: weights are missing: {', '.join(missing[:5])}")


def check_head(folder: Path, target: Path) -> None:
    """A draft head of a kind that can be read, with weights that can, and with the target's tokenizer if it brings
    one. Whether its shapes fit the target, the workers say before they serve."""
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            f"the draft head {folder}: there is no config.json. Give the folder of an EAGLE-3 or Medusa head, or the "
            "target's own folder for its MTP layers; heads are not downloaded."
        )
    kind = folder_kind(folder)
    if not tensor_names(folder):
        raise ConfigurationError(
            f"the draft head {folder} has no safetensors weights; pickled ones (*.bin, *.pt) are not read, for they "
            "run whatever their author wrote into them. docs/guides/draft-heads.md says how to convert them."
        )
    if kind is HeadKind.MTP and folder.resolve() != target.resolve():
        raise ConfigurationError(
            f"{folder} is a model with MTP layers, which draft for that model alone. Give its folder as --target, too, "
            "or choose another draft."
        )
    if kind is not HeadKind.MTP and (folder / "tokenizer.json").is_file():
        check_tokenizers(target, folder)


def _weight_files(folder: Path, flag: str) -> list[str]:
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return [WEIGHTS]
    try:
        return sorted(set(weight_map(index).values()))
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag} {folder}: {error.message}") from error


def check_chat_template(path: Path) -> None:
    """A file that can be read, with a template that can be compiled."""
    try:
        chat_template.check_chat_template(path.read_text(encoding="utf-8"), f"--chat-template {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {path}: {getattr(error, 'strerror', None) or error}") from error


def check_memory(deployment: Deployment, free: int) -> dict[str, int]:
    """That the weights of all workers find room together. Returns those of each role's workers, in bytes."""
    item_size = 4 if deployment.dtype is Dtype.FLOAT32 else 2
    parts = [
        ("target", deployment.num_target_workers, deployment.target, deployment.quantization),
        ("draft", deployment.num_draft_workers, deployment.draft, deployment.draft_quantization),
    ]
    needed, words = {}, []
    for role, num_workers, folder, quantization in parts:
        if folder is None or not num_workers:
            continue
        weights = _num_weights(deployment, role, folder) * (item_size if quantization is Quantization.NONE else 1)
        needed[role] = num_workers * weights
        words.append(f"{num_workers} × {weights / GIB:.1f} GiB for the {role} worker{'s'[: num_workers > 1]}")
    if sum(needed.values()) > free:
        raise ConfigurationError(
            f"{free / GIB:.1f} GiB are free here, and weights alone take {' and '.join(words)}. Start fewer workers, "
            "quantize them (--quantization, --draft-quantization) or use a larger machine; `outrider plan` tells what "
            "fits."
        )
    return needed


def _num_weights(deployment: Deployment, role: str, folder: Path) -> int:
    """Parameters that a worker of a role loads, in whatever precision."""
    head, target = deployment.draft_head, deployment.target
    if role == "draft":
        if deployment.drafts_with_head:
            return num_head_parameters(folder)
        return num_parameters(folder, "--draft", deployment.early_exit_layer)
    # Without running the head, the target has little of it; MTP layers are in its own files.
    is_apart = head is not None and deployment.local_head and head.resolve() != target.resolve()
    own = num_head_parameters(head) if head is not None and is_apart else 0
    return num_parameters(folder, "--target") + own


def num_head_parameters(folder: Path) -> int:
    """Told by the headers of a head's files, whatever their names. What it shares with its target is not counted."""
    return sum(prod(each.shape) for path in sorted(folder.glob("*.safetensors")) for each in tensors_of(path))


def divide_memory(deployment: Deployment, weights: Mapping[str, int], free: int) -> dict[str, WorkerMemory]:
    """Divides the memory between the workers: they load at the same time, and each alone would take what it sees free.

    Raises ConfigurationError, with the numbers, where they do not fit together.
    """
    found = None
    if sum(weights.values()) > SMALL_SHARE * free:
        found = _planned(deployment)
    if found is None:
        return _shares(deployment, weights)
    if found["refusal"] is not None:
        raise ConfigurationError(found["refusal"])
    return {
        role: WorkerMemory(each["max_model_len"], kv_cache_gib=each["num_bytes"] / GIB)
        for role, each in found["workers"].items()
    }


def _planned(deployment: Deployment) -> dict[str, Any] | None:
    """The findings of `outrider plan`, in a process of its own, so that this one needs no torch; None where it knows no
    plan for such a model."""
    flags = {
        "--draft": deployment.draft,
        "--draft-head": None if deployment.drafts_with_head else deployment.draft_head,
        "--early-exit-layer": deployment.early_exit_layer,
        "--tensor-parallel-size": deployment.tensor_parallel_size,
        "--draft-tensor-parallel-size": deployment.draft_tensor_parallel_size,
        "--num-target-workers": deployment.num_target_workers,
        "--num-draft-workers": deployment.num_draft_workers,
        "--dtype": deployment.dtype.value,
        "--quantization": deployment.quantization.value,
        "--draft-quantization": deployment.draft_quantization.value,
        "--memory-utilization": deployment.memory_utilization,
        "--max-model-len": deployment.max_model_len,
        "--max-num-seqs": deployment.max_num_seqs,
    }
    switches = [] if deployment.local_head else ["--no-local-head"]
    command = [*module("command_line"), "plan", str(deployment.target), *flatten(flags), *switches, "--json"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=PLAN_TIMEOUT_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None  # the workers say what is wrong, if anything is
    return found


def _shares(deployment: Deployment, weights: Mapping[str, int]) -> dict[str, WorkerMemory]:
    """Half of the memory equally, half by the size of the weights."""
    num_workers = {"target": deployment.num_target_workers, "draft": deployment.num_draft_workers}
    whole, num_all = sum(weights.values()) or 1, sum(num_workers[role] for role in weights)
    found = {}
    for role, own in weights.items():
        share = deployment.memory_utilization * (1 / num_all + own / whole / num_workers[role]) / 2
        found[role] = WorkerMemory(deployment.max_model_len, memory_utilization=floor(1e4 * share) / 1e4)
    return found


def num_parameters(folder: Path, flag: str, most_layers: int | None = None) -> int:
    """Told by the headers of the weights' files (https://huggingface.co/docs/safetensors, "Format"). most_layers: those
    behind them are not loaded."""

    def is_loaded(name: str) -> bool:
        layer = LAYER_OF_TENSOR.search(name)
        return layer is None or most_layers is None or int(layer[1]) < most_layers

    total = 0
    for name in _weight_files(folder, flag):
        try:
            total += sum(prod(tensor.shape) for tensor in tensors_of(folder / name) if is_loaded(tensor.name))
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{flag} {folder}: {name} is no safetensors file; was the download finished?"
            ) from error
    return total


def check_tokenizers(target: Path, draft: Path) -> None:
    """A hint is a token id: it must mean the same text on both sides. Added tokens may differ, the draft worker sees
    to them (`outrider.text.vocabulary_map`)."""
    target_fingerprint, draft_fingerprint = fingerprint(target), fingerprint(draft)
    if target_fingerprint != draft_fingerprint and not has_same_base(target, draft):
        raise TokenizerMismatch(target_fingerprint, draft_fingerprint, f"the draft in {draft}")


def check_port(host: str, port: int, flag: str) -> None:
    """A port that this process could listen on now; 0 lets the system choose."""
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"{flag} {port}: a port is a number from 0 to 65535")
    try:
        with bound_socket(host, port) as listener:
            listener.listen(1)
    except socket.gaierror as error:
        raise ConfigurationError(f"--host {host}: not an address of this machine ({error.strerror})") from error
    except OSError as error:
        raise ConfigurationError(
            f"{flag} {port}: cannot listen on {join_address(host, port)} ({error.strerror}). Stop the program that "
            f"uses it or choose another with {flag}."
        ) from error
