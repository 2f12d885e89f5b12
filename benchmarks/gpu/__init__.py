"""One session on a GPU: checkpoints made on the spot, the parts that measure, and the page that they end in."""
