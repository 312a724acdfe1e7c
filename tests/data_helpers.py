"""Helpers of test_data.py: tiny documents, running the scripts, and a local stand-in for the Hugging Face hub."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
DATA = PROJECT / "data"
GOLDEN = Path(__file__).resolve().parent / "golden"
WORDS = (
    "the a cat tree river stone walks under bright and old winter sings 42 caf\u00e9 na\u00efve \ufb01ne \u00bd".split()
)


def run_script(name: str, *args: object, **environment: str) -> subprocess.CompletedProcess:
    """Run data/NAME.py as a user would, from the project root."""
    command = [sys.executable, str(DATA / f"{name}.py"), *map(str, args)]
    env = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=env, timeout=120, check=False)


def assert_refused(result: subprocess.CompletedProcess, *parts: str) -> None:
    """Exit code 2, no traceback, and one message that holds all the parts."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Sentences with the usual troubles: double and leading spaces, newlines, ligatures, a NUL, an empty one."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(5, 120))) for _ in range(count)]
    texts[1:6] = [
        "  leading  and double",
        "a\0b nul",
        "line\n\nbreaks\tand tabs",
        "",
        "\u65e5\u672c\u8a9e \U0001f642 end ",
    ]
    return texts[:count]


def write_docs(folder: Path, texts: list[str], docs_val: int, **sidecar: object) -> Path:
    """docs_selected.jsonl and its sidecar, whose fields can be falsified."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "docs_selected.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    truth = {"num_docs": len(texts), "docs_val": docs_val, "docs_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    sidecar_path = folder / "docs_selected.source_manifest.json"
    sidecar_path.write_text(json.dumps({**truth, "shuffle_seed": 7, **sidecar}))
    return path


def write_specs(path: Path, vocab_size: int = 320, **more: object) -> Path:
    spec = {"name": f"sp_bpe_{vocab_size}", "kind": "sentencepiece", "vocab_size": vocab_size, **more}
    path.write_text(json.dumps({"tokenizers": [spec]}))
    return path


def shard_bytes(tokens: list[int], claimed: int | None = None) -> bytes:
    """A shard written independently of the code under test."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens) if claimed is None else claimed
    return header.tobytes() + np.array(tokens, dtype="<u2").tobytes()


def read_split(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split, read independently of the code under test."""
    parts = []
    for path in sorted(folder.glob(f"fineweb_{split}_*.bin")):
        raw = path.read_bytes()
        header = np.frombuffer(raw[:1024], dtype="<i4")
        assert list(header[:2]) == [20240520, 1] and not header[3:].any()
        parts.append(np.frombuffer(raw[1024:], dtype="<u2"))
        assert len(parts[-1]) == header[2]
    return np.concatenate(parts)


def snapshot(folder: Path) -> dict[str, str]:
    """Hash of every file under folder by relative path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class FakeHub:
    """Serves files as the hub does: `throttle[path]` answers 429 so often, `cut[path]` sends half so often."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.throttle: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.requests: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler: http.server.BaseHTTPRequestHandler, with_body: bool) -> None:
        path = handler.path.removeprefix("/datasets/").replace("/resolve/main", "")
        self.requests.append(f"{handler.command} {path}")
        body = self.files.get(path)
        if self.throttle[path] > 0:
            self.throttle[path] -= 1
            self.send(handler, 429, {"Retry-After": "0"}, b"")
        elif body is None:
            self.send(handler, 404, {"X-Error-Code": "EntryNotFound"}, b"")
        else:
            if self.cut[path] > 0:
                self.cut[path] -= with_body
                body = body[: len(body) // 2]
            etag = hashlib.sha256(body).hexdigest()
            self.send(
                handler, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": "a" * 40}, body if with_body else b"", len(body)
            )

    @staticmethod
    def send(handler: http.server.BaseHTTPRequestHandler, code: int, headers: dict, body: bytes, size: int = 0) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        handler.wfile.write(body)

    def publish(self, repo: str, variant: str, train: list[int], val: list[int], root: str = "datasets") -> dict:
        """Add a variant with one shard of each given length; returns the repository's manifest."""
        model = (GOLDEN / "tokenizer_512.model").read_bytes()
        name, stem = f"fineweb10B_{variant}", f"fineweb_{variant[2:]}_bpe"
        self.files[f"{repo}/{root}/tokenizers/{stem}.model"] = model
        self.files[f"{repo}/{root}/tokenizers/{stem}.vocab"] = b"piece\t0\n"
        stats = {}
        for split, lengths in (("train", train), ("val", val)):
            stats |= {f"files_{split}": len(lengths), f"tokens_{split}": sum(lengths)}
            for index, length in enumerate(lengths):
                shard = f"{repo}/{root}/datasets/{name}/fineweb_{split}_{index:06d}.bin"
                self.files[shard] = shard_bytes([(index * 7 + i) % 512 for i in range(length)])
        path = f"{repo}/{root}/manifest.json"
        manifest = json.loads(self.files.get(path, b'{"version": "10B", "datasets": [], "tokenizers": []}'))
        paths = {"model_path": f"tokenizers/{stem}.model", "vocab_path": f"tokenizers/{stem}.vocab"}
        manifest["tokenizers"].append({"name": f"sp_bpe_{variant[2:]}", "vocab_size": 512, **paths})
        manifest["datasets"].append({"name": name, "tokenizer_name": f"sp_bpe_{variant[2:]}", "stats": stats})
        self.files[path] = json.dumps(manifest).encode()
        return manifest

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
