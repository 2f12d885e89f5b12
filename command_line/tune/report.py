"""Tables, verdict and warnings of a profile, for people. Pure."""

from __future__ import annotations

from typing import Final

from rich.table import Table
from rich.text import Text

from command_line.tune.advice import MIN_GAIN
from command_line.tune.agreement import coverage
from command_line.tune.findings import Findings, ModelProfile

SPREAD_MAX: Final = 0.1
MIN_TOKENS: Final = 300  # tokens compared; with fewer the acceptance rate is off by about five points
_SHOWN_NUM_HINTS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)


def bound_words(profile: ModelProfile) -> str:
    """Describes how a model's step grows with its tokens."""
    knee = profile.times.knee
    where = f"past {profile.times.num_tokens[-1]}" if knee is None else f"at about {knee:.0f}"
    kind = "memory-bound" if profile.times.is_memory_bound else "compute-bound"
    return f"{kind}: a step costs 1.25× that of one token {where} tokens"


def steps_table(found: Findings) -> Table:
    """Step time by tokens fed, for both models."""
    made = Table(title="Milliseconds of a step", title_style="bold")
    made.add_column("tokens fed")
    target, draft = found.target_profile.times, found.draft_profile.times
    for size in target.num_tokens:
        made.add_column(str(size), justify="right")
    for name, times in (("target", target), ("draft", draft)):
        known = dict(zip(times.num_tokens, times.step_ms, strict=True))
        made.add_row(name, *(f"{known[size]:.2f}" if size in known else "" for size in target.num_tokens))
    return made


def acceptance_table(found: Findings) -> Table:
    """Table of τ by γ: counted, for the extreme sequences, and if positions were independent."""
    made = Table(title="Tokens a step (τ)", title_style="bold")
    made.add_column("γ")
    shown = [each for each in found.acceptance if each.num_hints in _SHOWN_NUM_HINTS]
    for each in shown:
        made.add_column(str(each.num_hints), justify="right")
    made.add_row("counted", *(f"{each.mean_length:.2f}" for each in shown), style="bold")
    made.add_row("lowest sequence", *(f"{each.text_min:.2f}" for each in shown))
    made.add_row("highest sequence", *(f"{each.text_max:.2f}" for each in shown))
    made.add_row("all accepted", *(f"{each.histogram[-1] / each.num_steps:.0%}" for each in shown))
    made.add_row("independent", *(f"{each.iid_length:.2f}" for each in shown), style="dim")
    return made


def advice_table(found: Findings) -> Table:
    """Table of the predictions by batch size."""
    made = Table(title="Predicted over plain decoding, one draft worker per target worker", title_style="bold")
    for heading in (
        "batch",
        "tokens/s",
        "synchronous",
        "ahead",
        "range",
        "bound",
        "γ",
        "one draft worker for",
    ):
        made.add_column(heading, justify="right")
    for each in found.advice:
        made.add_row(
            str(each.batch),
            f"{each.plain_tokens_per_s:.0f}",
            f"{each.synchronous:.2f}×",
            Text(f"{each.speedup:.2f}×", "bold")
            if each.num_speculative_tokens
            else Text(f"{max(each.by_num_hints):.2f}×", "dim"),
            f"{each.speedup_low:.2f}–{each.speedup_high:.2f}" if each.num_speculative_tokens else "-",
            f"{each.bound:.2f}×",
            str(each.num_speculative_tokens),
            str(each.sessions_per_draft) if each.num_speculative_tokens else "-",
        )
    return made


WORDS: Final = (
    "Milliseconds of a step, by the number of tokens that it computes, over all sequences.",
    "γ: hints that a step verifies for a sequence. τ: tokens that a step adds to it, 1 without hints. counted: the "
    "mean over all prompts; lowest, highest sequence: that of one prompt; all accepted: share of the steps whose γ "
    "hints were all accepted; independent: τ if one hint's acceptance said nothing about the next one's.",
    "batch: sequences at once. tokens/s: of plain decoding, all sequences together. The factors are speed-ups over it. "
    "synchronous: draft and target wait for each other; ahead: the draft goes on while the target verifies, as "
    "Outrider's does; range: within which ahead is likely to lie; bound: if hints cost nothing. γ: recommended, 0 for "
    "no speculation. one draft worker for: sequences that keep 95 % of their speed when they share one.",
    "memory-bound: reading the weights takes most of a step, so further tokens cost little. compute-bound: arithmetic "
    "does, so each further token costs time.",
)
"""Explains every word of the tables and of the verdict."""


