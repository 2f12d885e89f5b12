"""A worker's description of itself: for callers, for the registry, for its ready line."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path

from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.registry.worker_record import Pool, WorkerRecord
from outrider.worker.engine_options import ServedEngine
from outrider.worker.worker_options import WorkerOptions
from protos.outrider.v1 import common_pb2


def worker_info(
    engine: ServedEngine,
    options: WorkerOptions,
    name: str,
    incarnation: str,
    *,
    max_num_seqs: int,
    max_num_waiting: int = 0,
    num_speculative_tokens: int = 0,
    num_mask_tokens: int = 0,
    tokenizer_dir: Path | None = None,
) -> common_pb2.WorkerInfo:
    """A worker's description of itself, for callers and the registry. tokenizer_dir: the tokenizer of its ids; None:
    the model's own."""
    from outrider.text.tokenizer import fingerprint

    config = engine.config
    return common_pb2.WorkerInfo(
        worker_id=options.worker_id,
        model_name=name,
        tokenizer_fingerprint=fingerprint(tokenizer_dir or config.model),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_waiting=max_num_waiting,
        num_speculative_tokens=num_speculative_tokens,
        num_mask_tokens=num_mask_tokens,
        dtype=config.dtype if config.quantization == "none" else config.quantization,
        incarnation=incarnation,
        num_model_parameters=engine.num_parameters,
        weights_fingerprint=checkpoint_fingerprint(config.model),
        numerics=engine.numerics,
    )


def identity(info: common_pb2.WorkerInfo) -> dict[str, str]:
    """Identifies what determines a worker's output, and its draft head if it has one, for its ready line."""
    head = {"head_fingerprint": info.head_fingerprint} if info.head_fingerprint else {}
    return {
        "model": info.model_name,
        "dtype": info.dtype,
        "weights_fingerprint": info.weights_fingerprint,
        "numerics": info.numerics,
        **head,
    }


def record_from_info(
    pool: Pool, info: common_pb2.WorkerInfo, address: str = "unknown:0", started_at_s: float | None = None
) -> WorkerRecord:
    """The registry record of a worker; the address is filled in when it listens. started_at_s: by default now."""
    told = {each.name for each in fields(WorkerRecord)}.intersection(info.DESCRIPTOR.fields_by_name)
    return WorkerRecord(
        pool=pool,
        address=address,
        started_at_ms=int(1000 * (time.time() if started_at_s is None else started_at_s)),
        **{name: getattr(info, name) for name in told},
    )
