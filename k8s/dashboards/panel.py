"""Building blocks of a dashboard, and their conversion to Grafana's model. Pure.

Queries are templates: `$target`, `$draft` and `$coordinator` stand for the labels that select a kind of process,
within braces that may contain more of them; `$range` for the window of a rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any, Final, Literal

Json = dict[str, Any]

# A draft's model name differs from its target's, and the coordinator's overall metrics have none.
SELECTORS: Final = {
    "target": 'job="outrider-target",namespace=~"$namespace",model_name=~"$model"',
    "draft": 'job="outrider-draft",namespace=~"$namespace"',
    "coordinator": 'job="outrider-coordinator",namespace=~"$namespace",model_name=~"$model"',
    "any_coordinator": 'job="outrider-coordinator",namespace=~"$namespace"',
    "worker": 'job=~"outrider-(target|draft)",namespace=~"$namespace"',
    "process": 'job=~"outrider-.+",namespace=~"$namespace"',
    "record": 'namespace=~"$namespace",model_name=~"$model"',
    "any_record": 'namespace=~"$namespace"',
    "range": "$__rate_interval",
}
COLUMNS: Final = 3
_GRID_WIDTH: Final = 24  # Grafana's
_HEIGHT: Final = 8
_SOURCE: Final = {"type": "prometheus", "uid": "$datasource"}
_SCHEMA_VERSION: Final = 39  # Grafana 10 and later


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel, or several that differ in the labels of its legend."""

    template: str
    legend: str

    @property
    def expression(self) -> str:
        """The query's expression, with Grafana's own variables left in."""
        return Template(self.template).safe_substitute(SELECTORS)


@dataclass(frozen=True, slots=True)
class Limit:
    """Threshold of a value that needs attention."""

    value: float
    is_upper: bool = True  # False: values below are bad


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph. Its description explains how to read it and what to do."""

    title: str
    unit: str  # Grafana's id of the unit
    description: str
    queries: tuple[Query, ...]
    limit: Limit | None = None
    kind: Literal["timeseries", "stat"] = "timeseries"
    most: float | None = None  # upper end of the axis, if fixed


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a common heading, COLUMNS of them side by side."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. Links refer to its uid, which must not change."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    def to_json(self) -> Json:
        """The dashboard as JSON for Grafana's import."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["outrider"],
            "schemaVersion": _SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,  # crosshair at the same time in all panels
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "timezone": "",
            "templating": {"list": _variables()},
            "links": [
                {
                    "type": "dashboards",
                    "title": "Outrider",
                    "tags": ["outrider"],
                    "asDropdown": False,
                    "keepTime": True,
                    "includeVars": True,
                }
            ],
            "panels": list(_laid_out(self.rows)),
        }


def _laid_out(rows: Sequence[Row]) -> Iterator[Json]:
    number, top, width = 0, 0, _GRID_WIDTH // COLUMNS
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": _GRID_WIDTH, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": place,
        }
        top += 1
        for index, panel in enumerate(row.panels):
            number += 1
            line, column = divmod(index, COLUMNS)
            place = {"x": column * width, "y": top + line * _HEIGHT, "w": width, "h": _HEIGHT}
            yield _panel(panel, number, place)
        top += -(-len(row.panels) // COLUMNS) * _HEIGHT


def _panel(panel: Panel, number: int, place: Json) -> Json:
    defaults: Json = {"unit": panel.unit, "thresholds": _thresholds(panel.limit)}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        custom: Json = {"lineWidth": 1, "fillOpacity": 5, "showPoints": "never", "spanNulls": False}
        custom["thresholdsStyle"] = {"mode": "off" if panel.limit is None else "dashed"}
        defaults |= {"min": 0, "custom": custom}
        options: Json = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "auto",
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _thresholds(limit: Limit | None) -> Json:
    first, second = ("green", "red") if limit is None or limit.is_upper else ("red", "green")
    steps: list[Json] = [{"color": first, "value": None}]
    if limit is not None:
        steps.append({"color": second, "value": limit.value})
    return {"mode": "absolute", "steps": steps}


def _variables() -> list[Json]:
    source: Json = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return [
        source,
        _labels_of(
            "namespace",
            "Namespace",
            'label_values(outrider_live_workers{job="outrider-coordinator"}, namespace)',
        ),
        _labels_of(
            "model",
            "Model",
            'label_values(outrider_num_requests_running{job="outrider-target",namespace=~"$namespace"}, model_name)',
        ),
    ]


def _labels_of(name: str, label: str, query: str) -> Json:
    """A variable with a choice of several values or all: `.*` also finds series without the label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
