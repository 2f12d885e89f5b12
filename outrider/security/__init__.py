"""Mutual TLS between processes, the certificates for it, and tenants."""
