"""What clients see: times, rates, errors, queues. Pure."""

from __future__ import annotations

from typing import Final

from k8s.dashboards.panel import Dashboard, Limit, Panel, Query, Row


def _quantiles(histogram: str) -> tuple[Query, ...]:
    """Median, 95th and 99th percentile over all replicas."""
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
    "What clients see. Where it goes wrong, pools says whether workers are short, speculation whether hints help.",
    (
        Row(
            "Is it well?",
            (
                Panel(
                    "Requests a second",
                    "reqps",
                    "Requests that ended as they should, by reason. `length` is a text cut at its limit, `stop` one "
                    "that came to its end. A fall with steady demand: look at errors, then at the queue.",
                    (
                        Query(
                            "sum by (finished_reason) (rate(outrider_request_success_total{$coordinator}[$range]))",
                            "{{finished_reason}}",
                        ),
                    ),
                ),
                Panel(
                    "Errors a second, by code",
                    "reqps",
                    "INTERNAL and UNAVAILABLE are ours (runbook OutriderErrors). RESOURCE_EXHAUSTED is a refusal: no "
                    "room, or a tenant beyond its share. DEADLINE_EXCEEDED is either's: too little time, or too few "
                    "targets, which the queue shows. The others are clients' mistakes.",
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
                    "Over five minutes. Errors above 1 % wake somebody; refusals above 1 % say that the pool of "
                    "targets is too small, or a tenant's limit too tight.",
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
                    "From arrival to the first token, queue and prefill included. Where it grows, compare queue and "
                    "prefill below: a queue asks for more targets, a prefill for shorter prompts or a warm prefix "
                    "cache. The dashed line is the objective for p99.",
                    _quantiles("outrider_time_to_first_token_seconds"),
                    limit=Limit(2.5),
                ),
                Panel(
                    "Time per output token, mean",
                    "s",
                    "Decode time of the requests that ended over their tokens but the first of each: "
                    "(E2EL − TTFT) ÷ (tokens − 1). A mean by token: long answers weigh more. With several choices a "
                    "request the choices' tokens come side by side, and it is lower. Speculation shows here first.",
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
                    "What a reader notices as stutter. A chunk carries all tokens of a step, so with speculation gaps "
                    "stay as they are and chunks become longer. A p99 far above the median: preemptions, or prefills "
                    "of long prompts in between (see pools).",
                    _quantiles("outrider_inter_token_latency_seconds"),
                ),
                Panel(
                    "End to end",
                    "s",
                    "From arrival to end. It depends on how much is asked for: judge the service by the first two.",
                    _quantiles("outrider_e2e_request_latency_seconds"),
                ),
                Panel(
                    "Waiting for a place",
                    "s",
                    "In coordinators and at targets, before the prefill. More than some tens of milliseconds: "
                    "the pool of targets is full.",
                    _quantiles("outrider_request_queue_time_seconds"),
                ),
                Panel(
                    "Prefill",
                    "s",
                    "Computing the prompt. It grows with prompts and with how many come at once; prompts that begin "
                    "alike save it.",
                    _quantiles("outrider_request_prefill_time_seconds"),
                ),
            ),
        ),
        Row(
            "How much is it?",
            (
                Panel(
                    "Tokens a second",
                    "short",
                    "Generated: committed by targets, as it happens. Prompt: of requests that ended, with what the "
                    "prefix cache spared. Generated below what the same pool did before: look at speculation.",
                    (
                        Query("sum(rate(outrider_generation_tokens_total{$target}[$range]))", "generated"),
                        Query("sum(rate(outrider_prompt_tokens_total{$coordinator}[$range]))", "prompt"),
                    ),
                ),
                Panel(
                    "Requests at once",
                    "short",
                    "Running have a first token, waiting have none yet, queued are texts in coordinators without a "
                    "place at a target. Queued above 0 for long: more targets (runbook OutriderQueue).",
                    (
                        Query("sum(outrider_num_requests_running{$coordinator})", "running"),
                        Query("sum(outrider_num_requests_waiting{$coordinator})", "waiting"),
                        Query("sum(outrider_num_requests_queued{$coordinator})", "queued"),
                    ),
                ),
                Panel(
                    "Texts moved to another target, a minute",
                    "short",
                    "Each is a target that died, fell silent or drained for too long; the client saw a pause. Away "
                    "from rolling updates this is 0 (runbook OutriderTargetReplays).",
                    (
                        Query(
                            "60 * sum(rate(outrider_target_replays_total{$any_coordinator}[$range]))", "moved"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Is there a canary?",
            (
                Panel(
                    "Share of keys that get the canary's arm",
                    "percentunit",
                    "0: there is none. 100 %: it was promoted, and the flags that it stands for should be changed for "
                    "good. `outrider canary status` compares the arms and says what the rule waits for.",
                    (Query("max(outrider_canary_share{$any_coordinator})", "share"),),
                    most=1.0,
                ),
                Panel(
                    "Requests a second, by arm",
                    "reqps",
                    "Keys are shared out by a hash, so a few busy tenants may make the arms unequal.",
                    (
                        Query(
                            "sum by (arm) (rate(outrider_canary_requests_total{$any_coordinator}[$range]))",
                            "{{arm}}",
                        ),
                    ),
                ),
                Panel(
                    "Divergences in an hour",
                    "short",
                    "Requests of the canary that plain decoding answers otherwise. Anything but 0 ends the canary "
                    "(runbook OutriderCanaryDivergence).",
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
