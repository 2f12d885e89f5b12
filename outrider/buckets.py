"""Buckets of S3, of Google Cloud Storage and of servers that talk like them, opened through `obstore`.

Credentials, region and endpoint come from the variables that the providers' own tools read, or from the machine's role:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT (with AWS_ALLOW_HTTP=true for one without TLS), a
pod's web identity (AWS_WEB_IDENTITY_TOKEN_FILE); GOOGLE_SERVICE_ACCOUNT, GOOGLE_APPLICATION_CREDENTIALS, or the
metadata server with a pod's workload identity (GOOGLE_BASE_URL names another server than Google's).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from outrider.errors import ConfigurationError

S3: Final = "s3"
GCS: Final = "gs"
RETRIES: Final = 3
"""Retries of one call inside the client, which waits between them."""
_RETRY_S: Final = timedelta(seconds=30)
_CONNECT_S: Final = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket that is opened, with the client's functions and errors."""

    store: Any
    obstore: Any
    errors: Any


def open_bucket(url: str, named_by: str, schemes: tuple[str, ...], timeout: timedelta) -> Bucket:
    """Opens SCHEME://BUCKET/PREFIX; names are then relative to the prefix. `timeout` bounds one call.

    `named_by` is how messages name the address. Raises ConfigurationError for an address without a bucket, or without
    the package `obstore`.
    """
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.netloc or parts.query or parts.fragment:
        forms = " or ".join(f"{scheme}://BUCKET/PREFIX" for scheme in schemes)
        raise ConfigurationError(f"{named_by} is no address of a bucket; write {forms}")
    try:
        obstore: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{named_by} needs the package obstore; install it with `pip install 'outrider[s3]'`"
        ) from error
    errors: Any = importlib.import_module("obstore.exceptions")
    kind = stores.S3Store if parts.scheme == S3 else stores.GCSStore
    # Options given here replace the variable of AWS's tools.
    is_plain = {
        S3: os.environ.get("AWS_ALLOW_HTTP") == "true",
        GCS: os.environ.get("GOOGLE_BASE_URL", "").startswith("http://"),
    }
    client = {"timeout": timeout, "connect_timeout": _CONNECT_S, "allow_http": is_plain[parts.scheme]}
    try:
        store = kind(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options=client,
            retry_config={"max_retries": RETRIES, "retry_timeout": _RETRY_S},
        )
    except errors.BaseError as error:
        raise ConfigurationError(f"{named_by} cannot be used: {str(error)[:300]}") from error
    return Bucket(store, obstore, errors)
