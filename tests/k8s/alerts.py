"""Alerts that nobody could act on, or that nobody tried. Pure: rules in, sentences out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

Rule = Mapping[str, Any]

SEVERITIES: Final = ("critical", "warning", "info")
ANNOTATIONS: Final = ("summary", "description", "runbook_url")
GUIDE: Final = "https://example.com/outrider/operations/runbooks/#"


def headings(markdown: str) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", code.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def without_a_way_out(alerts: Sequence[Rule], anchors: Collection[str]) -> Iterator[str]:
    """Alerts that do not say how bad it is, what it is, or what to do."""
    for alert in alerts:
        name = alert["alert"]
        if alert["labels"].get("severity") not in SEVERITIES:
            yield f"{name} has no severity of {', '.join(SEVERITIES)}"
        for each in ANNOTATIONS:
            if not alert["annotations"].get(each):
                yield f"{name} has no {each}"
        url = alert["annotations"].get("runbook_url", "")
        if not url.startswith(GUIDE) or url.removeprefix(GUIDE) not in anchors:
            yield f"{name} sends to {url}, which is no heading of the guide"
        elif url.removeprefix(GUIDE) != name.lower():
            yield f"{name} sends to another alert's runbook"


def naming_labels_it_has_not(alert: Rule, labels: Collection[str]) -> Iterator[str]:
    """labels: of the alert's expression."""
    for name in ANNOTATIONS:
        for label in re.findall(r"\$labels\.(\w+)", alert["annotations"].get(name, "")):
            if label not in labels:
                yield f"{alert['alert']}: its {name} names {label}, which its expression has not"


def untested(alerts: Sequence[Rule], tests: Sequence[Rule]) -> Iterator[str]:
    """Alerts whose tests, groups of promtool by the alert's name, do not see them both silent and firing."""
    for alert in alerts:
        name = alert["alert"]
        asked = f'ALERTS{{alertname="{name}",alertstate="firing"}}'
        seen = [
            bool(question["exp_samples"])
            for test in tests
            if test["name"] == name
            for question in test.get("promql_expr_test", ())
            if question["expr"] == asked
        ]
        if True not in seen:
            yield f"{name} is never seen to fire"
        if False not in seen:
            yield f"{name} is never seen to be silent"
