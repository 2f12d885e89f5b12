"""Dashboard of what clients observe: times, rates, errors, queues. Pure."""

from __future__ import annotations

from typing import Final

from k8s.dashboards.panel import Dashboard, Limit, Panel, Query, Row


def _quantiles(histogram: str) -> tuple[Query, ...]:
    """Queries of median, 95th and 99th percentile over all replicas."""
    return tuple(
        Query(
            f"histogram_quantile({quantile}, sum by (model_name, le) "
            f"(rate({histogram}_bucket{{$coordinator}}[$range])))",
            f"p{round(100 * quantile)} {{{{model_name}}}}",
        )
        for quantile in (0.5, 0.95, 0.99)
    )


DASHBOARD: Final = Dashboard(
    "outrider-service",
    "Outrider: service",
    "What clients see. To find causes, see the dashboards of pools (load) and of speculation (hints).",
    (
        Row(
            "Does the service work?",
            (
                Panel(
                    "Requests per second",
                    "reqps",
                    "Requests that completed, by reason. `length`: the output reached its limit. `stop`: it ended by "
                    "itself. If the rate falls while demand is steady, look at errors, then at the queue.",
                    (
                        Query(
                            "sum by (finished_reason) (rate(outrider_request_success_total{$coordinator}[$range]))",
                            "{{finished_reason}}",
                        ),
                    ),
                ),
                Panel(
                    "Errors per second, by code",
                    "reqps",
                    "INTERNAL and UNAVAILABLE are errors of the service (runbook OutriderErrors). RESOURCE_EXHAUSTED "
                    "is a refusal: no slot is free, or a tenant has used up its share. DEADLINE_EXCEEDED can have "
                    "either side as its cause: the client allowed too little time, or there are too few targets, "
                    "which the queue shows. All others are errors of clients.",
                    (
                        Query(
                            "sum by (code) (rate(outrider_request_failure_total{$any_coordinator}[$range]))",
                            "{{code}}",
                        ),
                    ),
                ),
                Panel(
                    "Share of requests that fail or are refused",
                    "percentunit",
                    "Mean of five minutes. Errors above 1 % raise a critical alert. Refusals above 1 % mean that the "
                    "pool of targets is too small, or that a tenant's limit is too low.",
                    (
                        Query("outrider:request_errors:ratio_rate5m{$any_record}", "errors"),
                        Query("outrider:request_refusals:ratio_rate5m{$any_record}", "refusals"),
                    ),
                    limit=Limit(0.01),
                ),
            ),
        ),
        Row(
            "How long does it take?",
            (
                Panel(
                    "Time to first token",
                    "s",
                    "From arrival to the first token, with queue and prefill. If it grows, compare both below: a "
                    "long queue needs more targets, a long prefill needs shorter prompts or a warm prefix cache. The "
                    "dashed line is the objective for p99.",
                    _quantiles("outrider_time_to_first_token_seconds"),
                    limit=Limit(2.5),
                ),
                Panel(
                    "Time per output token, mean",
                    "s",
                    "Decode time of the requests that ended, over their tokens but the first of each: (E2EL − TTFT) "
                    "÷ (tokens − 1). This is a mean over tokens: long outputs have more weight. It is lower for "
                    "requests with several choices, whose tokens arrive in parallel. Speculation lowers this value "
                    "first.",
                    (
                        Query(
                            "outrider:time_per_output_token_seconds:mean_rate5m{$record}",
                            "{{model_name}}",
                        ),
                    ),
                ),
                Panel(
                    "Gap between chunks",
                    "s",
                    "Pauses that a reader of a stream notices. A chunk carries all tokens of a step, so speculation "
                    "makes chunks longer and leaves the gaps as they are. If p99 is far above the median, there are "
                    "preemptions, or prefills of long prompts in the same batch (see the dashboard of pools).",
                    _quantiles("outrider_inter_token_latency_seconds"),
                ),
                Panel(
                    "End to end",
                    "s",
                    "From arrival to end. It depends on the number of requested tokens; judge the service by the "
                    "first two panels.",
                    _quantiles("outrider_e2e_request_latency_seconds"),
                ),
                Panel(
                    "Waiting for a slot",
                    "s",
                    "Time in the queues of coordinators and targets, before the prefill. More than some tens of "
                    "milliseconds mean that the pool of targets is full.",
                    _quantiles("outrider_request_queue_time_seconds"),
                ),
                Panel(
                    "Prefill",
                    "s",
                    "Time to compute the prompt. It grows with the length of prompts and with their number at once. "
                    "The prefix cache saves it for prompts with a common prefix.",
                    _quantiles("outrider_request_prefill_time_seconds"),
                ),
                Panel(
                    "Objectives met",
                    "percentunit",
                    "Share of the ended requests with a service-level objective that met it: all of it, its time to "
                    "first token (ttft), its time per token (tpot). If ttft falls, see the queue above; if tpot "
                    "falls, the objective is too tight for the batches of this pool: add targets, or lower their "
                    "--max-num-seqs.",
                    (
                        Query(
                            'sum by (objective) (rate(outrider_slo_requests_total{$coordinator,result="met"}[$range]))'
                            " / sum by (objective) (rate(outrider_slo_requests_total{$coordinator}[$range]))",
                            "{{objective}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "How large is the load?",
            (
                Panel(
                    "Tokens per second",
                    "short",
                    "Generated: tokens that targets commit, as they do. Prompt: tokens of requests that ended, those "
                    "from the prefix cache included. If fewer are generated than the same pool generated before, "
                    "look at the dashboard of speculation.",
                    (
                        Query("sum(rate(outrider_generation_tokens_total{$target}[$range]))", "generated"),
                        Query("sum(rate(outrider_prompt_tokens_total{$coordinator}[$range]))", "prompt"),
                    ),
                ),
                Panel(
                    "Requests at once",
                    "short",
                    "Running: at least one token was generated. Waiting: no token yet. Queued: sequences in "
                    "coordinators without a slot at a target. If queued is above 0 for long, add targets (runbook "
                    "OutriderQueue).",
                    (
                        Query("sum(outrider_num_requests_running{$coordinator})", "running"),
                        Query("sum(outrider_num_requests_waiting{$coordinator})", "waiting"),
                        Query("sum(outrider_num_requests_queued{$coordinator})", "queued"),
                    ),
                ),
                Panel(
                    "Sequences moved to another target, per minute",
                    "short",
                    "Each is a sequence whose target died, stopped answering or drained for too long; its client saw "
                    "a pause. It is 0 except during rolling updates (runbook OutriderTargetReplays).",
                    (Query("60 * sum(rate(outrider_target_replays_total{$any_coordinator}[$range]))", "moved"),),
                ),
            ),
        ),
        Row(
            "Is there a canary?",
            (
                Panel(
                    "Share of keys in the canary's arm",
                    "percentunit",
                    "0: there is no canary. 100 %: it was promoted, so change the flags that it tested permanently. "
                    "`outrider canary status` compares the arms and says what the rule waits for.",
                    (Query("max(outrider_canary_share{$any_coordinator})", "share"),),
                    most=1.0,
                ),
                Panel(
                    "Requests per second, by arm",
                    "reqps",
                    "Keys are assigned to arms by a hash, so a few busy tenants may make the arms unequal.",
                    (
                        Query(
                            "sum by (arm) (rate(outrider_canary_requests_total{$any_coordinator}[$range]))",
                            "{{arm}}",
                        ),
                    ),
                ),
                Panel(
                    "Divergences per hour",
                    "short",
                    "Requests of the canary whose output differs from that of plain decoding. Anything but 0 ends "
                    "the canary (runbook OutriderCanaryDivergence).",
                    (
                        Query(
                            "sum(increase(outrider_canary_divergences_total{$any_coordinator}[1h]))",
                            "divergences",
                        ),
                    ),
                    limit=Limit(1.0),
                ),
            ),
        ),
    ),
)
