"""`python -m draft_worker`: starts one draft worker."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from draft_worker.limits import DraftLimits, DraftModel
from outrider.engine.heads.kind import is_head
from outrider.engine.options import EngineOptions
from outrider.errors import TokenizerMismatch
from outrider.observability.telemetry import DraftMetrics
from outrider.registry.worker_record import WorkerLoad
from outrider.security.tls import ANY_ROLE, Role
from outrider.settings import from_flags
from outrider.worker.worker_facts import worker_info
from outrider.worker.worker_main import WorkerKind, grammar_compiler, serve_until_stopped
from outrider.worker.worker_options import WorkerOptions
from outrider.worker.worker_process import leave
from protos.outrider.v1 import draft_pb2_grpc

if TYPE_CHECKING:
    from outrider.engine.heads.head_engine import HeadEngine
    from outrider.engine.model import Engine

logger = logging.getLogger("draft_worker")

KIND: Final = WorkerKind(
    "draft",
    "Serves a draft model: rides ahead of target workers and streams hints to them.",
    (EngineOptions, DraftModel, DraftLimits, WorkerOptions),
    {
        "/outrider.v1.Draft/Attach": frozenset({Role.COORDINATOR}),
        "/outrider.v1.Draft/GetInfo": ANY_ROLE,
    },
)
parse_arguments = KIND.parse_arguments


def use_vocabulary(engine: Engine, arguments: argparse.Namespace) -> Path:
    """Makes the engine use the target's token ids; returns the folder of their tokenizer. Raises ConfigurationError."""
    from outrider.text.tokenizer import Tokenizer
    from outrider.text.vocabulary_map import has_same_base, map_vocabulary

    own_dir, target_dir = Path(arguments.model), arguments.target_tokenizer
    if target_dir is None:
        return own_dir
    own, target = Tokenizer(own_dir), Tokenizer(target_dir)
    if own.fingerprint == target.fingerprint:
        return own_dir
    if not (arguments.allow_heterogeneous_vocab or has_same_base(target_dir, own_dir)):
        raise TokenizerMismatch(own.fingerprint, target.fingerprint, f"the target in {target_dir}")
    vocabulary = map_vocabulary(target, own, engine.vocab_size)
    shared = vocabulary.num_shared, len(vocabulary.own_ids)
    logger.info("the draft shares %d of the target's %d tokens, and proposes no others", *shared)
    engine.set_vocabulary(vocabulary, target.eos_token_ids)
    return target_dir


def own_name(model: Path, early_exit_layer: int | None) -> str:
    """The name of a draft that was given none: acceptance is remembered by it."""
    name = model.resolve().name
    return name if early_exit_layer is None else f"{name}-{early_exit_layer}-layers"


async def serve(arguments: argparse.Namespace) -> None:
    """Loads the model, serves until told to stop. Raises OutriderError when it cannot start."""
    limits = from_flags(DraftLimits, arguments)
    name = arguments.served_model_name or own_name(arguments.model, arguments.early_exit_layer)
    async with KIND.opened(arguments, partial(DraftMetrics, name)) as worker:
        process, metrics = worker.process, worker.metrics
        # Imported late: torch takes seconds, for which neither --help nor a probe should wait.
        from draft_worker.heads import loading as draft_heads
        from draft_worker.links import TargetDialer
        from draft_worker.runner import DraftCore
        from draft_worker.scheduler import DraftScheduler
        from draft_worker.server import DraftServicer

        engine: Engine | HeadEngine
        new_features = None
        if await worker.beside(lambda: is_head(arguments.model)):
            tokenizer_dir = draft_heads.target_of(arguments.model, arguments.target_tokenizer)
            engine = head = await worker.load_with(partial(draft_heads.load, tokenizer_dir))
            new_features = draft_heads.features_of(head)
            limits = replace(limits, num_mask_tokens=0)
        else:
            engine = model = await worker.load()
            if not model.enable_masks():
                limits = replace(limits, num_mask_tokens=0)
            elif limits.num_mask_tokens:
                logger.info("the draft reads mask tokens: %d guesses in one pass", 1 + limits.num_mask_tokens)
            tokenizer_dir = await worker.beside(lambda: use_vocabulary(model, arguments))
        limits = replace(limits, max_model_len=engine.max_model_len, end_of_sequence_ids=engine.eos_token_ids)
        scheduler = DraftScheduler(
            *(limits, engine.allocator, engine.vocab_size),
            new_features=new_features,
            reads_masks=limits.num_mask_tokens > 0,
        )
        info = await worker.beside(
            lambda: worker_info(
                *(engine, process.options, name, process.incarnation),
                max_num_seqs=scheduler.num_slots,  # its memory may have room for fewer than it was allowed
                tokenizer_dir=tokenizer_dir,
                num_mask_tokens=limits.num_mask_tokens,
            )
        )
        if new_features is not None:
            info.head_fingerprint = info.weights_fingerprint
        grammars = await worker.beside(lambda: grammar_compiler(engine, tokenizer_dir))
        await worker.beside(engine.lead)
        servicer = DraftServicer(info, scheduler, metrics, grammars, TargetDialer(process.dialer), worker.tracing)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, process.services)

        def load() -> WorkerLoad:
            return WorkerLoad(
                scheduler.num_sessions, round_trips=servicer.round_trips, num_background=scheduler.num_background
            )

        try:
            core = DraftCore(scheduler, engine, metrics, servicer.has_events)
            await serve_until_stopped(worker, engine, core, servicer, load)
        finally:
            await servicer.close()


if __name__ == "__main__":
    leave(KIND.main(serve))
