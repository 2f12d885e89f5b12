"""Prometheus metrics of one replica (`metrics`) and the statistics of one request (`statistics`)."""
