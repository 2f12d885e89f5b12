"""Grafana's model of a dashboard as far as ours go, unknown fields refused, and what a schema does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jsonschema

from tests.k8s.custom_resources import COUNT, FLAG, TEXT, Schema

# https://github.com/grafana/grafana/blob/main/packages/grafana-data/src/valueFormats/categories.ts
UNITS: Final = ("short", "percentunit", "s", "ms", "bytes", "reqps")
WIDTH: Final = 24


def fields(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object of these and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": dict(items)}


_NUMBER: Final[Schema] = {"type": "number"}
_SOURCE: Final = fields({"type": {"const": "prometheus"}, "uid": {"const": "$datasource"}}, "type", "uid")
_PLACE: Final = fields({"x": COUNT, "y": COUNT, "w": COUNT, "h": COUNT}, "x", "y", "w", "h")
_ROW: Final = fields(
    {
        "id": COUNT,
        "type": {"const": "row"},
        "title": TEXT,
        "collapsed": FLAG,
        "panels": {"const": []},
        "gridPos": _PLACE,
    },
    *("id", "type", "title", "collapsed", "panels", "gridPos"),
)
_THRESHOLDS: Final = fields(
    {
        "mode": {"const": "absolute"},
        "steps": array(fields({"color": TEXT, "value": {"type": ["number", "null"]}}, "color", "value")),
    },
    *("mode", "steps"),
)
_CUSTOM: Final = fields(
    {
        "lineWidth": COUNT,
        "fillOpacity": COUNT,
        "showPoints": {"enum": ["auto", "never", "always"]},
        "spanNulls": FLAG,
        "thresholdsStyle": fields({"mode": {"enum": ["off", "line", "dashed", "area"]}}, "mode"),
    }
)
_DEFAULTS: Final = fields(
    {
        "unit": {"enum": list(UNITS)},
        "min": _NUMBER,
        "max": _NUMBER,
        "thresholds": _THRESHOLDS,
        "custom": _CUSTOM,
    },
    *("unit", "thresholds"),
)
_TARGET: Final = fields(
    {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "datasource": _SOURCE,
        "expr": TEXT,
        "legendFormat": TEXT,
    },
    *("refId", "datasource", "expr", "legendFormat"),
)


def _panel(kind: str, options: Schema) -> Schema:
    return fields(
        {
            "id": COUNT,
            "type": {"const": kind},
            "title": TEXT,
            "description": TEXT,
            "datasource": _SOURCE,
            "gridPos": _PLACE,
            "fieldConfig": fields({"defaults": _DEFAULTS, "overrides": {"const": []}}, "defaults", "overrides"),
            "options": options,
            "targets": {**array(_TARGET), "minItems": 1},
        },
        *("id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "options", "targets"),
    )


_PANELS: Final = [
    _ROW,
    _panel(
        "timeseries",
        fields(
            {
                "legend": fields(
                    {
                        "displayMode": {"enum": ["list", "table", "hidden"]},
                        "placement": {"enum": ["bottom", "right"]},
                        "showLegend": FLAG,
                        "calcs": array(TEXT),
                    }
                ),
                "tooltip": fields(
                    {"mode": {"enum": ["single", "multi", "none"]}, "sort": {"enum": ["none", "asc", "desc"]}}
                ),
            },
            *("legend", "tooltip"),
        ),
    ),
    _panel(
        "stat",
        fields(
            {
                "reduceOptions": fields({"calcs": array(TEXT), "fields": TEXT, "values": FLAG}, "calcs"),
                "colorMode": {"enum": ["value", "background", "none"]},
                "graphMode": {"enum": ["area", "none"]},
                "textMode": {"enum": ["auto", "value", "name", "value_and_name", "none"]},
            },
            "reduceOptions",
        ),
    ),
]
_VARIABLE: Final = fields(
    {
        "name": TEXT,
        "label": TEXT,
        "type": {"enum": ["datasource", "query"]},
        "query": {"anyOf": [TEXT, fields({"query": TEXT, "refId": TEXT}, "query", "refId")]},
        "datasource": _SOURCE,
        "refresh": {"enum": [0, 1, 2]},
        "sort": {"enum": list(range(9))},
        "multi": FLAG,
        "includeAll": FLAG,
        "allValue": TEXT,
        "current": fields({"text": array(TEXT), "value": array(TEXT)}, "text", "value"),
    },
    *("name", "type", "query"),
)
_LINK: Final = fields(
    {
        "type": {"const": "dashboards"},
        "title": TEXT,
        "tags": array(TEXT),
        "asDropdown": FLAG,
        "keepTime": FLAG,
        "includeVars": FLAG,
    },
    *("type", "title", "tags"),
)
DASHBOARD: Final = fields(
    {
        "uid": {"type": "string", "maxLength": 40, "pattern": "^[a-z-]+$"},
        "title": TEXT,
        "description": TEXT,
        "tags": array(TEXT),
        "schemaVersion": COUNT,
        "version": COUNT,
        "editable": FLAG,
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": TEXT,
        "time": fields({"from": TEXT, "to": TEXT}, "from", "to"),
        "timezone": {"enum": ["", "utc", "browser"]},
        "templating": fields({"list": array(_VARIABLE)}, "list"),
        "links": array(_LINK),
        "panels": array({"oneOf": _PANELS}),
    },
    *("uid", "title", "schemaVersion", "time", "templating", "panels"),
)


def mistakes(dashboard: Mapping[str, Any]) -> Iterator[str]:
    """In words."""
    for error in jsonschema.Draft202012Validator(DASHBOARD).iter_errors(dashboard):
        yield f"{error.json_path}: {error.message}"
        return  # what follows reads it
    panels = dashboard["panels"]
    for number, count in Counter(panel["id"] for panel in panels).items():
        if count > 1:
            yield f"{count} panels have the id {number}"
    taken: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        if place["x"] + place["w"] > WIDTH:
            yield f"{panel['title']} goes beyond the right edge"
        rows, columns = (range(place[start], place[start] + place[size]) for start, size in (("y", "h"), ("x", "w")))
        taken.update((row, column) for row in rows for column in columns)
        if panel["type"] != "row":
            if len(panel["description"]) < 40:
                yield f"{panel['title']} does not say how to read it"
            if len({target["refId"] for target in panel["targets"]}) < len(panel["targets"]):
                yield f"{panel['title']} has two queries of one name"
    if any(count > 1 for count in taken.values()):
        yield "panels lie on each other"
