"""`python -m target_worker`: starts one target worker."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

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
from target_worker.limits import SchedulerLimits

logger = logging.getLogger("target_worker")

DEFAULTS = SchedulerLimits()
PERMITTED: Final = {
    "/outrider.v1.Target/Generate": frozenset({Role.COORDINATOR}),
    "/outrider.v1.Target/SetSpeculation": frozenset({Role.COORDINATOR}),
    "/outrider.v1.Target/GetInfo": ANY_ROLE,
    "/outrider.v1.Hints/Exchange": frozenset({Role.DRAFT}),
}
"""Who may call what, where there are certificates; what is not named is for nobody."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="target_worker",
        description="Serves a target model: a complete generation server that also listens to draft workers' hints.",
    )
    add_worker_arguments(parser, "target")
    parser.add_argument(
        "--served-model-name", default=None, help="what clients ask for; default: the folder's name"
    )
    parser.add_argument(
        "--max-num-waiting",
        type=int,
        default=DEFAULTS.max_num_waiting,
        help="sessions that may wait for a place, those not counted that lost theirs for want of KV "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=DEFAULTS.max_num_batched_tokens,
        help="tokens fed in one step (default %(default)s)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=DEFAULTS.num_speculative_tokens,
        help="most hints per session and step (default %(default)s)",
    )
    parser.add_argument(
        "--hint-wait-ms",
        type=float,
        default=DEFAULTS.hint_wait_ms_max,
        help="most that a step waits for hints; 0 never waits (default %(default)s)",
    )
    parser.add_argument(
        "--wait-for-num-hints",
        type=int,
        default=None,
        help="hints that a step waits for, within --hint-wait-ms; default: as many as measured times say",
    )
    parser.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.has_lookup,
        help="also take hints from what followed when a session's own text last stood like this (default on)",
    )
    parser.add_argument(
        "--max-lookup-tokens",
        type=int,
        default=DEFAULTS.max_lookup_tokens,
        help="with --lookup, look into ended sessions' outputs too, of which so many tokens are kept, such as 65536: "
        "for texts that resemble each other; sessions of one cache salt share them (default %(default)s)",
    )
    parser.add_argument(
        "--always-listen",
        action="store_true",
        help="never pause a draft worker whose hints cost more than they gain; for measurements",
    )
    return parser.parse_args(arguments)


def limits_from(arguments: argparse.Namespace) -> SchedulerLimits:
    """As far as they do not depend on the model. Raises ConfigurationError, naming the flag."""
    return SchedulerLimits(
        max_num_seqs=arguments.max_num_seqs,
        max_num_waiting=arguments.max_num_waiting,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        num_speculative_tokens=arguments.num_speculative_tokens,
        hint_wait_ms_max=arguments.hint_wait_ms,
        has_lookup=arguments.lookup,
        max_lookup_tokens=arguments.max_lookup_tokens,
        may_rest=not arguments.always_listen,
        wait_for_num_hints=arguments.wait_for_num_hints,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )


async def serve(arguments: argparse.Namespace) -> None:
    """Loads the model, serves until told to stop. Raises OutriderError when it cannot start."""
    limits = limits_from(arguments)
    # Imported late, so that --help and bad arguments do not wait for torch.
    from outrider.engine.loading import load_model
    from outrider.engine.rank_group import join_ranks
    from outrider.engine.self_test import batch_invariance_failures
    from outrider.grammar import GrammarCompiler
    from outrider.telemetry import TargetMetrics
    from protos.outrider.v1 import hints_pb2_grpc, target_pb2_grpc
    from target_worker.runner import TargetCore
    from target_worker.scheduler import Scheduler
    from target_worker.server import TargetServicer

    options = worker_options(arguments)
    name = arguments.served_model_name or model_name(arguments.model)
    services = ["outrider.v1.Target", "outrider.v1.Hints"]
    # Closed after the server has stopped, for that ends the spans of those who are cut off.
    async with (
        Tracing.to(arguments.otlp_endpoint, "outrider-target", options.worker_id) as tracing,
        WorkerProcess(options, "target", services, PERMITTED) as process,
    ):
        engine = load_model(engine_config(arguments), join_ranks(options.stall_exit_s))
        engine.lead()
        if failures := batch_invariance_failures(engine):
            logger.warning(
                "NOT batch-invariant here, text may depend on its company: %s", "; ".join(failures)
            )
        info = worker_info(
            *(engine, options, name, process.incarnation),
            max_num_seqs=limits.max_num_seqs,
            max_num_waiting=limits.max_num_waiting,
        )
        limits = replace(limits, max_model_len=engine.max_model_len, end_of_sequence_ids=engine.eos_token_ids)
        scheduler = Scheduler(limits, engine.allocator, engine.vocab_size)
        metrics = TargetMetrics(name, options.worker_id)
        metrics.max_num_seqs.set(limits.max_num_seqs)
        metrics_port = process.serve_metrics(metrics.registry)
        grammars = GrammarCompiler(
            Path(arguments.model) / "tokenizer.json",
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
        )
        servicer = TargetServicer(info, metrics, grammars, scheduler.check_room, tracing=tracing)
        thread = process.make_thread(TargetCore(scheduler, engine, metrics), servicer.dispatch)
        servicer.bind(thread)
        target_pb2_grpc.add_TargetServicer_to_server(servicer, process.server)
        hints_pb2_grpc.add_HintsServicer_to_server(servicer, process.server)
        thread.start()
        try:
            await process.run(
                record_from_info("target", info),
                load=lambda: WorkerLoad(
                    scheduler.num_running, scheduler.num_waiting + servicer.num_compiling, scheduler.wait_ms
                ),
                on_drain=servicer.start_draining,
                on_grace_over=servicer.end_calls,
                ready_facts={"metrics_port": metrics_port, **identity(info)},
            )
        finally:
            if thread.stop():
                engine.dismiss()


def main() -> int:
    arguments = parse_arguments()
    if is_follower():
        return follow(arguments)
    cores = own_cores(arguments.cpu_affinity)
    return run_worker(lambda: serve(arguments), cores, arguments.log_format)


if __name__ == "__main__":
    leave(main())
