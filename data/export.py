"""Documents to shards: blocks of documents are tokenised anywhere and written in the order of the documents.

Every engine runs the same function over the same blocks, and results are taken in the order in which blocks were handed
out; so the bytes do not depend on the engine or on the number of workers. At most a few blocks a worker are under way.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import queue
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import caseops
import documents
import numpy as np
import shards
import tokenizer_build
from documents import Block, Documents
from shards import DataError
from tokenizer_build import TokenizerSpec

IN_FLIGHT_PER_WORKER = 3  # one at work, one waiting, one done while an earlier block is still awaited


class Encoded(NamedTuple):
    """One block after tokenisation; token_bytes are the source bytes of each token where a sidecar is needed."""

    split: str
    docs: int
    tokens: np.ndarray  # (n,) uint16
    token_bytes: np.ndarray | None
    normalised: int  # bytes as the metric counts them
    source: int  # UTF-8 bytes of the documents


# ---------------------------------------------------------------- encoders


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know, small and picklable."""

    kind: str
    model: bytes
    source_name: str
    transform: str | None = None
    normalization: str = ""

    def make_encoder(self) -> ByteEncoder | SentencePieceEncoder:
        if self.kind == "byte":
            return ByteEncoder()
        return CaseOpsEncoder(self.model, self.normalization) if self.transform else SentencePieceEncoder(self.model)


class ByteEncoder:
    """Texts to tokens of the byte tokenizer: each UTF-8 byte plus the four special ids."""

    sidecar_dtype = None

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, None, int]:
        """Tokens of the texts one after the other, each behind a BOS, no sidecar, and their scored bytes."""
        bos = np.array([shards.BOS_ID], dtype=np.uint16)
        rows = ((bos, np.frombuffer(text, dtype=np.uint8).astype(np.uint16) + 4) for text in texts)
        return np.concatenate([part for row in rows for part in row]), None, sum(map(len, texts))


class SentencePieceEncoder:
    """Texts to tokens with a SentencePiece model."""

    sidecar_dtype = None

    def __init__(self, model: bytes) -> None:
        self.tokenizer = tokenizer_build.load_model(model, "tokenizer")
        self.tables = shards.sentencepiece_byte_tables(self.tokenizer)

    def tokens(self, texts: list) -> list[list[int]]:
        return self.tokenizer.encode(texts, num_threads=1)  # the cores are shared out by documents, not inside a text

    @staticmethod
    def join(rows: list[list[int]]) -> np.ndarray:
        """All ids one after the other, (n,) uint16, with a BOS before each row."""
        flat = chain.from_iterable(part for ids in rows for part in ((shards.BOS_ID,), ids))
        return np.fromiter(flat, dtype=np.uint16, count=sum(map(len, rows)) + len(rows))

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, None, int]:
        """Tokens of the texts one after the other, each behind a BOS, no sidecar, and their scored bytes."""
        tokens = self.join(self.tokens(texts))
        return tokens, None, shards.count_bytes(tokens, self.tables)


