"""The gRPC service for draft workers, for all that verify hints: target workers, and `outrider.engines`."""
