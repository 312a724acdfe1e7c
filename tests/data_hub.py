"""A local stand-in for the Hugging Face hub: data sets over HTTP, with faults on demand, and uploads.

It plays what huggingface_hub asks for: files (large ones redirected to a second host name, as the real hub does), Range
requests, the file tree, and for uploads the creation of repositories, pre-upload, LFS batch, LFS content and commits.
It does not play the xet protocol; publish with HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import numpy as np
from data_helpers import GOLDEN, shard_bytes

COMMIT = "a" * 40
LARGE = (".bin", ".model", "docs_selected.jsonl")  # kept apart, with a sha256 in the file tree; others are plain git
FAULTS = "throttle error disconnect truncate wrong_size stall corrupt ignore_range".split()


@dataclass(frozen=True)
class Request:
    """One request for a file: method, repo/path, first byte asked for, whether it brought a token, body bytes sent."""

    method: str
    path: str
    start: int
    had_token: bool
    sent: int


class LocalHub:
    """`files` is what it serves, by OWNER/NAME/path. `faults[path]` is a queue, one taken for each GET of that file."""

    def __init__(self, stall_seconds: float = 30.0, page: int = 1000) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.injected: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.calls: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.digests: dict[str, tuple[bytes, str]] = {}
        self.stall_seconds, self.page, self.retry_after = stall_seconds, page, "0"
        self.has_tree, self.commit, self.private = True, COMMIT, False
        self.refused_puts: list[int] = []
        self.closing = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.store = f"http://localhost:{self.server.server_port}/store"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def publish(self, repo: str, variant: str, train: list[int], val: list[int], root: str = "datasets") -> dict:
        """Add a variant with one shard of each given length in tokens; returns the repository's manifest."""
        name, stem = f"fineweb10B_{variant}", f"fineweb_{variant[2:]}_bpe"
        self.files[f"{repo}/{root}/tokenizers/{stem}.model"] = (GOLDEN / "tokenizer_512.model").read_bytes()
        self.files[f"{repo}/{root}/tokenizers/{stem}.vocab"] = b"piece\t0\n"
        stats = {}
        for split, lengths in (("train", train), ("val", val)):
            stats |= {f"files_{split}": len(lengths), f"tokens_{split}": sum(lengths)}
            for index, length in enumerate(lengths):
                tokens = np.random.default_rng([index, split == "val"]).integers(0, 512, length)
                self.files[f"{repo}/{root}/datasets/{name}/fineweb_{split}_{index:06d}.bin"] = shard_bytes(tokens)
        path = f"{repo}/{root}/manifest.json"
        manifest = json.loads(self.files.get(path, b'{"version": "10B", "datasets": [], "tokenizers": []}'))
        paths = {"model_path": f"tokenizers/{stem}.model", "vocab_path": f"tokenizers/{stem}.vocab"}
        manifest["tokenizers"].append({"name": f"sp_bpe_{variant[2:]}", "vocab_size": 512, **paths})
        manifest["datasets"].append({"name": name, "tokenizer_name": f"sp_bpe_{variant[2:]}", "stats": stats})
        self.files[path] = json.dumps(manifest).encode()
        return manifest

    def digest(self, path: str) -> str:
        """sha256 of a file, computed once for each content."""
        body = self.files[path]
        held, digest = self.digests.get(path, (None, ""))
        if held is not body:
            digest = hashlib.sha256(body).hexdigest()
            self.digests[path] = body, digest
        return digest

    def sent_bytes(self, path: str = "") -> int:
        return sum(request.sent for request in self.requests if path in request.path)

    def gets(self, path: str = "") -> list[Request]:
        return [request for request in self.requests if path in request.path and request.method == "GET"]

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection; `hub` is set by LocalHub."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *args: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client left; tests are about what it does then
            super().handle()

    def do_HEAD(self) -> None:
        self.route(self.path)

    def do_GET(self) -> None:
        self.route(self.path)

    # ------------------------------------------------------------ files

    def route(self, target: str) -> None:
        url = urlsplit(target)
        path = unquote(url.path)
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(f"{found[1]}/{found[3]}")
        elif path.startswith("/store/"):
            self.send_file(path.removeprefix("/store/"))
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", path):
            self.tree(found[1], found[3], url.query)
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/revision/.+)?", path):
            self.json(200, {"id": found[1], "sha": self.hub.commit, "private": False, "tags": [], "siblings": []})
        else:
            self.reply(404, {"X-Error-Code": "RepoNotFound"})

    def resolve(self, path: str) -> None:
        """The hub's own answer: large files are elsewhere, small ones are sent at once."""
        body = self.hub.files.get(path)
        commit = {"X-Repo-Commit": self.hub.commit} if self.hub.commit else {}
        if self.hub.private and "Authorization" not in self.headers:
            self.note(path, 0)
            self.reply(401, {"X-Error-Code": "RepoNotFound"})
        elif body is None:
            self.note(path, 0)
            known = any(name.startswith("/".join(path.split("/")[:2]) + "/") for name in self.hub.files)
            self.reply(404, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})
        elif path.endswith(LARGE):
            linked = {"X-Linked-Size": str(len(body)), "X-Linked-ETag": f'"{self.hub.digest(path)}"'}
            self.reply(302, {**commit, **linked, "Location": f"{self.hub.store}/{path}?signature=confidential"})
        else:
            self.send_file(path, commit)

    def send_file(self, path: str, headers: dict[str, str] | None = None) -> None:
        body = self.hub.files[path]
        etag = {"ETag": f'"{self.hub.digest(path)}"', **(headers or {})}
        if self.command == "HEAD":
            self.reply(200, {**etag, "Content-Length": str(len(body))})
            return
        fault = self.hub.faults[path].pop(0) if self.hub.faults[path] else ""
        self.hub.injected.update([fault] if fault else [])
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and fault != "ignore_range" else 0
        if fault in ("throttle", "error"):
            self.note(path, start)
            self.reply(429 if fault == "throttle" else 503, {"Retry-After": self.hub.retry_after})
        elif start > len(body) or (asked and start == len(body)):
            self.note(path, start)
            self.reply(416, {"Content-Range": f"bytes */{len(body)}"})
        else:
            self.send_body(path, body, start, fault, etag)

    def send_body(self, path: str, body: bytes, start: int, fault: str, headers: dict[str, str]) -> None:
        """The file from `start` on, with a fault on the way. Sleeping stands for a connection that hangs."""
        part, size = memoryview(body)[start:], len(body)
        if fault == "truncate":  # half a file that says it is a whole one
            part, size = part[: len(part) // 2], start + len(part) // 2
        if fault == "wrong_size":
            part, size = memoryview(bytes(part) + b"more"), size + 4
        if fault == "corrupt":
            wrong = bytearray(part)
            wrong[len(wrong) // 2] ^= 255
            part = memoryview(wrong)
        sent = len(part) // 2 if fault in ("disconnect", "stall") else len(part)
        self.note(path, start, sent if fault != "trickle" else 0)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{size}")
        for name, value in {**headers, "Content-Length": str(len(part))}.items():
            self.send_header(name, value)
        self.end_headers()
        if fault == "trickle":
            self.trickle(part)
            return
        self.wfile.write(part[:sent])
        if fault == "stall":
            self.hub.closing.wait(self.hub.stall_seconds)
        if sent < len(part):
            self.hang_up()

    def trickle(self, part: memoryview) -> None:
        """One byte at a time, for ever: never silent, never done."""
        self.close_connection = True
        for index in range(len(part)):
            self.wfile.write(part[index : index + 1])
            if self.hub.closing.wait(0.02):
                return

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_WR)  # what was sent still arrives
        time.sleep(0.01)

    def note(self, path: str, start: int, sent: int = 0) -> None:
        self.hub.requests.append(Request(self.command, path, start, "Authorization" in self.headers, sent))

    def reply(self, code: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, code: int, value: object, headers: dict[str, str] | None = None) -> None:
        self.reply(code, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def tree(self, repo: str, folder: str, query: str) -> None:
        """Files (and at the top also folders) under a folder, in pages."""
        self.hub.calls.append(f"tree {folder}")
        prefix = f"{repo}/{folder}/" if folder else f"{repo}/"
        names = sorted(name for name in self.hub.files if name.startswith(prefix))
        if not self.hub.has_tree or not names:
            self.reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        rows = [self.tree_row(repo, name) for name in names]
        if "recursive=true" not in query.lower():
            tops = sorted({name.removeprefix(prefix).split("/")[0] for name in names})
            rows = [{"type": "directory", "path": top, "oid": "0" * 40, "size": 0} for top in tops]
        first = int(found[1]) if (found := re.search(r"cursor=(\d+)", query)) else 0
        last = first + self.hub.page
        query = re.sub(r"&?cursor=\d+", "", query)
        link = f'<{self.hub.endpoint}{urlsplit(self.path).path}?{query}&cursor={last}>; rel="next"'
        self.json(200, rows[first:last], {"Link": link} if last < len(rows) else {})

    def tree_row(self, repo: str, name: str) -> dict:
        body = self.hub.files[name]
        row = {"type": "file", "path": name.removeprefix(f"{repo}/"), "size": len(body), "oid": "0" * 40}
        if name.endswith(LARGE):
            digest = self.hub.digest(name)
            row["lfs"] = {"oid": digest, "size": len(body), "pointerSize": 100}
        return row

    # ------------------------------------------------------------ uploads

    def do_PUT(self) -> None:
        """The content of a large file, named by its hash."""
        body = self.body()
        oid = self.path.rpartition("/")[2]
        refused = self.hub.calls.count("put") in self.hub.refused_puts and "refused" not in self.hub.calls
        right = hashlib.sha256(body).hexdigest() == oid and not refused
        self.hub.calls.append("refused" if refused else "put")
        if right:
            self.hub.objects[oid] = body
        self.reply(200 if right else 403, {})

    def do_POST(self) -> None:
        body, path = self.body(), unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.hub.calls.append(
                f"create {asked['organization']}/{asked['name']} {asked.get('visibility') or asked.get('private')}"
            )
            self.json(200, {"url": f"{self.hub.endpoint}/datasets/{asked['organization']}/{asked['name']}"})
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/preupload/[^/]+", path):
            self.json(200, {"files": [self.upload_mode(found[1], row) for row in json.loads(body)["files"]]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            places = [self.upload_place(row) for row in json.loads(body)["objects"]]
            self.json(200, {"transfer": "basic", "objects": places})
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/commit/[^/]+", path):
            self.apply_commit(found[1], body)
        else:
            self.reply(404, {})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def upload_mode(self, repo: str, row: dict) -> dict:
        large = row["path"].endswith(LARGE)
        name = f"{repo}/{row['path']}"
        oid = self.hub.digest(name) if large and name in self.hub.files else None
        return {"path": row["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def upload_place(self, row: dict) -> dict:
        place = {"actions": {"upload": {"href": f"{self.hub.endpoint}/upload/{row['oid']}"}}}
        return {**row, **({} if row["oid"] in self.hub.objects else place)}

    def apply_commit(self, repo: str, body: bytes) -> None:
        """Store the files of a commit; large ones must have been uploaded before."""
        rows = [json.loads(line) for line in body.splitlines()]
        paths = [row["value"]["path"] for row in rows if row["key"] != "header"]
        self.hub.calls.append(f"commit {' '.join(paths)}")
        for row in rows:
            name = f"{repo}/{row['value'].get('path')}"
            if row["key"] == "file":
                self.hub.files[name] = base64.b64decode(row["value"]["content"])
            elif row["key"] == "lfsFile":
                self.hub.files[name] = self.hub.objects[row["value"]["oid"]]
        url = f"{self.hub.endpoint}/datasets/{repo}/commit/{COMMIT}"
        self.json(200, {"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None})
