"""The gRPC service of a target worker for coordinators; that for draft workers is `outrider.hint_service`."""