class CaseOpsEncoder(SentencePieceEncoder):
    """Texts to tokens by way of caseops, with the bytes of the original text for each token."""

    def __init__(self, model: bytes, normalization: str) -> None:
        super().__init__(model)
        self.prepare = tokenizer_build.Preparation(normalization)
        self.case_tables = caseops.token_tables(self.tokenizer)
        self.sidecar_dtype = "uint8" if self.case_tables.lengths.max() <= 255 else "<u2"

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokens of the texts, each behind a BOS; scored bytes of the original for each token; their sum."""
        scored = [self.prepare.normalize(text.decode("utf-8")) for text in texts]
        tokens = self.join(self.tokens([caseops.encode(text) for text in scored]))
        token_bytes = caseops.token_bytes(tokens, self.case_tables)
        expected = sum(len(text.encode("utf-8")) - text.startswith(" ") for text in scored)
        if token_bytes.sum() != expected:
            raise DataError(
                f"tokens stand for {token_bytes.sum()} bytes of {expected}, so bits per byte would be wrong; "
                "the tokenizer does not cover the text: train it with byte_fallback"
            )
        return tokens, token_bytes, expected


def encode_block(encoder: ByteEncoder | SentencePieceEncoder, block: Block, name: str) -> Encoded:
    texts = documents.parse_lines(block, name)
    tokens, token_bytes, normalised = encoder.encode(texts)
    keep = token_bytes if block.split == "val" else None  # only what is scored needs a sidecar
    return Encoded(block.split, block.docs, tokens, keep, normalised, sum(map(len, texts)))


# ---------------------------------------------------------------- engines


def in_order(submit: Callable[[Block], Any], collect: Callable, blocks: Iterable[Block], limit: int) -> Iterator:
    """Results of the blocks in their order, with at most `limit` of them under way or waiting."""
    pending: deque = deque()
    for block in blocks:
        pending.append(submit(block))
        if len(pending) >= limit:
            yield collect(pending.popleft())
    while pending:
        yield collect(pending.popleft())


class SerialEngine:
    """Everything in this process."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.encoder = plan, plan.make_encoder()

    def run(self, blocks: Iterable[Block]) -> Iterator[Encoded]:
        return (encode_block(self.encoder, block, self.plan.source_name) for block in blocks)

    def close(self) -> None:
        pass


