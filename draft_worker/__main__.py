"""`python -m draft_worker`: starts one draft worker."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from draft_worker.limits import DraftLimits
from outrider.errors import TokenizerMismatch
from outrider.tls import ANY_ROLE, Role
from outrider.tracing import Tracing
from outrider.worker_options import add_worker_arguments, engine_config, worker_options
from outrider.worker_process import (
    WorkerProcess,
    identity,
    leave,
    model_name,
    record_from_info,
    run_worker,
    worker_info,
)
from outrider.worker_ranks import follow, is_follower, own_cores
from outrider.worker_record import WorkerLoad

if TYPE_CHECKING:
    from outrider.engine.model import Engine

logger = logging.getLogger("draft_worker")

DEFAULTS = DraftLimits()
PERMITTED: Final = {
    "/outrider.v1.Draft/Attach": frozenset({Role.COORDINATOR}),
    "/outrider.v1.Draft/GetInfo": ANY_ROLE,
}
"""Who may call what, where there are certificates; what is not named is for nobody."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="draft_worker",
        description="Serves a draft model: rides ahead of target workers and streams hints to them.",
    )
    add_worker_arguments(parser, "draft")
    parser.add_argument(
        "--target-tokenizer",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="the target's model folder, or one with its tokenizer.json: hints are named by its token ids; default: "
        "the draft has the same",
    )
    parser.add_argument(
        "--allow-heterogeneous-vocab",
        action="store_true",
        help="with --target-tokenizer, draft though the two cut texts differently: only tokens that both have are "
        "guessed, so that fewer hints hold; the output stays exact",
    )
    parser.add_argument(
        "--max-nodes",
        type=int,
        default=DEFAULTS.max_nodes,
        help="live nodes of one hint tree (default %(default)s)",
    )
    parser.add_argument(
        "--max-lookahead",
        type=int,
        default=DEFAULTS.max_lookahead,
        help="how far ahead of the committed tokens (default %(default)s)",
    )
    parser.add_argument(
        "--max-alternatives",
        type=int,
        default=DEFAULTS.max_alternatives,
        help="other likely tokens that a node keeps beside the draft's own, to be grown when their turn comes; "
        "0: none (default %(default)s)",
    )
    parser.add_argument(
        "--max-nodes-per-step",
        type=int,
        default=DEFAULTS.max_nodes_per_step,
        help="of all trees together, fed in one forward pass (default %(default)s)",
    )
    parser.add_argument(
        "--max-chain-nodes",
        type=int,
        default=DEFAULTS.max_chain_nodes,
        help="fed one below the other before hints are sent and commits are heard; 0: hints go out one by one "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--min-reach",
        type=float,
        default=DEFAULTS.min_reach,
        help="how likely a node must be to be reached for it to be fed, 0 to 1 (default %(default)s)",
    )
    parser.add_argument(
        "--min-sampled-reach",
        type=float,
        default=DEFAULTS.min_sampled_reach,
        help="under rejection sampling, how likely a hint must be to be reached for its successor to be guessed and "
        "sent, 0 to 1; lower is faster where bytes cost nothing (default %(default)s)",
    )
    return parser.parse_args(arguments)


def limits_from(arguments: argparse.Namespace) -> DraftLimits:
    """As far as they do not depend on the model. Raises ConfigurationError, naming the flag."""
    return DraftLimits(
        max_num_seqs=arguments.max_num_seqs,
        max_nodes=arguments.max_nodes,
        max_lookahead=arguments.max_lookahead,
        max_alternatives=arguments.max_alternatives,
        max_nodes_per_step=arguments.max_nodes_per_step,
        max_chain_nodes=arguments.max_chain_nodes,
        min_reach=arguments.min_reach,
        min_sampled_reach=arguments.min_sampled_reach,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )


