"""Checks a deployment before anything starts, so that a mistake is reported early, with the flag to change.

Each check returns or raises ConfigurationError with one paragraph for the operator.
"""

from __future__ import annotations

import json
import socket
from math import prod
from pathlib import Path

from command_line.checkout import check_installed
from command_line.start.deployment import Deployment
from coordinator.access.api_keys import KeyFile
from coordinator.settings import Hosting
from outrider.engine.loading.machine import GIB, available_memory
from outrider.engine.options import Dtype, Quantization
from outrider.errors import ConfigurationError, TokenizerMismatch
from outrider.security.tls import LOOPBACK_HOSTS, Role, TlsFiles, check_role
from outrider.text.tokenizer import compile_chat_template, fingerprint
from outrider.text.vocabulary_map import has_same_base

MAX_HEADER_BYTES = 100_000_000  # as safetensors itself has it
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def check(deployment: Deployment) -> None:
    """Checks everything that needs no process and no connection."""
    is_plain = deployment.hosting is Hosting.PLAIN
    check_installed("coordinator" if is_plain else "ray_serve", "target_worker", "draft_worker")
    check_model(deployment.target, "--target")
    if deployment.draft is not None:
        check_model(deployment.draft, "--draft")
        if not deployment.allow_heterogeneous_vocab:
            check_tokenizers(deployment.target, deployment.draft)
    if deployment.chat_template is not None:
        check_chat_template(deployment.chat_template)
    check_memory(deployment, available_memory())
    check_access(deployment)
    if deployment.port == deployment.grpc_port != 0:
        raise ConfigurationError(f"--port and --grpc-port are both {deployment.port}; they must differ")
    check_port(deployment.host, deployment.port, "--port")
    check_port(deployment.host, deployment.grpc_port, "--grpc-port")


def check_access(deployment: Deployment) -> None:
    """Checks keys and certificates, and that the API is not open to the network by mistake."""
    if deployment.api_keys is not None:
        KeyFile(deployment.api_keys)
    elif deployment.host not in LOOPBACK_HOSTS and not deployment.is_insecure:
        raise ConfigurationError(
            f"--host {deployment.host} without --api-keys lets whoever reaches it in. Make keys with `outrider keys`, "
            "or give --insecure where the network itself keeps strangers out."
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


def _weight_files(folder: Path, flag: str) -> list[str]:
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return [WEIGHTS]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"{flag} {folder}: {WEIGHTS_INDEX} cannot be read: {error}") from error


def check_chat_template(path: Path) -> None:
    """A file that can be read, with a template that can be compiled."""
    try:
        compile_chat_template(path.read_text(encoding="utf-8"), f"--chat-template {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {path}: {getattr(error, 'strerror', None) or error}") from error


def check_memory(deployment: Deployment, free: int) -> None:
    """That the weights of all workers find room together. What else a worker takes it looks at itself before it loads
    (`outrider.engine.loading.memory_plan`), but it knows of no other that is just loading beside it."""
    item_size = 4 if deployment.dtype is Dtype.FLOAT32 else 2
    parts = [
        ("target", deployment.num_target_workers, deployment.target, deployment.quantization),
        ("draft", deployment.num_draft_workers, deployment.draft, deployment.draft_quantization),
    ]
    needed, words = 0, []
    for role, num_workers, folder, quantization in parts:
        if folder is None or not num_workers:
            continue
        weights = num_parameters(folder, f"--{role}") * (item_size if quantization is Quantization.NONE else 1)
        needed += num_workers * weights
        words.append(f"{num_workers} × {weights / GIB:.1f} GiB for the {role} worker{'s'[: num_workers > 1]}")
    if needed > free:
        raise ConfigurationError(
            f"{free / GIB:.1f} GiB are free here, and weights alone take {' and '.join(words)}. Start fewer workers, "
            "quantize them (--quantization, --draft-quantization) or use a larger machine; `outrider plan` tells what "
            "fits."
        )


def num_parameters(folder: Path, flag: str) -> int:
    """Told by the headers of the weights' files (https://huggingface.co/docs/safetensors, "Format")."""
    total = 0
    for name in _weight_files(folder, flag):
        try:
            with (folder / name).open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
            total += sum(prod(tensor["shape"]) for key, tensor in header.items() if key != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
        with _listener(host, port):
            pass
    except socket.gaierror as error:
        raise ConfigurationError(f"--host {host}: not an address of this machine ({error.strerror})") from error
    except OSError as error:
        raise ConfigurationError(
            f"{flag} {port}: cannot listen on {host}:{port} ({error.strerror}). Stop the program that uses it "
            f"or choose another with {flag}."
        ) from error


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do: connections of a former server that linger in TIME_WAIT do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener
