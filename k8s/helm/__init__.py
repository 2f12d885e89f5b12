"""The Helm chart, and `python -m k8s.helm`, which renders it with its presets."""
