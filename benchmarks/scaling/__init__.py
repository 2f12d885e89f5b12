"""A day of traffic replayed by the autoscalers of the Kubernetes manifests."""
