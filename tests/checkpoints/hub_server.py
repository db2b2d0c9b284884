"""A stand-in for the model hub on 127.0.0.1, with faults to order.

It answers what huggingface_hub 2.4 asks for: ``/api/models/{id}/revision/{rev}``, ``/api/models/{id}/tree/{rev}`` and
HEAD and GET of ``/{id}/resolve/{rev}/{file}``, with the hub's headers.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = COMMIT
    large: tuple[str, ...] = (".safetensors", ".gguf", ".bin")
    etags: dict[str, str] = field(default_factory=dict)  # lies

    def is_large(self, name: str) -> bool:
        return name.endswith(self.large)

    def etag(self, name: str) -> str:
        data = self.files[name]
        honest = hashlib.sha256(data).hexdigest() if self.is_large(name) else git_sha1(data)
        return self.etags.get(name, honest)


@dataclass
class Fault:
    """What to do wrong, to which requests, how often."""

    kind: str  # status | close | reset | wrong-length | ignore-range | flip | html | loop
    on: str = "/resolve/"
    method: str = "GET"
    times: int = 10**9
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    at: int = 0  # the byte where it happens


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.cdn = False  # large files are redirected to another origin
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.on in path and method == fault.method:
                    fault.times -= 1
                    return fault
        return None

    def count(self, method: str, path: str) -> int:
        return sum(seen.method == method and path in seen.path for seen in self.seen)


@contextmanager
def running() -> Iterator[HubServer]:
    hub = HubServer()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.record = Seen(self.command, path, {k.lower(): v for k, v in self.headers.items()})
        with self.hub.lock:
            self.hub.seen.append(self.record)
        fault = self.hub.fault(self.command, path)
        if fault is not None and fault.kind == "status":
            self.send(fault.status, b"no", fault.headers)
        elif fault is not None and fault.kind == "html":
            self.send(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        elif fault is not None and fault.kind == "loop":
            self.send(302, b"", {"Location": self.path})
        elif path.startswith("/api/models/"):
            self.api(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self.resolve(path.removeprefix("/cdn"), fault, at_cdn=path.startswith("/cdn/"))
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def repo(self, repo_id: str, revision: str) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", repo.commit):
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return repo
        return None

    def api(self, rest: str) -> None:
        what = "/revision/" if "/revision/" in rest else "/tree/"
        if what not in rest:
            rest, what = f"{rest}/revision/main", "/revision/"
        repo_id, _, revision = rest.partition(what)
        if (repo := self.repo(repo_id, revision)) is None:
            return
        if what == "/revision/":
            siblings = [{"rfilename": name} for name in repo.files]
            self.json({"id": repo_id, "modelId": repo_id, "sha": repo.commit, "siblings": siblings})
            return
        tree = []
        for name, data in repo.files.items():
            entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)}
            if repo.is_large(name):
                entry["lfs"] = {"oid": repo.etag(name), "size": len(data), "pointerSize": 134}
            tree.append(entry)
        self.json(tree)

    def resolve(self, path: str, fault: Fault | None, at_cdn: bool) -> None:
        repo_id, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if (repo := self.repo(repo_id, revision)) is None:
            return
        if name not in repo.files:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
            return
        data = repo.files[name]
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{repo.etag(name)}"', "Accept-Ranges": "bytes"}
        if repo.is_large(name):
            headers |= {"X-Linked-Etag": f'"{repo.etag(name)}"', "X-Linked-Size": str(len(data))}
            if self.hub.cdn and not at_cdn:
                # another name of the same machine is another origin
                headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{repo_id}/resolve/{revision}/{name}"
                self.send(302, b"", headers)
                return
        start = 0
        asked = self.headers.get("Range", "")
        kind = fault.kind if fault else ""
        if asked.startswith("bytes=") and kind != "ignore-range":
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if fault is not None and kind == "flip":
            body = body[: fault.at] + bytes([body[fault.at] ^ 1]) + body[fault.at + 1 :]
        if kind == "wrong-length":
            body += b"more"
        self.send(206 if start else 200, body, headers, fault)

    def json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str], fault: Fault | None = None) -> None:
        self.record.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.kind in ("close", "reset"):
            self.wfile.write(body[: fault.at])
            self.wfile.flush()
            self.close_connection = True
            if fault.kind == "reset":  # without the polite end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            return
        self.wfile.write(body)
