"""Mutual TLS between processes, the certificates for it, calls before they are read, tenants, and addresses of identity
providers."""
