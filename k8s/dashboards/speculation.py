"""Whether speculation pays, and if not, where it is lost. Pure."""

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
    "Does speculation pay? From top to bottom: what it gains, how often hints hold, what they cost, who uses them.",
    (
        Row(
            "Does it pay?",
            (
                Panel(
                    "Speed over plain decoding",
                    "short",
                    "Of late steps, over what the same batches are measured to reach plainly. Above 1 it pays. Near 1 "
                    "targets are about to stop listening, which costs nothing; below 1 for long is a defect (runbook "
                    "OutriderSpeculationSlower). A target that verifies nothing keeps its last value.",
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
                    "Mean acceptance length τ: 1 + accepted hints per block, a block being what one step verifies for "
                    "one session. It is the most that speculation could gain if drafting and verifying were free.",
                    (Query(f"1 + {_ratio(_ACCEPTED, _STEPS)}", "{{model_name}}"),),
                ),
                Panel(
                    "Share of tokens that draft workers had foreseen",
                    "percentunit",
                    "Accepted hints over all tokens committed. Low with a good acceptance rate: few sessions are "
                    "drafted for (see who speculates), or hints come too late.",
                    (Query(_ratio(_ACCEPTED, "outrider_generation_tokens_total"), "{{model_name}}"),),
                    most=1.0,
                ),
            ),
        ),
        Row(
            "How often do hints hold?",
            (
                Panel(
                    "Acceptance rate",
                    "percentunit",
                    "Accepted ÷ verified hints. Below 30 % a draft is badly aligned with its target (runbook "
                    "OutriderLowAcceptance); compare it by model, and with the priors below by kind of request.",
                    (Query(_ratio(_ACCEPTED, _HINTS), "{{model_name}}"),),
                    limit=Limit(0.3, is_upper=False),
                    most=1.0,
                ),
                Panel(
                    "Acceptance by position",
                    "percentunit",
                    "Share of blocks of which at least so many hints held (position 0 is the first). The curve falls "
                    "off where looking further ahead stops paying; targets choose how many to verify by it.",
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
                    "Draft workers of no use",
                    "short",
                    "1 for a draft worker of whose hints fewer than 2 in 100 hold: the wrong draft for this model, or "
                    "damaged weights. Take it away (runbook OutriderUselessDraft).",
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
                    "Outcomes foreseen",
                    "percentunit",
                    "Of the steps that verified hints: how often the hint tree held what the target then said "
                    "(foreseen), and how often hints below it were there in time (ready). Foreseen but not ready: the "
                    "draft is too slow or too far away. Neither: more alternatives (--max-alternatives).",
                    (
                        Query(
                            _ratio("outrider_predicted_outcomes_total", "outrider_outcomes_total"),
                            "foreseen, {{model_name}}",
                        ),
                        Query(
                            _ratio("outrider_ready_outcomes_total", "outrider_outcomes_total"),
                            "ready, {{model_name}}",
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Hints that came to nothing, a second",
                    "short",
                    "Stale: the committed tokens said otherwise, which is the price of drafting ahead. Late: right, "
                    "and too late to be verified: a faster draft, or one nearer to its target, would win these.",
                    (
                        Query("sum(rate(outrider_stale_hints_total{$target}[$range]))", "stale"),
                        Query("sum(rate(outrider_late_hints_total{$target}[$range]))", "late"),
                        Query(
                            "sum(rate(outrider_bad_hint_messages_total{$target}[$range]))",
                            "messages without sense",
                        ),
                    ),
                ),
                Panel(
                    "Tokens without a step of their own, a second",
                    "short",
                    "By who had the hint that held: a draft worker, a lookup in a text, a grammar that left no choice. "
                    "The latter two are counted when a session ends. Much lookup: texts repeat themselves, and a draft "
                    "worker has less to add.",
                    (
                        Query(f"sum(rate({_ACCEPTED}{{$target}}[$range]))", "draft workers"),
                        Query("sum(rate(outrider_lookup_accepted_tokens_total{$target}[$range]))", "lookup"),
                        Query("sum(rate(outrider_grammar_forced_tokens_total{$target}[$range]))", "grammar"),
                    ),
                ),
            ),
        ),
        Row(
            "What does it cost?",
            (
                Panel(
                    "Targets: waiting for hints, and bubbles",
                    "percentunit",
                    "Share of time between two steps while there were sessions to go on with (bubble), and the part "
                    "of it that was spent on waiting for hints. Waits are measured to pay; a bubble well above "
                    "them is overhead of the process: look for a busy host.",
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
                    "Idle is without any session, waiting is with sessions and nothing worth guessing. The rest is "
                    "work. Idle near 100 %: too many draft workers (runbook OutriderDraftsIdle). Hardly any of both, "
                    "and late hints: too few.",
                    (
                        Query(
                            _share_of_time("outrider_draft_idle_seconds_total", "draft"), "idle {{engine}}"
                        ),
                        Query(
                            _share_of_time("outrider_draft_wait_seconds_total", "draft"), "waiting {{engine}}"
                        ),
                    ),
                    most=1.0,
                ),
                Panel(
                    "Wire, bytes per token generated",
                    "bytes",
                    "Hints to targets and commits to drafts, over tokens committed. Sampling without a seed carries "
                    "distributions and is dearer than greedy and seeded requests.",
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
                    "Messages a second",
                    "short",
                    "Each costs both workers some time, however short it is. Many more than steps and sessions: drafts "
                    "send nodes one by one.",
                    (
                        Query("sum(rate(outrider_hint_frames_total{$target}[$range]))", "hints"),
                        Query("sum(rate(outrider_commit_frames_total{$target}[$range]))", "commits"),
                        Query("sum(rate(outrider_step_milliseconds_count{$target}[$range]))", "steps"),
                    ),
                ),
                Panel(
                    "Nodes drafted per hint verified",
                    "short",
                    "Nodes of hint trees sent, over hints that were verified. High is the price of alternatives; where "
                    "outcomes are not foreseen for it, lower --max-alternatives.",
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
                    "A forward pass over nodes of all sessions. It should stay well below a target's step "
                    "(see pools): drafting is worth what it takes less.",
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
                    "Texts by state",
                    "short",
                    "Paused: hints did not pay for this request. Undrafted: it would speculate, and no draft worker "
                    "has room: these are what scales the drafts up. Disabled: the client asked for it.",
                    (Query("sum by (state) (outrider_fallback_requests{$coordinator})", "{{state}}"),),
                ),
                Panel(
                    "Changes of state, a second",
                    "short",
                    "Into which state. A steady stream of `paused` with a good acceptance rate means that drafting "
                    "does not pay at this load; flapping is bounded by hysteresis.",
                    (
                        Query(
                            "sum by (state) (rate(outrider_fallback_transitions_total{$any_coordinator}[$range]))",
                            "{{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Texts by the mode they start in, a second",
                    "short",
                    "What earlier requests of the same kind have taught. Mostly `paused` for a model whose draft is "
                    "good: look at its priors, and at what pools say about load.",
                    (
                        Query(
                            "sum by (mode) (rate(outrider_fallback_starts_total{$coordinator}[$range]))",
                            "{{mode}}",
                        ),
                    ),
                ),
                Panel(
                    "Probes a second, by outcome",
                    "short",
                    "A paused text tries again now and then; what ended the trial. Probes that fail are what it costs "
                    "to find out.",
                    (
                        Query(
                            "sum by (outcome) (rate(outrider_fallback_probes_total{$coordinator}[$range]))",
                            "{{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    "Attachments that draft workers ended, a second",
                    "short",
                    "Draft workers that died, drained or refused in the middle of a request. It costs speed only.",
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
                    "What coordinators know by model and kind of request, all tenants together; it fades. Routes far "
                    "below the others are those that a better draft would have to be trained for.",
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
                    "Of the verdicts that a prior rests on. Near 100 % requests of this route start paused.",
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
                    "What a step with hints gives beyond its own token, by route. Near 0 there is nothing to gain.",
                    (
                        Query(
                            "avg by (model_name, route) (outrider_prior_extra_tokens_per_step{$coordinator})",
                            "{{model_name}} {{route}}",
                        ),
                    ),
                ),
                Panel(
                    "Priors: how much they rest on",
                    "short",
                    "Verdicts, faded, by route, and for how many models, routes and tenants there is one. With few "
                    "the two panels before say little.",
                    (
                        Query(
                            "max by (model_name, route) (outrider_prior_judged_requests{$coordinator})",
                            "{{model_name}} {{route}}",
                        ),
                        Query("max(outrider_num_priors{$any_coordinator})", "priors there are"),
                    ),
                ),
            ),
        ),
    ),
)