def verdict(found: Findings) -> list[str]:
    """Short verdict in sentences."""
    rate = coverage(found.pair.texts, 1)
    lines = [
        f"The target is {bound_words(found.target_profile)}.",
        f"The draft's first candidate is the target's token {rate:.0%} of the time; one of its first 2 "
        f"{coverage(found.pair.texts, 2):.0%}, of its first 4 {coverage(found.pair.texts, 4):.0%}.",
    ]
    if not found.paying:
        best = max(max(each.by_num_hints) for each in found.advice)
        lines.append(f"Do not speculate with this pair here: {best:.2f}× at best. {_obstacle(found)}")
        return lines
    first = found.paying[0]
    lines.append(
        f"Speculate: about {first.speedup:.2f}× at batch {first.batch} with γ = {first.num_speculative_tokens} "
        f"(likely {first.speedup_low:.2f}× to {first.speedup_high:.2f}×; {first.bound:.2f}× if hints were free)."
    )
    idle = [each for each in found.advice if not each.num_speculative_tokens]
    if idle:
        batches = ", ".join(str(each.batch) for each in idle)
        best = max(each.dedicated for each in idle)
        more = f" (up to {best:.2f}× with more of them)" if best >= MIN_GAIN else ""
        lines.append(
            f"With one draft worker it does not pay at batch {batches}{more}; the target worker pauses speculation "
            "there."
        )
    last = found.paying[-1]
    if last.targets_per_draft:
        lines.append(
            f"One draft worker can serve {_count(last.targets_per_draft, 'target worker')} at batch {last.batch}."
        )
    else:
        lines.append(f"A target worker at batch {last.batch} needs {_count(last.drafts_per_target, 'draft worker')}.")
    return lines


def _obstacle(found: Findings) -> str:
    """Explains why it does not pay at the smallest batch size."""
    first = found.advice[0]
    if first.bound < 1.2:
        return (
            "Even free hints would gain little: the draft is seldom right."
            if coverage(found.pair.texts, 1) < 0.5
            else "Even free hints would gain little: verifying them costs nearly as much as generating them."
        )
    return f"Hints arrive too late or cost too much to verify: free ones would give {first.bound:.2f}×."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def caption(found: Findings) -> str:
    """Machine, settings and amount of data behind the figures."""
    settings = found.settings
    return (
        f"{found.machine}; {_count(settings.num_threads, 'thread')}, {settings.dtype}, "
        f"{found.target_profile.context_len} tokens of context, {len(found.pair.texts)} prompts, "
        f"{found.num_tokens} greedy tokens; overhead {found.pair.overheads.plain_ms:.2f} ms a step; "
        "hints by lookup not counted"
    )


def warnings(found: Findings) -> list[str]:
    """Warnings about why these figures may be wrong."""
    made = []
    for name, profile in (("target", found.target_profile), ("draft", found.draft_profile)):
        if profile.spread > SPREAD_MAX:
            made.append(f"the {name}'s steps differ by ±{profile.spread:.0%} (middle 50 %): is the machine busy?")
    if len(found.pair.texts) < found.num_prompts:
        made.append(f"{len(found.pair.texts)} of {found.num_prompts} prompts within --budget-s")
    if found.num_tokens < MIN_TOKENS:
        made.append(f"only {found.num_tokens} tokens were compared; more --prompts make acceptance more certain")
    largest = found.target_profile.times.num_tokens[-1]
    beyond = [each.batch for each in found.advice if each.batch * (1 + each.num_speculative_tokens) > largest]
    if beyond:
        made.append(f"batch {', '.join(map(str, beyond))} is beyond {largest} measured tokens: extrapolated")
    return made
