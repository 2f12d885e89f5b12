"""Dashboard of speculation: its gain, and the causes of losses. Pure."""

from __future__ import annotations

from typing import Final

from k8s.dashboards.panel import Dashboard, Limit, Panel, Query, Row


def _ratio(part: str, whole: str, by: str = "model_name", who: str = "target") -> str:
    return f"sum by ({by}) (rate({part}{{${who}}}[$range])) / sum by ({by}) (rate({whole}{{${who}}}[$range]))"


def _share_of_time(seconds: str, who: str) -> str:
    return f"avg by (engine) (rate({seconds}{{${who}}}[$range]))"


_STEPS: Final = "outrider_spec_decode_num_drafts_total"
_HINTS: Final = "outrider_spec_decode_num_draft_tokens_total"
_ACCEPTED: Final = "outrider_spec_decode_num_accepted_tokens_total"
_ACCEPTED_BY_POSITION: Final = "outrider_spec_decode_num_accepted_tokens_per_pos_total"

DASHBOARD: Final = Dashboard(
    "outrider-speculation",
    "Outrider: speculation",
    "Shows whether speculation pays: its gain, the acceptance of hints, their cost, and which requests use them.",
    (
        Row(
            "Does it pay?",
            (
                Panel(
                    "Speed relative to plain decoding",
                    "short",
                    "Speed of recent steps, relative to the measured speed of the same batches without speculation. "
                    "Above 1 speculation pays. Near 1 targets are about to pause hints, which costs nothing. Below 1 "
                    "for long is a defect (runbook OutriderSpeculationSlower). A target that verifies no hints keeps "
                    "its last value.",
                    (
                        Query(
                            "avg by (model_name) (outrider_estimated_speedup{$target})",
                            "{{model_name}}, mean",
                        ),
                        Query(
                            "min by (model_name) (outrider_estimated_speedup{$target})",
                            "{{model_name}}, slowest target",
                        ),
                    ),
                    limit=Limit(1.0, is_upper=False),
                ),
                Panel(
                    "Tokens per verified block",
                    "short",
                    "Mean acceptance length τ: 1 + accepted hints per block. A block is what one step verifies for "
                    "one session. τ is an upper bound of the speedup.",
                    (Query(f"1 + {_ratio(_ACCEPTED, _STEPS)}", "{{model_name}}"),),
                ),
                Panel(
                    "Share of tokens from accepted hints",
                    "percentunit",
                    "Accepted hints over all committed tokens. If it is low although the acceptance rate is good, "
                    'few sessions have a draft worker (see the row "Who speculates?"), or hints arrive too late.',
                    (Query(_ratio(_ACCEPTED, "outrider_generation_tokens_total"), "{{model_name}}"),),
                    most=1.0,
                ),
            ),
        ),
        Row(
            "How many hints are accepted?",
            (
                Panel(
                    "Acceptance rate",
                    "percentunit",
                    "Accepted hints over verified hints, alternatives beside the likeliest path included. "
                    "Below 20 % the draft is poorly aligned with its target (runbook OutriderLowAcceptance). "
                    "Compare models here, and kinds of request in the panels of priors below.",
                    (Query(_ratio(_ACCEPTED, _HINTS), "{{model_name}}"),),
                    limit=Limit(0.2, is_upper=False),
                    most=1.0,
                ),
                Panel(
                    "Acceptance by position",
                    "percentunit",
                    "Share of blocks of which at least so many hints were accepted (position 0 is the first). Where "
                    "the curve has fallen, drafting further ahead no longer pays. Targets use it to choose how many "
                    "hints they verify.",
                    (
                        Query(
                            f"sum by (position) (rate({_ACCEPTED_BY_POSITION}{{$target}}[$range]))"
                            f" / ignoring (position) group_left () sum(rate({_STEPS}{{$target}}[$range]))",
                            "position {{position}}",
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Draft workers whose hints are not accepted",
                    "short",
                    "1 for a draft worker fewer than 2 % of whose hints are accepted: it serves the wrong draft for "
                    "this model, or its weights are damaged. Remove it (runbook OutriderUselessDraft).",
                    (
                        Query(
                            "max by (draft_worker, model_name) (outrider_draft_acceptance_alarm{$coordinator})",
                            "{{draft_worker}} for {{model_name}}",
                        ),
                    ),
                    limit=Limit(1.0),
                    most=1.0,
                ),
                Panel(
                    "Predicted and ready outcomes",
                    "percentunit",
                    "For the steps that verified hints. Predicted: the hint tree contained the token that the target "
                    "then generated. Ready: hints below that token had also arrived in time. If outcomes are "
                    "predicted but not ready, the draft is too slow or too far away. If they are neither, allow more "
                    "alternatives (--max-alternatives).",
                    (
                        Query(
                            _ratio("outrider_predicted_outcomes_total", "outrider_outcomes_total"),
                            "predicted, {{model_name}}",
                        ),
                        Query(
                            _ratio("outrider_ready_outcomes_total", "outrider_outcomes_total"),
                            "ready, {{model_name}}",
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Hints that were not used, per second",
                    "short",
                    "Stale hints contradict the committed tokens; they are the price of drafting ahead. Late hints "
                    "were right and arrived too late to be verified; a faster or nearer draft worker would save "
                    "them. Invalid messages are dropped (runbook OutriderBadHints).",
                    (
                        Query("sum(rate(outrider_stale_hints_total{$target}[$range]))", "stale"),
                        Query("sum(rate(outrider_late_hints_total{$target}[$range]))", "late"),
                        Query(
                            "sum(rate(outrider_bad_hint_messages_total{$target}[$range]))",
                            "invalid messages",
                        ),
                    ),
                ),
                Panel(
                    "Accepted tokens by source, per second",
                    "short",
                    "Tokens accepted without a forward pass of their own, by their source: a draft worker, a lookup "
                    "in an earlier sequence, a memory worker, or a grammar that permits one token only. The latter "
                    "three are counted when a session ends. If lookup and memory account for many, outputs repeat "
                    "themselves and a draft worker adds less.",
                    (
                        Query(f"sum(rate({_ACCEPTED}{{$target}}[$range]))", "draft workers"),
                        Query("sum(rate(outrider_lookup_accepted_tokens_total{$target}[$range]))", "lookup"),
                        Query("sum(rate(outrider_memory_accepted_tokens_total{$target}[$range]))", "memory workers"),
                        Query("sum(rate(outrider_grammar_forced_tokens_total{$target}[$range]))", "grammar"),
                    ),
                ),
            ),
        ),
        Row(
            "What does it cost?",
            (
                Panel(
                    "Targets: bubbles and waits for hints",
                    "percentunit",
                    "Bubble: share of time between two steps while sessions were ready to go on. Hint wait: the part "
                    "of it spent on waiting for hints. Targets wait only where measurements say that it pays. A "
                    "bubble much larger than the wait is overhead of the process: check whether its host is busy.",
                    (
                        Query(_share_of_time("outrider_bubble_seconds_total", "target"), "bubble {{engine}}"),
                        Query(
                            _share_of_time("outrider_hint_wait_seconds_total", "target"),
                            "hint wait {{engine}}",
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Drafts: idle and waiting",
                    "percentunit",
                    "Idle: no session. Waiting: sessions, but no node worth drafting. The rest of the time the "
                    "worker computes. If idle is near 100 %, there are too many draft workers (runbook "
                    "OutriderDraftsIdle). If both are near 0 and hints arrive late, there are too few.",
                    (
                        Query(_share_of_time("outrider_draft_idle_seconds_total", "draft"), "idle {{engine}}"),
                        Query(_share_of_time("outrider_draft_wait_seconds_total", "draft"), "waiting {{engine}}"),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Network traffic, bytes per generated token",
                    "bytes",
                    "Bytes of hints to targets and of commits to drafts, over committed tokens. Sampling without a "
                    "seed sends probability distributions, so it needs more bytes than greedy and seeded requests.",
                    (
                        Query(
                            _ratio("outrider_hint_bytes_total", "outrider_generation_tokens_total"),
                            "hints {{model_name}}",
                        ),
                        Query(
                            _ratio("outrider_commit_bytes_total", "outrider_generation_tokens_total"),
                            "commits {{model_name}}",
                        ),
                    ),
                ),
                Panel(
                    "Messages per second",
                    "short",
                    "Every message costs both workers a little time. If there are many more messages than steps "
                    "times sessions, draft workers send their nodes one by one.",
                    (
                        Query("sum(rate(outrider_hint_frames_total{$target}[$range]))", "hints"),
                        Query("sum(rate(outrider_commit_frames_total{$target}[$range]))", "commits"),
                        Query("sum(rate(outrider_step_milliseconds_count{$target}[$range]))", "steps"),
                    ),
                ),
                Panel(
                    "Drafted nodes per verified hint",
                    "short",
                    "Nodes of hint trees sent, over hints verified. A high value is the price of alternatives. If it "
                    "does not raise the share of predicted outcomes, lower --max-alternatives.",
                    (
                        Query(
                            "sum(rate(outrider_draft_nodes_sent_total{$draft}[$range]))"
                            f" / sum(rate({_HINTS}{{$target}}[$range]))",
                            "nodes",
                        ),
                    ),
                ),
                Panel(
                    "Draft step, mean",
                    "ms",
                    "One forward pass over nodes of all sessions. It should be well below the target's step (see the "
                    "dashboard of pools): the gain of drafting is the difference.",
                    (
                        Query(
                            _ratio(
                                "outrider_draft_step_milliseconds_sum",
                                "outrider_draft_step_milliseconds_count",
                                by="engine",
                                who="draft",
                            ),
                            "{{engine}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Who speculates?",
            (
                Panel(
                    "Sequences by state",
                    "short",
                    "Paused: hints did not pay for this request. Undrafted: the sequence would speculate, but no "
                    "draft worker has room; the autoscaler adds draft workers for these. Disabled: the client "
                    "requested it.",
                    (Query("sum by (state) (outrider_fallback_requests{$coordinator})", "{{state}}"),),
                ),
                Panel(
                    "Changes of state, per second",
                    "short",
                    "Transitions, by the state entered. A steady stream of `paused` with a good acceptance rate "
                    "means that drafting does not pay at this load. Hysteresis limits how often a sequence changes "
                    "its state.",
                    (
                        Query(
                            "sum by (state) (rate(outrider_fallback_transitions_total{$any_coordinator}[$range]))",
                            "{{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Sequences by their initial mode, per second",
                    "short",
                    "The mode is chosen from earlier requests of the same kind. If most sequences of a model with a "
                    "good draft start `paused`, look at its priors and at the load in the dashboard of pools.",
                    (
                        Query(
                            "sum by (mode) (rate(outrider_fallback_starts_total{$coordinator}[$range]))",
                            "{{mode}}",
                        ),
                    ),
                ),
                Panel(
                    "Probes per second, by outcome",
                    "short",
                    "A paused sequence tries speculation again from time to time. The outcome says how that trial "
                    "ended. Failed probes are the cost of finding out.",
                    (
                        Query(
                            "sum by (outcome) (rate(outrider_fallback_probes_total{$coordinator}[$range]))",
                            "{{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    "Attachments that draft workers ended, per second",
                    "short",
                    "Draft workers that died, drained or refused a session during a request. This costs speed only.",
                    (
                        Query(
                            "sum(rate(outrider_draft_attach_failures_total{$any_coordinator}[$range]))",
                            "ended",
                        ),
                    ),
                ),
                Panel(
                    "Priors: acceptance by route",
                    "percentunit",
                    "Acceptance that coordinators have learned by model and kind of request, over all tenants. Old "
                    "observations lose weight. Routes far below the others would gain from a draft trained for them.",
                    (
                        Query(
                            "avg by (model_name, route) (outrider_prior_acceptance{$coordinator})",
                            "{{model_name}} {{route}}",
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Priors: share of requests that paused",
                    "percentunit",
                    "Share of the observed requests in which speculation was paused. Near 100 % requests of this "
                    "route start paused.",
                    (
                        Query(
                            "avg by (model_name, route) (outrider_prior_paused_share{$coordinator})",
                            "{{model_name}} {{route}}",
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Priors: tokens gained per step with hints",
                    "short",
                    "Tokens that a step with hints commits beyond its own one, by route. Near 0 there is nothing to "
                    "gain.",
                    (
                        Query(
                            "avg by (model_name, route) (outrider_prior_extra_tokens_per_step{$coordinator})",
                            "{{model_name}} {{route}}",
                        ),
                    ),
                ),
                Panel(
                    "Priors: number of observations",
                    "short",
                    "Weighted number of observed requests by route, and the number of priors by model, route and "
                    "tenant. With few observations the panels of priors say little.",
                    (
                        Query(
                            "max by (model_name, route) (outrider_prior_judged_requests{$coordinator})",
                            "{{model_name}} {{route}}",
                        ),
                        Query("max(outrider_num_priors{$any_coordinator})", "priors"),
                    ),
                ),
            ),
        ),
    ),
)
