"""The processes: how many there are, how full they are, and what is wrong with them. Pure."""

from __future__ import annotations

from typing import Final

from k8s.dashboards.panel import Dashboard, Limit, Panel, Query, Row


def _mean(histogram: str) -> str:
    """By target."""
    return (
        f"sum by (engine) (rate({histogram}_sum{{$target}}[$range]))"
        f" / sum by (engine) (rate({histogram}_count{{$target}}[$range]))"
    )


DASHBOARD: Final = Dashboard(
    "outrider-pools",
    "Outrider: pools",
    "Targets, drafts and coordinators: how many, how full, how fast, and whether they are whole.",
    (
        Row(
            "Who is there?",
            (
                Panel(
                    "Usable workers, as coordinators see them",
                    "short",
                    "Workers in the registry that pass every check. No target: every request is refused (runbook "
                    "OutriderNoTarget). No draft: targets serve plainly. Fewer than are scraped: some drain, "
                    "or /health says why they are passed over.",
                    (
                        Query("max by (pool) (outrider_live_workers{$any_coordinator})", "{{pool}}"),
                        Query(
                            "min by (pool) (outrider_live_workers{$any_coordinator})",
                            "{{pool}}, by the replica that knows fewest",
                        ),
                    ),
                ),
                Panel(
                    "Processes that answer scrapes",
                    "short",
                    "By job; each replica of a coordinator counts, a spare port of its pod does not.",
                    (Query("sum by (job) (up{$process})", "{{job}}"),),
                ),
                Panel(
                    "Degraded for want of Redis",
                    "short",
                    "1 while at least one replica cannot reach Redis: for the registry of workers, for the journal "
                    "of streams, for what is learned, for a canary. Nobody is refused for it; restore Redis (runbook "
                    "OutriderRegistryDegraded).",
                    (
                        Query("max(outrider_registry_degraded{$any_coordinator})", "registry"),
                        Query("max(outrider_journal_degraded{$any_coordinator})", "journal"),
                        Query("max(outrider_priors_degraded{$any_coordinator})", "priors"),
                        Query("max(outrider_canary_degraded{$any_coordinator})", "canary"),
                    ),
                    limit=Limit(1.0),
                    most=1.0,
                ),
            ),
        ),
        Row(
            "How full are they?",
            (
                Panel(
                    "Targets: sessions",
                    "short",
                    "In the batch and waiting for a place, by worker, and how many may run at once "
                    "(--max-num-seqs). Waiting at all of them: more targets. At one only: sessions with one prefix "
                    "stay together.",
                    (
                        Query(
                            "sum by (engine) (outrider_num_requests_running{$target})", "running {{engine}}"
                        ),
                        Query(
                            "sum by (engine) (outrider_num_requests_waiting{$target})", "waiting {{engine}}"
                        ),
                        Query("max(outrider_max_num_seqs{$target})", "most at once"),
                    ),
                ),
                Panel(
                    "Drafts: sessions",
                    "short",
                    "Attached, by worker, and how many one takes. It is meant for half of them, where hints still come "
                    "in time; the autoscaler aims at that.",
                    (
                        Query("sum by (engine) (outrider_draft_sessions{$draft})", "{{engine}}"),
                        Query("max(outrider_max_num_seqs{$draft})", "most at once"),
                    ),
                ),
                Panel(
                    "KV blocks in use",
                    "percentunit",
                    "That sessions hold; what only the prefix cache keeps does not count. Near 100 % sessions wait or "
                    "push others out (runbook OutriderKvFull).",
                    (Query("sum by (engine) (outrider_kv_cache_usage_perc{$target})", "{{engine}}"),),
                    limit=Limit(0.95),
                    most=1.0,
                ),
                Panel(
                    "Preemptions a second",
                    "short",
                    "Sessions that gave their KV to others and are computed anew. More than a few a minute throws work "
                    "away (runbook OutriderPreemptions).",
                    (
                        Query(
                            "sum by (engine) (rate(outrider_num_preemptions_total{$target}[$range]))",
                            "{{engine}}",
                        ),
                    ),
                ),
                Panel(
                    "Prompt tokens from the prefix cache",
                    "percentunit",
                    "Over prompt tokens of sessions that ended. It depends on the traffic; a fall after an update is a "
                    "cold cache, a lasting one means that requests with one prefix no longer meet.",
                    (
                        Query(
                            "sum by (engine) (rate(outrider_prefix_cache_hits_total{$target}[$range]))"
                            " / sum by (engine) (rate(outrider_prompt_tokens_total{$target}[$range]))",
                            "{{engine}}",
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Prompt tokens that drafts had already, a second",
                    "short",
                    "Tokens of attached sessions whose KV an earlier one had left at the draft worker.",
                    (
                        Query(
                            "sum by (engine) (rate(outrider_draft_prefix_cache_hits_total{$draft}[$range]))",
                            "{{engine}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "How fast are they?",
            (
                Panel(
                    "Targets: step, mean",
                    "ms",
                    "Forward pass and verification of a batch. It grows with sessions and with hints; with the same of "
                    "both it should not. One worker above the others: look at its node.",
                    (Query(_mean("outrider_step_milliseconds"), "{{engine}}"),),
                ),
                Panel(
                    "Targets: step, p99",
                    "ms",
                    "Prefills of long prompts make single steps long; readers of other texts see them as stutter.",
                    (
                        Query(
                            "histogram_quantile(0.99, sum by (engine, le) "
                            "(rate(outrider_step_milliseconds_bucket{$target}[$range])))",
                            "{{engine}}",
                        ),
                    ),
                ),
                Panel(
                    "Targets: sessions in a step, mean",
                    "short",
                    "How well a step is shared. Near 1 with many requests running: they are spread over too many "
                    "targets for their own good.",
                    (Query(_mean("outrider_step_sessions"), "{{engine}}"),),
                ),
                Panel(
                    "Targets: from a step's end to the next one's start, mean",
                    "ms",
                    "The process' own work between two steps; waits for hints are not in it. It should be a small part "
                    "of a step. If it grows, the host is short of CPU.",
                    (Query(_mean("outrider_step_gap_milliseconds"), "{{engine}}"),),
                ),
                Panel(
                    "Steps a second",
                    "short",
                    "0 at a target with sessions is a worker that stands still (runbook OutriderWorkerStalled).",
                    (
                        Query(
                            "sum by (engine) (rate(outrider_step_milliseconds_count{$target}[$range]))",
                            "target {{engine}}",
                        ),
                        Query(
                            "sum by (engine) (rate(outrider_draft_step_milliseconds_count{$draft}[$range]))",
                            "draft {{engine}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Are they whole?",
            (
                Panel(
                    "KV blocks found lost or owned twice",
                    "short",
                    "Anything but 0 is a defect of ours: take the worker out and keep its log (runbook "
                    "OutriderKvIntegrity).",
                    (
                        Query(
                            "sum by (engine) (outrider_kv_cache_integrity_failures_total{$worker})",
                            "{{engine}}",
                        ),
                    ),
                    limit=Limit(1.0),
                    kind="stat",
                ),
                Panel(
                    "Certificates: time left",
                    "s",
                    "The soonest, by job. They are renewed in place and without a restart; below three days renewal "
                    "does not work (runbook OutriderCertificateExpires). Nothing here: there are no certificates.",
                    (
                        Query(
                            "min by (job) (outrider_certificate_expiry_timestamp_seconds{$process}) - time()",
                            "{{job}}",
                        ),
                    ),
                    limit=Limit(3 * 86400.0, is_upper=False),
                    kind="stat",
                ),
            ),
        ),
    ),
)
