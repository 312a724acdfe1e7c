"""Helpers of test_data.py: tiny documents, and running the scripts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
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
