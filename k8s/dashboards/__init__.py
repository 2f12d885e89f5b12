"""Grafana's dashboards, written down by what they ask and how to read it; `python -m k8s.dashboards` makes the JSON."""
