"""Mutual TLS between processes, the certificates for it, tenants, and addresses of identity providers."""
