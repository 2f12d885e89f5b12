"""A server that answers as the Hugging Face Hub does: descriptions, trees, redirects of large files to another host."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from tests.command_line.fetch.content_server import ContentServer, answer

SIGNATURE: Final = "X-Amz-Signature=0123secret"
"""Part of the address to which large files are redirected."""
LFS: Final = (".safetensors", ".bin", ".pth")
_CODES: Final = {"RepoNotFound": 404, "RevisionNotFound": 404, "EntryNotFound": 404, "GatedRepo": 403}


@dataclass
class Repository:
    """A repository: the files of each commit, and names of commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    readers: frozenset[str] | None = None  # tokens that may read the contents; None: everybody
    is_private: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Adds a commit, to which `ref` points then."""
        digest = hashlib.sha1(usedforsecurity=False)
        for name in sorted(files):
            digest.update(name.encode() + files[name])
        self.commits[digest.hexdigest()] = files
        self.refs[ref] = digest.hexdigest()
        return digest.hexdigest()

    def resolve(self, revision: str) -> str | None:
        """The commit of a revision."""
        return self.refs.get(revision, revision if revision in self.commits else None)


class ContentHost(ContentServer):
    """The other host, to which large files are redirected."""

    def __init__(self, contents: dict[str, bytes], address: tuple[str, int]) -> None:
        super().__init__(address)
        self._contents = contents

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        if parts.query != SIGNATURE:
            answer(handler, 403, b"")
            return
        path = unquote(parts.path).lstrip("/")
        self.send_content(handler, path.split("/", 1)[1], self._contents[path])


class HubServer(ContentServer):
    """The Hub."""

    def __init__(
        self, address: tuple[str, int] = ("127.0.0.1", 0), content_address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        super().__init__(address)
        self.repositories: dict[str, Repository] = {}
        self._contents: dict[str, bytes] = {}
        self.host = ContentHost(self._contents, content_address)

    def add(self, name: str, files: dict[str, bytes]) -> Repository:
        """Adds a repository with one commit."""
        self.repositories[name] = Repository()
        self.repositories[name].commit(files)
        return self.repositories[name]

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        path = unquote(parts.path).lstrip("/")
        is_api = path.startswith("api/models/")
        organisation, name, kind, rest = path.removeprefix("api/models/").split("/", 3)
        repository = self.repositories.get(f"{organisation}/{name}")
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.is_private and token not in (repository.readers or ())):
            # As the Hub does: 401 to strangers, so that nobody learns which private ones there are.
            refuse(handler, "RepoNotFound", 404 if token else 401)
        elif is_api and kind == "revision":
            self._describe(handler, f"{organisation}/{name}", repository, rest)
        elif is_api and kind == "tree":
            self._list(handler, repository, rest, parse_qs(parts.query))
        elif kind == "resolve":
            if repository.readers is not None and token not in repository.readers:
                refuse(handler, "GatedRepo", 403 if token else 401)
            else:
                self._resolve(handler, repository, *rest.split("/", 1))
        else:
            answer(handler, 404, b"")

    def _describe(self, handler: BaseHTTPRequestHandler, name: str, repository: Repository, revision: str) -> None:
        commit = repository.resolve(revision)
        if commit is None:
            refuse(handler, "RevisionNotFound")
            return
        siblings = [
            {"rfilename": path, "size": len(content), "blobId": blob_id(content)}
            | ({"lfs": {"sha256": sha256(content), "size": len(content), "pointerSize": 130}} if is_lfs(path) else {})
            for path, content in repository.commits[commit].items()
        ]
        answer_json(handler, {"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _list(self, handler: BaseHTTPRequestHandler, repository: Repository, rest: str, query: dict[str, Any]) -> None:
        commit = repository.resolve(rest.split("/", 1)[0])
        if commit is None:
            refuse(handler, "RevisionNotFound")
            return
        answer_json(
            handler,
            [
                {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
                | ({"lfs": {"oid": sha256(content), "size": len(content), "pointerSize": 130}} if is_lfs(path) else {})
                for path, content in repository.commits[commit].items()
            ],
        )

    def _resolve(self, handler: BaseHTTPRequestHandler, repository: Repository, revision: str, path: str) -> None:
        commit = repository.resolve(revision)
        content = repository.commits.get(commit or "", {}).get(path)
        if commit is None or content is None:
            refuse(handler, "RevisionNotFound" if commit is None else "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit}
        if is_lfs(path):
            self._contents[f"{commit}/{path}"] = content
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{sha256(content)}"'}
            location = {"Location": f"{self.host.url}/{commit}/{path}?{SIGNATURE}"}
            answer(handler, 302, b"", headers | linked | location)
        else:
            self.send_content(handler, path, content, headers | {"ETag": f'"{blob_id(content)}"'})


def refuse(handler: BaseHTTPRequestHandler, code: str, status: int | None = None) -> None:
    """Answers with one of the Hub's errors."""
    answer(handler, status or _CODES[code], b"{}", {"X-Error-Code": code, "X-Error-Message": code})


def answer_json(handler: BaseHTTPRequestHandler, document: Any) -> None:
    """Answers with JSON."""
    answer(handler, 200, json.dumps(document).encode(), {"Content-Type": "application/json"})


def is_lfs(path: str) -> bool:
    """Whether the Hub stores a file as a large one."""
    return path.endswith(LFS)


def blob_id(content: bytes) -> str:
    """Git's checksum of a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def sha256(content: bytes) -> str:
    """The checksum of a large file."""
    return hashlib.sha256(content).hexdigest()
