"""The flags of `outrider serve`, each with its type, bounds and one line of help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.deployment import Affinity, Dtype, Quantization
from outrider.tenants import parse_tenant_weight

_MODELS = "Models"
_NETWORK = "Network"
_CAPACITY = "Capacity"
_SECURITY = "Security and observability"


def _check_tenant_weights(values: list[str] | None) -> list[str] | None:
    """Here as well as in the coordinator, which starts last."""
    try:
        for value in values or ():
            parse_tenant_weight(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return values


Target = Annotated[
    Path,
    typer.Option(
        help="Model folder of the target, which decides.",
        rich_help_panel=_MODELS,
        show_default="the demo's",
    ),
]
Draft = Annotated[
    Path | None,
    typer.Option(
        help="Model folder of the draft, which guesses.",
        show_default="the demo's",
        rich_help_panel=_MODELS,
    ),
]
NoDraft = Annotated[
    bool, typer.Option("--no-draft", help="Serve plainly, without a draft.", rich_help_panel=_MODELS)
]
DtypeChoice = Annotated[Dtype, typer.Option(help="Type of the weights in memory.", rich_help_panel=_MODELS)]
QuantizationChoice = Annotated[
    Quantization,
    typer.Option(
        help="Of the target's weights while loading. int8 and fp8 halve their memory and change what the model says a "
        "little. On a CPU a step with int8 takes about as long or longer, one with fp8 several times as long.",
        rich_help_panel=_MODELS,
    ),
]
DraftQuantizationChoice = Annotated[
    Quantization | None,
    typer.Option(
        help="Likewise, of the draft's; it changes how many hints hold, never the text.",
        show_default="none; int8 with --self-draft",
        rich_help_panel=_MODELS,
    ),
]
SelfDraft = Annotated[
    bool,
    typer.Option(
        "--self-draft",
        help="Draft with the target itself in low resolution: its folder, quantized. Nearly all hints hold; it pays "
        "where a draft worker runs the small weights faster than the target worker its own.",
        rich_help_panel=_MODELS,
    ),
]
AllowHeterogeneousVocab = Annotated[
    bool,
    typer.Option(
        "--allow-heterogeneous-vocab",
        help="Draft with a model that cuts texts differently. Only tokens that both have are guessed, so that fewer "
        "hints hold; the text stays the target's own.",
        rich_help_panel=_MODELS,
    ),
]
SeedRequests = Annotated[
    bool,
    typer.Option(
        "--seed-requests",
        help="Give sampled requests without a seed a random one, so that any of them can be repeated.",
        rich_help_panel=_MODELS,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="What clients ask for.", show_default="the target folder's name", rich_help_panel=_MODELS
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=32,
        help="Most hints verified per step.",
        show_default="the target worker's",
        rich_help_panel=_MODELS,
    ),
]
NoLookup = Annotated[
    bool,
    typer.Option(
        "--no-lookup",
        help="Take no hints from what followed when a text last stood like this.",
        rich_help_panel=_MODELS,
    ),
]
NoPrefixCaching = Annotated[
    bool,
    typer.Option(
        "--no-prefix-caching",
        help="Compute every prompt anew, even where it begins like another.",
        rich_help_panel=_MODELS,
    ),
]
Host = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0 for every one.", rich_help_panel=_NETWORK)
]
Port = Annotated[int, typer.Option(help="HTTP (OpenAI API); 0 takes a free one.", rich_help_panel=_NETWORK)]
GrpcPort = Annotated[
    int, typer.Option(help="gRPC (outrider.v1.Generation); 0 takes a free one.", rich_help_panel=_NETWORK)
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="Redis to use.",
        show_default="OUTRIDER_REDIS_URL, else an embedded one",
        rich_help_panel=_NETWORK,
    ),
]
RedisUrlFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Holds the URL and its password, in place of --redis-url: other processes can see a command line and an "
        "environment.",
        show_default="OUTRIDER_REDIS_URL_FILE",
        rich_help_panel=_NETWORK,
    ),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        help="Requests need a key from this file (see `outrider keys`).",
        show_default="whoever reaches it may ask",
        rich_help_panel=_SECURITY,
    ),
]
TlsDir = Annotated[
    Path | None,
    typer.Option(
        help="TLS on the public ports and between all parts, with the certificates that `outrider certificates` makes.",
        show_default="in the clear",
        rich_help_panel=_SECURITY,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen on another --host than this machine's own without --api-keys.",
        rich_help_panel=_SECURITY,
    ),
]
LogRequests = Annotated[
    bool,
    typer.Option(
        "--log-requests",
        help="A line for each request in the coordinator's log; never what was said.",
        rich_help_panel=_SECURITY,
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="OpenTelemetry collector to send traces to, such as http://127.0.0.1:4317.",
        show_default="no traces",
        rich_help_panel=_SECURITY,
    ),
]
NumTargetWorkers = Annotated[int, typer.Option(min=1, max=64, rich_help_panel=_CAPACITY)]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=64,
        help="Processes of each target worker, between which its model is cut.",
        rich_help_panel=_CAPACITY,
    ),
]
DraftTensorParallelSize = Annotated[
    int, typer.Option(min=1, max=64, help="Likewise, of each draft worker.", rich_help_panel=_CAPACITY)
]
NumDraftWorkers = Annotated[int, typer.Option(min=1, max=64, rich_help_panel=_CAPACITY)]
NumReplicas = Annotated[
    int, typer.Option(min=1, max=64, help="Coordinator replicas.", rich_help_panel=_CAPACITY)
]
MaxRequests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most requests at once per replica, those that wait included; one of n sequences counts n.",
        show_default="the coordinator's",
        rich_help_panel=_CAPACITY,
    ),
]
MaxQueueWait = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="SECONDS",
        help="Longest wait for a place at a target; a request that would wait longer is refused at once (429).",
        show_default="the coordinator's",
        rich_help_panel=_CAPACITY,
    ),
]
TenantWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-weight",
        metavar="NAME=WEIGHT",
        help="Share of a tenant, of tokens and slots, where requests wait, beside the 1 of others; may be repeated.",
        callback=_check_tenant_weights,
        show_default=False,
        rich_help_panel=_CAPACITY,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most sequences at once per worker.",
        show_default="the worker's",
        rich_help_panel=_CAPACITY,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Longest prompt plus output, tokens.",
        show_default="the model's",
        rich_help_panel=_CAPACITY,
    ),
]
CpuAffinity = Annotated[
    Affinity,
    typer.Option(
        help="auto gives each worker cores of its own where there are enough.", rich_help_panel=_CAPACITY
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(help="Where each process's log goes.", show_default="in the cache"),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the processes' logs here too.")]
