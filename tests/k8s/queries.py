"""Checks of PromQL queries against the exported metrics. Pure: a query in, sentences about its mistakes out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import promql_parser

from tests.k8s.exporters import Exports, Labels

SCRAPE_LABELS: Final = frozenset({"job", "instance", "namespace", "host", "pod", "container", "endpoint"})
"""Labels that Prometheus, its operator and our relabeling add to every sample."""
NAMES_OF_ANYTHING: Final = frozenset({"model_name", "engine"})
"""Labels whose values are for an operator to choose."""
OF_PROMETHEUS: Final[Mapping[str, Labels]] = {"up": {}}
_VARIABLES: Final = {"$__rate_interval": "5m", "$namespace": ".*", "$model": ".*"}
_WORDS: Final = re.compile(r"[\w|-]+")


@dataclass
class Reading:
    """The analysis of one query. labels: those that its result may have; None for a number without any."""

    labels: frozenset[str] | None
    mistakes: list[str]


def read(query: str, exports: Exports, records: Mapping[str, frozenset[str]]) -> Reading:
    """Analyses a query. records: by name of a recording rule, the labels of what it records."""
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    if unknown := re.findall(r"\$\w+", query):
        return Reading(frozenset(), [f"nobody sets {unknown[0]}"])
    try:
        tree = promql_parser.parse(query)
    except ValueError as error:
        return Reading(frozenset(), [f"it does not parse: {error}"])
    reader = _Reader(exports, records)
    return Reading(reader.labels_of(tree), reader.mistakes)


@dataclass
class _Reader:
    exports: Exports
    records: Mapping[str, frozenset[str]]
    mistakes: list[str] = field(default_factory=list)

    def labels_of(self, node: Any) -> frozenset[str] | None:
        match node:
            case promql_parser.VectorSelector():
                return self._selector(node)
            case promql_parser.MatrixSelector():
                return self._selector(node.vector_selector)
            case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
                return None
            case promql_parser.Call():
                return self._call(node)
            case promql_parser.AggregateExpr():
                return self._aggregate(node)
            case promql_parser.BinaryExpr():
                return self._binary(node)
            case _:  # in parentheses, negative, a subquery
                return self.labels_of(node.expr)

    def _selector(self, node: promql_parser.VectorSelector) -> frozenset[str]:
        name, matchers = node.name, node.matchers.matchers
        if name is None or node.matchers.or_matchers:
            self.mistakes.append("a selector should have a name, and no other way to find it")
            return SCRAPE_LABELS
        if ":" in name:
            if name not in self.records:
                self.mistakes.append(f"{name} is not recorded")
            known: Labels = {label: frozenset() for label in self.records.get(name, ())}
            self._check_labels(name, known, matchers)
            return frozenset(known)
        chosen = [job for job in self.exports if all(_holds(each, job) for each in matchers if each.name == "job")]
        if not chosen:
            self.mistakes.append(f"{name}: there is no such job")
        values: dict[str, frozenset[str]] = {}
        for job in chosen:
            found = self.exports[job].get(name, OF_PROMETHEUS.get(name))
            if found is None:
                self.mistakes.append(f"{name} is not exported by {job}")
            for label, some in (found or {}).items():
                values[label] = values.get(label, frozenset()) | some
        if chosen and not self.mistakes:
            known = values | {label: frozenset[str]() for label in SCRAPE_LABELS}
            self._check_labels(name, known, matchers)
        return frozenset(values) | SCRAPE_LABELS

    def _check_labels(self, name: str, known: Labels, matchers: list[promql_parser.Matcher]) -> None:
        for each in matchers:
            if each.name not in known:
                self.mistakes.append(f"{name} has no label {each.name}")
            elif each.name not in SCRAPE_LABELS | NAMES_OF_ANYTHING and known[each.name]:
                wanted = each.value.split("|") if _WORDS.fullmatch(each.value) else []
                for value in wanted:
                    if value not in known[each.name]:
                        self.mistakes.append(f"{name} never has {each.name} {value}")

    def _call(self, node: promql_parser.Call) -> frozenset[str] | None:
        found = [self.labels_of(argument) for argument in node.args]
        if node.func.name in ("vector", "absent"):
            return frozenset()
        labels = [each for each in found if each is not None]
        if node.func.name == "histogram_quantile":
            if "le" not in labels[0]:
                self.mistakes.append("histogram_quantile needs the label le")
            return labels[0] - {"le"}
        return labels[0] if labels else None

    def _aggregate(self, node: promql_parser.AggregateExpr) -> frozenset[str]:
        inner = self.labels_of(node.expr) or frozenset()
        if node.modifier is None:
            return frozenset()
        named = frozenset(node.modifier.labels)
        if missing := sorted(named - inner):
            self.mistakes.append(f"nothing below {node.op} has the label {missing[0]}")
        return named if node.modifier.type == promql_parser.AggModifierType.By else inner - named

    def _binary(self, node: promql_parser.BinaryExpr) -> frozenset[str] | None:
        left, right = self.labels_of(node.lhs), self.labels_of(node.rhs)
        if left is None or right is None:
            return right if left is None else left
        if str(node.op) == "or":
            return left | right
        matching = node.modifier.matching if node.modifier is not None else None
        named = frozenset[str]() if matching is None else frozenset(matching.labels)
        if missing := sorted(named - (left | right)):
            self.mistakes.append(f"neither side of {node.op} has the label {missing[0]}")
        is_on = matching is not None and matching.type == promql_parser.LabelModifierType.Include
        if apart := sorted((left ^ right) & named if is_on else (left ^ right) - named):
            self.mistakes.append(f"only one side of {node.op} has the label {apart[0]}: they never meet")
        return left


def _holds(matcher: promql_parser.Matcher, value: str) -> bool:
    is_equal = matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.NotEqual)
    found = matcher.value == value if is_equal else re.fullmatch(matcher.value, value) is not None
    return found is not (matcher.op in (promql_parser.MatchOp.NotEqual, promql_parser.MatchOp.NotRe))


def recorded(rules: Sequence[Mapping[str, Any]], exports: Exports) -> dict[str, frozenset[str]]:
    """Recording rules by their names, with the labels of what each records; one may build on those before it."""
    found: dict[str, frozenset[str]] = {}
    for rule in rules:
        if "record" in rule:
            found[rule["record"]] = read(rule["expr"], exports, found).labels or frozenset()
    return found


def label_values(query: str) -> Iterator[str]:
    """Grafana's `label_values(selector, label)` as a query that can be read."""
    if (found := re.fullmatch(r"label_values\((.+), (\w+)\)", query)) is not None:
        yield f"count by ({found[2]}) ({found[1]})"
