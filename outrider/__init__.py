"""What every Outrider process shares: engine, registry, transport, and the `outrider` command line."""

__version__ = "0.1.0"
