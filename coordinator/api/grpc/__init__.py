"""The gRPC API, `outrider.v1.Generation`, with health and reflection: its calls, and how gRPC servers get them, Ray
Serve's (`grpc_ingress`) and our own (`grpc_server`)."""
