"""Dashboard of the processes: their number, load and problems. Pure."""

from __future__ import annotations

from typing import Final

from k8s.dashboards.panel import Dashboard, Limit, Panel, Query, Row


def _mean(histogram: str) -> str:
    """Query of a histogram's mean by target."""
    return (
        f"sum by (engine) (rate({histogram}_sum{{$target}}[$range]))"
        f" / sum by (engine) (rate({histogram}_count{{$target}}[$range]))"
    )


DASHBOARD: Final = Dashboard(
    "outrider-pools",
    "Outrider: pools",
    "Targets, drafts and coordinators: their number, load, speed and integrity.",
    (
        Row(
            "Which processes are up?",
            (
                Panel(
                    "Usable workers, as coordinators see them",
                    "short",
                    "Workers in the registry that pass every check. Without a target every request is refused "
                    "(runbook OutriderNoTarget). Without a draft, targets decode plainly. If there are fewer than "
                    "answer scrapes, some drain, or a coordinator's /health says why it does not use them.",
                    (
                        Query("max by (pool) (outrider_live_workers{$any_coordinator})", "{{pool}}"),
                        Query(
                            "min by (pool) (outrider_live_workers{$any_coordinator})",
                            "{{pool}}, lowest count of a replica",
                        ),
                    ),
                ),
                Panel(
                    "Processes that answer scrapes",
                    "short",
                    "Number of processes by job. Each replica of a coordinator counts; the unused metrics port of "
                    "its pod does not.",
                    (Query("sum by (job) (up{$process})", "{{job}}"),),
                ),
                Panel(
                    "Degraded because Redis or storage is unreachable",
                    "short",
                    "1 while at least one replica cannot reach Redis for the registry of workers, the journal of "
                    "streams, the priors or a canary, or Redis or the storage of files for batches. No request is "
                    "refused because of it. Restore Redis (runbook OutriderRegistryDegraded), or the storage "
                    "(OutriderBatchesStuck).",
                    (
                        Query("max(outrider_registry_degraded{$any_coordinator})", "registry"),
                        Query("max(outrider_journal_degraded{$any_coordinator})", "journal"),
                        Query("max(outrider_priors_degraded{$any_coordinator})", "priors"),
                        Query("max(outrider_canary_degraded{$any_coordinator})", "canary"),
                        Query("max(outrider_batches_degraded{$any_coordinator})", "batches"),
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
                    "Sessions in the batch and sessions that wait for a slot, by worker, and how many may run at "
                    "once (--max-num-seqs). If sessions wait at all workers, add targets. If they wait at one only, "
                    "it is because sessions with a common prefix go to the same worker.",
                    (
                        Query("sum by (engine) (outrider_num_requests_running{$target})", "running {{engine}}"),
                        Query("sum by (engine) (outrider_num_requests_waiting{$target})", "waiting {{engine}}"),
                        Query("max(outrider_max_num_seqs{$target})", "most at once"),
                    ),
                ),
                Panel(
                    "Drafts: sessions",
                    "short",
                    "Attached sessions by worker, and how many one worker accepts. The autoscaler aims at 50 % of "
                    "them, where hints still arrive in time.",
                    (
                        Query("sum by (engine) (outrider_draft_sessions{$draft})", "{{engine}}"),
                        Query("max(outrider_max_num_seqs{$draft})", "most at once"),
                    ),
                ),
                Panel(
                    "KV blocks in use",
                    "percentunit",
                    "Share of KV blocks that sessions use. Blocks that only the prefix cache keeps do not count. "
                    "Near 100 % sessions wait or are preempted (runbook OutriderKvFull).",
                    (Query("sum by (engine) (outrider_kv_cache_usage_perc{$target})", "{{engine}}"),),
                    limit=Limit(0.95),
                    most=1.0,
                ),
                Panel(
                    "Preemptions per second",
                    "short",
                    "Sessions whose KV was given to others and is computed again later. More than a few per minute "
                    "waste work (runbook OutriderPreemptions).",
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
                    "Cached prompt tokens over all prompt tokens of sessions that ended. The level depends on the "
                    "traffic. A short fall after an update is a cold cache. A lasting fall means that requests with "
                    "a common prefix no longer go to the same worker.",
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
                    "Drafts: prompt tokens from the prefix cache, per second",
                    "short",
                    "Prompt tokens of attached sessions whose KV an earlier session had left at the draft worker.",
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
                    "Forward pass and verification of one batch. It grows with sessions and with hints; for equal "
                    "numbers of both it should be constant. If one worker is slower than the others, check its node.",
                    (Query(_mean("outrider_step_milliseconds"), "{{engine}}"),),
                ),
                Panel(
                    "Targets: step, p99",
                    "ms",
                    "Prefills of long prompts make single steps long; clients of other sequences in the batch see a "
                    "pause.",
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
                    "Batch size. If it is near 1 while many requests run, they are spread over more targets than "
                    "they need.",
                    (Query(_mean("outrider_step_sessions"), "{{engine}}"),),
                ),
                Panel(
                    "Targets: gap between steps, mean",
                    "ms",
                    "Overhead of the process between two steps, without waits for hints. It should be a small part "
                    "of a step. If it grows, the host is short of CPU.",
                    (Query(_mean("outrider_step_gap_milliseconds"), "{{engine}}"),),
                ),
                Panel(
                    "Steps per second",
                    "short",
                    "A target that has sessions and makes 0 steps is stalled (runbook OutriderWorkerStalled).",
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
            "Are they intact?",
            (
                Panel(
                    "KV blocks found lost or owned twice",
                    "short",
                    "Anything but 0 is a defect of Outrider: remove the worker and keep its log (runbook "
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
                    "Time until the first certificate of each job expires. Certificates are renewed without a "
                    "restart. Below three days renewal does not work (runbook OutriderCertificateExpires). The panel "
                    "is empty if there are no certificates.",
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
