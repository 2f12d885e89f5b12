"""`outrider serve`: a draft model, a target model and the coordinator on this machine, under one supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from outrider.cli.acceptance_probe import probe
from outrider.cli.deployment import DEMO_TARGET, Affinity, Deployment, Dtype, Proxy, Quantization
from outrider.cli.draft_choice import UnfitDraft, choose_draft
from outrider.cli.options import (
    AllowHeterogeneousVocab,
    ApiKeys,
    CpuAffinity,
    Draft,
    DraftQuantizationChoice,
    DraftTensorParallelSize,
    DtypeChoice,
    GrpcPort,
    Host,
    Insecure,
    LogDir,
    LogRequests,
    MaxModelLen,
    MaxNumSeqs,
    MaxQueueWait,
    MaxRequests,
    NoDraft,
    NoLookup,
    NoPrefixCaching,
    NumDraftWorkers,
    NumReplicas,
    NumSpeculativeTokens,
    NumTargetWorkers,
    OtlpEndpoint,
    Port,
    QuantizationChoice,
    RedisUrl,
    RedisUrlFile,
    SeedRequests,
    SelfDraft,
    ServedModelName,
    Target,
    TenantWeights,
    TensorParallelSize,
    TlsDir,
    Verbose,
)
from outrider.cli.progress import Progress
from outrider.cli.system import new_log_dir, run_until_signalled, running_system
from outrider.redis_connection import redis_url_from

SIGTERM_STATUS = 128 + 15

ProxyChoice = Annotated[
    Proxy | None,
    typer.Option(
        help="What takes requests in: haproxy (where it runs, the default) or Ray Serve's own in Python, which costs "
        "several times more per streamed chunk.",
        rich_help_panel="Network",
        show_default=False,
    ),
]


def serve(
    target: Target = DEMO_TARGET,
    draft: Draft = None,
    no_draft: NoDraft = False,
    self_draft: SelfDraft = False,
    dtype: DtypeChoice = Dtype.BFLOAT16,
    quantization: QuantizationChoice = Quantization.NONE,
    draft_quantization: DraftQuantizationChoice = None,
    allow_heterogeneous_vocab: AllowHeterogeneousVocab = False,
    served_model_name: ServedModelName = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    no_lookup: NoLookup = False,
    no_prefix_caching: NoPrefixCaching = False,
    seed_requests: SeedRequests = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = 9000,
    redis_url: RedisUrl = None,
    redis_url_file: RedisUrlFile = None,
    num_target_workers: NumTargetWorkers = 1,
    num_draft_workers: NumDraftWorkers = 1,
    tensor_parallel_size: TensorParallelSize = 1,
    draft_tensor_parallel_size: DraftTensorParallelSize = 1,
    num_replicas: NumReplicas = 1,
    proxy: ProxyChoice = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    max_requests: MaxRequests = None,
    max_queue_wait: MaxQueueWait = None,
    tenant_weight: TenantWeights = None,
    cpu_affinity: CpuAffinity = Affinity.AUTO,
    api_keys: ApiKeys = None,
    tls_dir: TlsDir = None,
    insecure: Insecure = False,
    log_requests: LogRequests = False,
    otlp_endpoint: OtlpEndpoint = None,
    log_dir: LogDir = None,
    verbose: Verbose = False,
) -> None:
    """Serve a model pair on this machine: Redis, workers and coordinator, started, watched and stopped together.

    With no flag at all it serves the demo pair. A worker that dies is started again; Ctrl-C stops everything.
    """
    try:
        choice = choose_draft(
            target,
            draft,
            no_draft=no_draft,
            self_draft=self_draft,
            target_quantization=quantization,
            draft_quantization=draft_quantization,
        )
    except UnfitDraft as error:
        raise typer.BadParameter(str(error)) from None
    deployment = Deployment(
        target=target,
        draft=choice.folder,
        dtype=dtype,
        num_speculative_tokens=num_speculative_tokens,
        host=host,
        port=port,
        grpc_port=grpc_port,
        num_target_workers=num_target_workers,
        num_draft_workers=num_draft_workers,
        num_replicas=num_replicas,
        tensor_parallel_size=tensor_parallel_size,
        draft_tensor_parallel_size=draft_tensor_parallel_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_requests=max_requests,
        max_queue_wait_s=max_queue_wait,
        tenant_weights=tuple(tenant_weight or ()),
        served_model_name=served_model_name,
        affinity=cpu_affinity,
        quantization=quantization,
        draft_quantization=choice.quantization,
        allow_heterogeneous_vocab=allow_heterogeneous_vocab,
        enable_lookup=not no_lookup,
        enable_prefix_caching=not no_prefix_caching,
        seed_requests=seed_requests,
        proxy=proxy,
        api_keys=api_keys,
        tls_dir=tls_dir,
        is_insecure=insecure,
        logs_requests=log_requests,
        otlp_endpoint=otlp_endpoint,
    )
    redis = redis_url_from(redis_url, redis_url_file)
    status = run_until_signalled(lambda: _serve(deployment, redis, log_dir, verbose))
    # Being asked to stop and having stopped is success; Ctrl-C keeps the status that shells expect.
    raise typer.Exit(0 if status == SIGTERM_STATUS else status)


async def _serve(deployment: Deployment, redis_url: str | None, log_dir: Path | None, verbose: bool) -> int:
    console = Console(stderr=True, highlight=False)
    with Progress(console) as progress:
        progress.say(f"Starting Outrider with {deployment.target} and {deployment.draft or 'no draft'}")
        async with running_system(
            deployment,
            redis_url=redis_url,
            log_dir=log_dir or new_log_dir(),
            on_event=progress.on_event,
            echo=progress.echo if verbose else None,
        ) as addresses:
            print(
                f"Outrider is ready: {addresses.http}/v1 (OpenAI), {addresses.grpc} (gRPC), "
                f"model {deployment.model_name}, logs in {addresses.log_dir}",
                flush=True,
            )
            progress.say(f"Serving {deployment.model_name}; Ctrl-C stops it.")
            probing = asyncio.create_task(_probe_draft(deployment, addresses.http, progress))
            try:
                await asyncio.Event().wait()
            finally:
                probing.cancel()
                progress.say("Stopping.")
    return 0


async def _probe_draft(deployment: Deployment, url: str, progress: Progress) -> None:
    """Says how the draft does; loudly where it is of no use."""
    if deployment.draft is None or deployment.api_keys is not None:  # nobody gave us a key
        return
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=deployment.trust) as client:
        found = await probe(client, deployment.model_name)
    if found is None:
        return
    is_quantized = deployment.draft_quantization is not Quantization.NONE
    name = (
        f"{deployment.draft} ({deployment.draft_quantization.value})"
        if is_quantized
        else str(deployment.draft)
    )
    tell = progress.warn if found.is_useless else progress.note
    tell(found.report(name))
