"""`outrider plan`: what fits on a device, and values of the Helm chart for it."""
