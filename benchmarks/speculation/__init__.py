"""A pair of workers with and without speculation: one request, batches, slow networks, mixed traffic."""
