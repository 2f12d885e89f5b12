"""Files of a repository of the Hugging Face Hub, or of a mirror that HF_ENDPOINT names.

`huggingface_hub` finds the token and the endpoint, as everybody's tools do. Listing and downloading are our own,
because its downloads (2.4) do not do what a pod needs:

- a file that broke off is resumed inside one call only: it goes to a temporary name of the process, which is removed;
- a file is compared with its size, not with the checksum that the Hub states;
- `snapshot_download` falls back to whatever is in the folder when the Hub cannot be reached;
- it keeps a cache of its own beside or inside the folder.

So one request lists the files of a revision, with the commit, sizes and checksums; and each file is read with Range
requests at that commit.

Where a redirect may lead: the host that HF_ENDPOINT names is the operator's choice, with whatever address it has. Every
other one has to speak https, and to have public addresses.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import httpx

from command_line.fetch.sources import FILES_MAX, Digest, Listing, SourceFile, without_secrets
from outrider import __version__
from outrider.addresses import is_ip_address, is_public
from outrider.errors import ConfigurationError, Unavailable
from outrider.model_files import parse_json

SCHEME: Final = "hf://"
REQUEST_S: Final = 600.0
"""Longest time of one request for content; the next one goes on where it ended."""
REQUEST_BYTES: Final = 32 << 30
"""Most bytes of one request: content networks refuse files of more than 50 GB as a whole."""
LISTING_BYTES_MAX: Final = 16 << 20
"""Largest description of a repository: twice what one of FILES_MAX files takes."""
LISTING_S: Final = 120.0
"""Longest time for a description."""
REDIRECTS_MAX: Final = 5
_TIMEOUT: Final = httpx.Timeout(20.0, connect=10.0)  # of a connection, and of each wait for bytes
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PART: Final = re.compile(r"[\w.-]+")
_WAIT_MAX_S: Final = 300.0
_BUSY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class HubSource:
    """A repository at a revision."""

    def __init__(self, address: str) -> None:
        """Raises ConfigurationError for an address without organisation, name or revision."""
        from huggingface_hub import constants

        named, has_revision, revision = address.removeprefix(SCHEME).partition("@")
        parts = named.split("/")
        if len(parts) != 2 or not all(_PART.fullmatch(part) for part in parts):
            raise ConfigurationError(
                f"{address} is no model of the Hub; write hf://ORG/NAME@REVISION, such as hf://Qwen/Qwen3-8B@main"
            )
        self.repository = named
        self.name = f"{SCHEME}{named}"
        self.address = address
        self.commit: str | None = revision if _COMMIT.fullmatch(revision) else None
        self._revision = revision
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        try:
            endpoint = httpx.URL(self._endpoint)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"HF_ENDPOINT={self._endpoint[:100]} is no URL: {error}") from error
        self._host, self._scheme = endpoint.host or self._endpoint, endpoint.scheme
        if not has_revision or not revision:
            raise self._unpinned()

    @cached_property
    def _client(self) -> httpx.Client:
        """Made when it is needed: a folder that is complete needs neither token nor network. Raises
        ConfigurationError."""
        from huggingface_hub import constants

        if constants.is_offline_mode():
            raise ConfigurationError(f"{self.address} cannot be fetched: HF_HUB_OFFLINE is set; unset it")
        return httpx.Client(headers=_headers(self.address), timeout=_TIMEOUT)

    @property
    def _has_token(self) -> bool:
        return "Authorization" in self._client.headers

    def list_files(self) -> Listing:
        found = self._described(self._revision)
        try:
            files = tuple(_file(each) for each in found["siblings"])
            commit = str(found["sha"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{self._host} does not describe the files of {self.address} as the Hub does, with sizes and checksums "
                f"({type(error).__name__}: {without_secrets(error)}); HF_ENDPOINT must name the Hub or a full mirror"
            ) from error
        if not _COMMIT.fullmatch(commit) or (self.commit or commit) != commit:
            raise ConfigurationError(f"{self._host} answered with commit {commit[:50]!r} for {self.address}")
        if len(files) > FILES_MAX:
            raise ConfigurationError(f"{self.address} has {len(files)} files; at most {FILES_MAX} are read")
        return Listing(commit, files)

    def read(self, listing: Listing, file: SourceFile, start: int) -> Iterator[bytes]:
        end = min(file.size, start + REQUEST_BYTES)
        url = f"{self._endpoint}/{self.repository}/resolve/{listing.revision}/{quote(file.path)}"
        began_s = time.monotonic()
        try:
            with self._answer(url, {"Range": f"bytes={start}-{end - 1}"}) as response:
                if response.status_code not in (200, 206):
                    raise self._refused(response, file.path)
                if response.status_code == 206 and not _begins_at(response, start):
                    raise ConfigurationError(f"{self._host} answered with another part of {file.path} than was asked")
                left = 0 if response.status_code == 206 else start  # a server without ranges sends it all again
                for chunk in response.iter_raw():  # as it comes: what waits for a larger chunk is lost in a break
                    kept = chunk[left:]
                    left = max(left - len(chunk), 0)
                    if kept:
                        yield kept
                    if time.monotonic() - began_s > REQUEST_S:
                        return
        except httpx.TransportError as error:
            raise Unavailable(f"{file.path}: {type(error).__name__}: {without_secrets(error)}") from error

    def close(self) -> None:
        if "_client" in self.__dict__:
            self._client.close()

    def _described(self, revision: str) -> dict[str, Any]:
        url = f"{self._endpoint}/api/models/{self.repository}/revision/{quote(revision, safe='')}?blobs=true"
        try:
            with self._answer(url, {}) as response:
                if response.status_code != 200:
                    raise self._refused(response, None)
                found = parse_json(self._whole(response))
        except httpx.TransportError as error:
            raise Unavailable(
                f"{self._host} cannot be reached: {type(error).__name__}: {without_secrets(error)}"
            ) from error
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigurationError(
                f"{self._host} answers with something else than the Hub's API; is a proxy between?"
            )
        return found

    def _whole(self, response: httpx.Response) -> bytes:
        """The content of a description, as it comes: a compressed one could become a thousand times as long. Raises
        ConfigurationError and Unavailable."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise ConfigurationError(
                f"{self._host} compresses its answer, which was not asked for; is a proxy between?"
            )
        found, until_s = bytearray(), time.monotonic() + LISTING_S
        for chunk in response.iter_raw():
            found += chunk
            if len(found) > LISTING_BYTES_MAX:
                raise ConfigurationError(
                    f"{self._host} describes {self.address} in more than {LISTING_BYTES_MAX} bytes; name the "
                    "repository of one model"
                )
            if time.monotonic() > until_s:
                raise Unavailable(f"{self._host} has not described {self.address} within {LISTING_S:.0f} s")
        return bytes(found)

    @contextmanager
    def _answer(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """The answer to a GET, after redirects: whoever answers for the Hub may send us to a content network, and to
        nothing inside our own. The token goes to the endpoint alone. Raises ConfigurationError."""
        request: httpx.Request | None = self._client.build_request("GET", url, headers=headers)
        for _ in range(REDIRECTS_MAX + 1):
            assert request is not None
            is_named = request.url.host == self._host  # by the operator, who may have a mirror of their own
            if not is_named:
                self._check_public(request.url)
            response = self._client.send(request, stream=True)
            try:
                if not is_named:
                    self._check_peer(response)
                # It has no Authorization where it leaves the origin of this one.
                request = response.next_request
                if request is None:
                    yield response
                    return
                if request.url.scheme not in ("https", self._scheme):
                    raise ConfigurationError(f"{self._host} redirects to {_shown(request.url)}, which is not https")
            finally:
                response.close()
        raise ConfigurationError(f"{self._host} redirects more than {REDIRECTS_MAX} times for {self.address}")

    def _check_public(self, url: httpx.URL) -> None:
        """Raises ConfigurationError unless it is https and its host has public addresses alone; Unavailable if the host
        cannot be found."""
        if url.scheme != "https":
            raise ConfigurationError(f"{self._host} redirects to {_shown(url)}, which is not https")
        if _has_proxy(url):  # whose resolver and network count
            addresses = [url.host] if is_ip_address(url.host) else []
        else:
            try:
                found = socket.getaddrinfo(url.host, url.port or 443, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # a name that is too long cannot be encoded
                raise Unavailable(f"{url.host}, to which {self._host} redirects, cannot be found: {error}") from error
            addresses = [str(each[4][0]) for each in found]
        for address in addresses:
            self._refuse_private(address, url)

    def _check_peer(self, response: httpx.Response) -> None:
        """Raises ConfigurationError if the connection led to a private address: a name may have another address when
        it is looked up again."""
        stream, url = response.extensions.get("network_stream"), response.request.url
        peer = stream.get_extra_info("server_addr") if stream is not None else None
        if peer is not None and not _has_proxy(url):
            self._refuse_private(str(peer[0]), url)

    def _refuse_private(self, address: str, url: httpx.URL) -> None:
        if not is_public(address):
            raise ConfigurationError(
                f"{self._host} redirects to {_shown(url)}, and {address} is no public address. If that is your mirror, "
                "name it: HF_ENDPOINT"
            )

    def _refused(self, response: httpx.Response, path: str | None) -> Exception:
        """The error for a status, with the way out."""
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        what = f"{self.address}{f': {path}' if path else ''}"
        if status in _BUSY:
            return Unavailable(f"{what}: {self._host} answers {status}", _wait_s(response))
        page = f"{self._endpoint}/{self.repository}"
        if code == "GatedRepo":
            way_out = (
                f"ask for access at {page} with the account of the token"
                if self._has_token
                else f"ask for access at {page}, and set HF_TOKEN (or HF_TOKEN_PATH, a file with it)"
            )
            return ConfigurationError(f"{what} is gated ({status}): {way_out}")
        if code == "RevisionNotFound":
            return ConfigurationError(f"{what}: there is no such revision; {page}/commits/main lists them")
        if code == "EntryNotFound":
            return ConfigurationError(f"{what} is gone ({status}); fetch again")
        if code == "RepoNotFound" or status in (401, 404):
            token = "the token has no access to it" if self._has_token else "it is private and HF_TOKEN is not set"
            if status == 401 and self._has_token and code != "RepoNotFound":
                return ConfigurationError(f"{what}: the token is not valid ({status}); make a new one and set HF_TOKEN")
            return ConfigurationError(
                f"{what}: {self._host} knows no such model ({status}). Its name is misspelt, or {token}"
            )
        if status == 403:
            return ConfigurationError(
                f"{what}: the token may not read it ({status}); a fine-grained token needs access to the contents of "
                "this repository"
            )
        return ConfigurationError(f"{what}: {self._host} answers {status} {without_secrets(response.reason_phrase)}")

    def _unpinned(self) -> ConfigurationError:
        """The refusal of an address without a revision, which names the commit to write."""
        example = f"{self.name}@main"
        try:
            found = self._described("main").get("sha")
            if isinstance(found, str) and _COMMIT.fullmatch(found):
                example = f"{self.name}@{found}, which main is now"
        except (ConfigurationError, Unavailable):
            pass
        finally:
            self.close()
        return ConfigurationError(
            f"{self.name} names no revision, so two pods may get different weights: write {example}. @main is permitted"
            ", and then whatever main is when the folder is first filled"
        )


def _headers(address: str) -> dict[str, str]:
    """Headers with the token, if there is one. Raises ConfigurationError if the file that holds it cannot be read."""
    from huggingface_hub import constants, get_token

    if (path := os.environ.get("HF_TOKEN_PATH")) and not os.environ.get("HF_TOKEN"):
        try:
            Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{address}: HF_TOKEN_PATH={path} cannot be read: {error.strerror}") from error
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    # Not `build_hf_headers`: it asks the endpoint for a list of programs to recognise, to name one as the user agent.
    made = {"User-Agent": f"outrider/{__version__}", "Accept-Encoding": "identity"}
    return made | ({"Authorization": f"Bearer {token}"} if token else {})


def _shown(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode(errors='replace')}"[:200]


def _has_proxy(url: httpx.URL) -> bool:
    """Whether the environment names a proxy for this address, as httpx reads it."""
    proxies = getproxies()
    return bool((proxies.get(url.scheme) or proxies.get("all")) and not proxy_bypass(url.host))


def _file(described: dict[str, Any]) -> SourceFile:
    path, lfs = str(described["rfilename"]), described.get("lfs")
    digest = Digest("sha256", str(lfs["sha256"])) if lfs else Digest("git-sha1", str(described["blobId"]))
    size = int(lfs["size"] if lfs else described["size"])
    return SourceFile(path, size, f"{digest.kind}:{digest.value}", digest)


def _wait_s(response: httpx.Response) -> float:
    """The time after which a busy server wants to be asked again, by the standard's header or the Hub's own."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(response.headers)
    text = response.headers.get("Retry-After", "")
    asked_s = float(text) if text.isdigit() else limit.reset_in_seconds if limit and not limit.remaining else 1.0
    return min(max(asked_s, 1.0), _WAIT_MAX_S)


def _begins_at(response: httpx.Response, start: int) -> bool:
    return response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