def learn_language(engine: Engine, arguments: argparse.Namespace) -> Path:
    """Has the engine speak the target's token ids; returns the folder of their tokenizer. Raises ConfigurationError."""
    from outrider.tokenizer import Tokenizer
    from outrider.vocabulary_map import has_same_base, map_vocabulary

    own_dir, target_dir = Path(arguments.model), arguments.target_tokenizer
    if target_dir is None:
        return own_dir
    own, target = Tokenizer(own_dir), Tokenizer(target_dir)
    if own.fingerprint == target.fingerprint:
        return own_dir
    if not (arguments.allow_heterogeneous_vocab or has_same_base(target_dir, own_dir)):
        raise TokenizerMismatch(own.fingerprint, target.fingerprint, f"the target in {target_dir}")
    vocabulary = map_vocabulary(target, own, engine.vocab_size)
    logger.info(
        "%d of the target's %d tokens are the draft's too, and guessed",
        vocabulary.num_shared,
        len(vocabulary.own_ids),
    )
    engine.speak(vocabulary, target.eos_token_ids)
    return target_dir


async def serve(arguments: argparse.Namespace) -> None:
    """Loads the model, serves until told to stop. Raises OutriderError when it cannot start."""
    limits = limits_from(arguments)
    # Imported late, so that --help and bad arguments do not wait for torch.
    from draft_worker.links import TargetDialer
    from draft_worker.runner import DraftCore
    from draft_worker.scheduler import DraftScheduler
    from draft_worker.server import DraftServicer
    from outrider.engine.loading import load_model
    from outrider.engine.rank_group import join_ranks
    from outrider.grammar import GrammarCompiler
    from outrider.telemetry import DraftMetrics
    from protos.outrider.v1 import draft_pb2_grpc

    options = worker_options(arguments)
    name = model_name(arguments.model)
    # Closed after the server has stopped, for that ends the spans of those who are cut off.
    async with (
        Tracing.to(arguments.otlp_endpoint, "outrider-draft", options.worker_id) as tracing,
        WorkerProcess(options, "draft", ["outrider.v1.Draft"], PERMITTED) as process,
    ):
        engine = load_model(engine_config(arguments), join_ranks(options.stall_exit_s))
        engine.lead()
        tokenizer_dir = learn_language(engine, arguments)
        limits = replace(limits, max_model_len=engine.max_model_len, end_of_sequence_ids=engine.eos_token_ids)
        scheduler = DraftScheduler(limits, engine.allocator, engine.vocab_size)
        # What its memory has room for may be fewer than it was allowed.
        info = worker_info(
            *(engine, options, name, process.incarnation),
            max_num_seqs=scheduler.num_slots,
            tokenizer_dir=tokenizer_dir,
        )
        metrics = DraftMetrics(name, options.worker_id)
        metrics.max_num_seqs.set(scheduler.num_slots)
        metrics_port = process.serve_metrics(metrics.registry)
        grammars = GrammarCompiler(
            tokenizer_dir / "tokenizer.json",
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
        )
        servicer = DraftServicer(info, scheduler, metrics, grammars, TargetDialer(process.dialer), tracing)
        core = DraftCore(scheduler, engine, metrics)
        thread = process.make_thread(core, servicer.dispatch)
        core.has_events = thread.has_events
        servicer.bind(thread)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, process.server)
        thread.start()
        try:
            await process.run(
                record_from_info("draft", info),
                load=lambda: WorkerLoad(scheduler.num_sessions, round_trips=servicer.round_trips),
                on_drain=servicer.start_draining,
                ready_facts={"metrics_port": metrics_port, **identity(info)},
            )
        finally:
            if thread.stop():
                engine.dismiss()
            await servicer.close()


def main() -> int:
    arguments = parse_arguments()
    if is_follower():
        return follow(arguments)
    cores = own_cores(arguments.cpu_affinity)
    return run_worker(lambda: serve(arguments), cores, arguments.log_format)


if __name__ == "__main__":
    leave(main())
