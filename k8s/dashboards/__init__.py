"""Grafana's dashboards as queries and descriptions; `python -m k8s.dashboards` generates the JSON."""
