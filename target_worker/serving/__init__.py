"""The gRPC services of a target worker: `server` for coordinators, `draft_streams` for draft workers."""
