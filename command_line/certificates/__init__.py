"""Certificates of all parts: in folders (`outrider certificates`), and in the secrets of a release on Kubernetes."""
