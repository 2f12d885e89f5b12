"""A server that answers as S3 and Google Cloud Storage do to listings and reads, with faults."""

from __future__ import annotations

import hashlib
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.command_line.fetch.content_server import ContentServer, answer

PAGE = 4
"""Objects of a page of a listing."""


class BucketServer(ContentServer):
    """Buckets of objects. Both providers list in the same form."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}  # by BUCKET/KEY
        self.tags: dict[str, str] = {}  # instead of the MD5
        self.is_forbidden = False

    def put(self, prefix: str, files: dict[str, bytes]) -> None:
        """Puts objects below BUCKET/PREFIX."""
        self.objects |= {f"{prefix}/{name}": content for name, content in files.items()}

    def tag(self, name: str) -> str:
        """The ETag of an object."""
        return self.tags.get(name) or hashlib.md5(self.objects[name], usedforsecurity=False).hexdigest()

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        path, query = unquote(parts.path).strip("/"), parse_qs(parts.query)
        if self.is_forbidden:
            answer(handler, 403, b"<Error><Code>AccessDenied</Code></Error>")
        elif "list-type" in query:
            self._list(handler, path, query.get("prefix", [""])[0], query.get("continuation-token", [""])[0])
        elif path not in self.objects:
            answer(handler, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif handler.headers.get("If-Match", "").strip('"') not in ("", self.tag(path)):
            answer(handler, 412, b"")
        else:
            headers = {"ETag": f'"{self.tag(path)}"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
            self.send_content(handler, path, self.objects[path], headers)

    def _list(self, handler: BaseHTTPRequestHandler, bucket: str, prefix: str, after: str) -> None:
        keys = sorted(name.removeprefix(f"{bucket}/") for name in self.objects if name.startswith(f"{bucket}/{prefix}"))
        keys = [key for key in keys if key > after]
        page, is_cut = keys[:PAGE], len(keys) > PAGE
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
            f"<ETag>&quot;{self.tag(f'{bucket}/{key}')}&quot;</ETag>"
            f"<Size>{len(self.objects[f'{bucket}/{key}'])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if is_cut else ""
        body = f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
        answer(handler, 200, body.encode(), {"Content-Type": "application/xml"})
