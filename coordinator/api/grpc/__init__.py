"""The gRPC API, `outrider.v1.Generation`, with health and reflection: its calls, and how Ray Serve's gRPC servers get
them."""