def serve(connection: Any, plan: Plan) -> None:
    """A worker process: answers blocks until its connection closes, which the end of the exporter does too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exporter is told as well, and ends us
    encoder = plan.make_encoder()
    while True:
        try:
            block = connection.recv()
            try:
                answer: Encoded | DataError = encode_block(encoder, block, plan.source_name)
            except DataError as error:
                answer = error
            connection.send(answer)
        except (EOFError, OSError):
            return


class ProcessEngine:
    """Worker processes, each behind a pipe of its own, so that none outlives the exporter."""

    def __init__(self, plan: Plan, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.threads, self.idle, self.workers = ThreadPoolExecutor(workers), queue.SimpleQueue(), []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, plan), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
            self.idle.put(ours)

    def run(self, blocks: Iterable[Block]) -> Iterator[Encoded]:
        limit = IN_FLIGHT_PER_WORKER * len(self.workers)
        return in_order(lambda block: self.threads.submit(self.ask, block), Future.result, blocks, limit)

    def ask(self, block: Block) -> Encoded:
        connection = self.idle.get()
        try:
            connection.send(block)
            answer = connection.recv()
        except (EOFError, OSError):
            raise DataError(
                "a tokenising worker died, most likely for want of memory; nothing was changed: "
                "run the command again with fewer --workers"
            ) from None
        finally:
            self.idle.put(connection)
        if isinstance(answer, DataError):
            raise answer
        return answer

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process, connection in self.workers:
            process.terminate()
            process.join()
            connection.close()


RAY_ENCODERS: dict[Plan, Any] = {}  # in a Ray worker process: its encoder, made once


def encode_on_ray(plan: Plan, block: Block) -> Encoded | DataError:
    try:
        if plan not in RAY_ENCODERS:
            RAY_ENCODERS.clear()
            RAY_ENCODERS[plan] = plan.make_encoder()
        return encode_block(RAY_ENCODERS[plan], block, plan.source_name)
    except DataError as error:
        return error


class RayEngine:
    """Tasks on a Ray cluster: the one at `address`, else a local one. Ray repeats the tasks of a worker that dies."""

    def __init__(self, plan: Plan, workers: int, address: str | None) -> None:
        self.ray = documents.optional_module("ray", "ray", "--engine ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send them out by itself
        for module in (shards, caseops, documents, tokenizer_build, sys.modules[__name__]):
            self.ray.cloudpickle.register_pickle_by_value(module)  # the nodes need no copy of these scripts
        options = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            self.ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise DataError(f"--ray-address {address}: cannot join the cluster ({error}); is it running?") from None
        self.plan = self.ray.put(plan)
        self.encode = self.ray.remote(max_retries=-1)(encode_on_ray)

    def run(self, blocks: Iterable[Block]) -> Iterator[Encoded]:
        limit = IN_FLIGHT_PER_WORKER * max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        return in_order(lambda block: self.encode.remote(self.plan, block), self.collect, blocks, limit)

    def collect(self, reference: Any) -> Encoded:
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise DataError(f"Ray could not tokenise a block ({type(error).__name__}); run the command again") from None
        if isinstance(answer, DataError):
            raise answer
        return answer

    def close(self) -> None:
        self.ray.shutdown()


def make_engine(plan: Plan, name: str, workers: int, ray_address: str | None) -> Any:
    if name == "ray":
        return RayEngine(plan, workers, ray_address)
    return SerialEngine(plan) if workers == 1 else ProcessEngine(plan, workers)


# ---------------------------------------------------------------- one variant


class SplitTotals:
    """Shards of one split, and the totals over them."""

    def __init__(self, writer: shards.ShardWriter) -> None:
        self.writer, self.docs, self.normalised, self.source = writer, 0, 0, 0

    def add(self, part: Encoded) -> None:
        self.writer.write(part.tokens, part.token_bytes)
        self.docs += part.docs
        self.normalised += part.normalised
        self.source += part.source

    def stats(self) -> dict[str, int]:
        split, writer = self.writer.split, self.writer
        counts = {"docs": self.docs, "files": len(writer.files), "tokens": writer.tokens}
        sizes = {f"bytes_{split}_normalised": self.normalised, f"bytes_{split}_source": self.source}
        return {**{f"{name}_{split}": count for name, count in counts.items()}, **sizes}


def export_dataset(
    spec: TokenizerSpec, found: Documents, staging: Path, shard_tokens: int, make: Callable[[Plan], Any]
) -> dict:
    """Write both splits of one variant into the staging folder; returns its manifest entry."""
    folder = staging / "datasets" / spec.dataset_name
    folder.mkdir(parents=True)
    model = b"" if spec.kind == "byte" else (staging / spec.path).read_bytes()
    plan = Plan(spec.kind, model, found.source.name, spec.transform, spec.normalization)
    sidecar_dtype = plan.make_encoder().sidecar_dtype
    totals = {
        "val": SplitTotals(shards.ShardWriter(folder, "val", shard_tokens, sidecar_dtype)),
        "train": SplitTotals(shards.ShardWriter(folder, "train", shard_tokens)),
    }
    sha256 = write_all(plan, make, found, totals, spec.variant)
    stats = totals["val"].stats() | totals["train"].stats()
    if sha256 != found.docs_sha256 or stats["docs_val"] + stats["docs_train"] != found.num_docs:
        raise DataError(f"{found.source.name}: sha256 {sha256}, but {found.docs_sha256} before; it changed: run again")
    writers = [total.writer for total in totals.values()]
    entry = {"name": spec.dataset_name, "tokenizer_name": spec.name, "path": f"datasets/{spec.dataset_name}"}
    if sidecar_dtype:
        sidecar = {"suffix": shards.SIDECAR_SUFFIX, "dtype": {"<u2": "uint16"}.get(sidecar_dtype, sidecar_dtype)}
        sidecar_files = [file for writer in writers for file in writer.sidecars]
        entry |= {"transform": spec.transform, "bytes_sidecar": sidecar, "sidecars": sidecar_files}
    files = [file for writer in writers for file in writer.files]
    split = {"unofficial_split": found.unofficial_split, "splits": found.splits}
    entry |= {"vocab_size": spec.vocab_size, "docs_sha256": found.docs_sha256}
    return {**entry, **split, "stats": stats, "files": files}


def write_all(
    plan: Plan, make: Callable[[Plan], Any], found: Documents, totals: dict[str, SplitTotals], name: str
) -> str:
    """All documents into the shards; returns the sha256 of what was read, which need not be what was found before."""
    from tqdm import tqdm

    engine, digest = make(plan), hashlib.sha256()

    def blocks() -> Iterator[Block]:
        for block in found.source.blocks(found.docs_val):
            digest.update(block.lines)
            yield block

    try:
        with tqdm(total=found.num_docs, desc=name, unit="doc", disable=None) as bar:
            for part in engine.run(blocks()):
                totals[part.split].add(part)
                bar.update(part.docs)
        for total in totals.values():
            total.writer.close()
    finally:
        engine.close()
    return digest.hexdigest()
