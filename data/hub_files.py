"""Files of a Hugging Face data set over HTTP: where they are, and fetching them until they are whole.

huggingface_hub builds the addresses and lists files, and its HTTP session (requests in 0.x, httpx later) carries the
bytes. The bytes are read here rather than by hf_hub_download, which starts an interrupted file again in some versions,
waits for ever on a trickle, hides its own retries, and shows a bar per file. Nothing here runs at import, and
huggingface_hub is imported when the first byte is needed.
"""

from __future__ import annotations

import argparse
import email.utils
import errno
import itertools
import os
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import shards
from shards import DamagedFileError, DataError

DEFAULT_REPOSITORIES = {
    "sp1024": "willdepueoai/parameter-golf",
    "sp4096": "kevclark/parameter-golf",
    "sp8192": "kevclark/parameter-golf",
}
DEFAULT_REMOTE_ROOT, DEFAULT_REVISION = "datasets", "main"
DEFAULT_WORKERS, DEFAULT_STALL_SECONDS = 4, 30.0
REPOSITORY_VARIABLE, REMOTE_ROOT_VARIABLE = "MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
TOKEN_VARIABLES = "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"
MAX_ATTEMPTS = 7  # in a row without a new byte
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
LONGEST_NAMED_WAIT_SECONDS = 900.0  # the hub counts requests in windows of five minutes
STALL_BYTES_PER_SECOND = 1000  # less than this is no download
MAX_LISTED_FILES = 100_000
BLOCK_BYTES = 1 << 16
LINE_SECONDS = 10.0
DISK_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO


class NetworkError(DataError):
    """The network or the server failed too often; the same command may succeed later."""

    exit_code = 1


class MissingError(DataError):
    """The server says that there is no such thing, or not for us."""


class RetryError(Exception):
    """An attempt failed in a way that may pass by itself.

    seconds: how long the server asks to wait, if it does. damaged: what came is not what should come.
    """

    def __init__(self, problem: str, seconds: float | None = None, damaged: bool = False) -> None:
        super().__init__(problem)
        self.seconds, self.damaged = seconds, damaged


# ---------------------------------------------------------------- where the data come from


@dataclass(frozen=True)
class Repository:
    """Place of the published data: a Hugging Face data set, a folder in it and a branch, tag or commit."""

    repo_id: str
    remote_root: str
    revision: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id, re.ASCII):
            raise DataError(f"repository {self.repo_id!r} must have the form OWNER/NAME")
        if {"", ".", ".."} & set(self.remote_root.split("/")) and self.remote_root:
            raise DataError(
                f"remote root {self.remote_root!r} must be a plain folder path such as {DEFAULT_REMOTE_ROOT}"
            )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, variant: str) -> Repository:
        """Options first, then the environment, then the variant's own default."""
        repo_id = args.repo_id or os.environ.get(REPOSITORY_VARIABLE) or DEFAULT_REPOSITORIES.get(variant)
        if not repo_id:
            raise DataError(
                f"no default repository has {variant} (known: {', '.join(DEFAULT_REPOSITORIES)}); name one with "
                "--repo-id, or build the variant with download_hf_docs_and_tokenize.py"
            )
        root = args.remote_root
        if root is None:
            root = os.environ.get(REMOTE_ROOT_VARIABLE, DEFAULT_REMOTE_ROOT)
        return cls(repo_id, root.strip("/"), args.revision)

    def remote_path(self, relative: str) -> str:
        return f"{self.remote_root}/{relative}" if self.remote_root else relative

    def __str__(self) -> str:
        return f"{self.repo_id} (folder {self.remote_root or '.'}, revision {self.revision})"


def add_repository_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repo-id", help=f"Hugging Face data set OWNER/NAME (or {REPOSITORY_VARIABLE}; default by variant)"
    )
    parser.add_argument(
        "--remote-root", help=f"folder inside it (or {REMOTE_ROOT_VARIABLE}; default {DEFAULT_REMOTE_ROOT})"
    )
    parser.add_argument("--revision", default=DEFAULT_REVISION, help="branch, tag or commit (default %(default)s)")


@dataclass(frozen=True)
class WantedFile:
    """A file to have at data_dir/relative; size in bytes and sha256 are None where nobody gives them."""

    relative: str
    size: int | None = None
    sha256: str | None = None
    check_more: Callable[[Path], object] | None = None

    def check(self, path: Path, with_hash: bool = True) -> None:
        """DamagedFileError unless the file at path is whole."""
        size = path.stat().st_size
        if size == 0 or self.size not in (None, size):
            raise DamagedFileError(f"{path}: {size} bytes instead of {self.size or 'some'}; fetch it again")
        try:
            if self.check_more:
                self.check_more(path)
        except DataError as error:
            raise DamagedFileError(str(error)) from None
        if with_hash and self.sha256 and (found := shards.sha256_file(path)) != self.sha256:
            raise DamagedFileError(f"{path}: sha256 {found}, but it should be {self.sha256}; fetch it again")


# ---------------------------------------------------------------- progress


class Progress:
    """Bytes, rate and time left of all files together: one bar in a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self.total = self.done = self.fetched = self.fetched_before = 0
        self.started = self.last_line = time.monotonic()
        self.bar = None
        self.lock = threading.Lock()

    def start(self, total: int, done: int) -> None:
        """Begin counting: `total` bytes to have (0: unknown), of which `done` are here already."""
        self.total, self.done, self.fetched_before = total, done, self.fetched
        self.started = self.last_line = time.monotonic()
        if sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:  # 0 in some containers
            try:
                from tqdm import tqdm
            except ImportError:
                return
            look = {"unit": "B", "unit_scale": True, "dynamic_ncols": True}
            self.bar = tqdm(total=total or None, initial=done, desc="fetching", **look)

    def add(self, size: int) -> None:
        """Bytes that arrived, or (negative) that were thrown away."""
        with self.lock:
            self.done += size
            self.fetched += max(size, 0)
            if self.bar is not None:
                self.bar.update(size)
            elif time.monotonic() - self.last_line >= LINE_SECONDS:
                self.last_line = time.monotonic()
                print(self.line(), flush=True)

    def line(self) -> str:
        rate = (self.fetched - self.fetched_before) / max(time.monotonic() - self.started, 1e-9)
        left = int(max(self.total - self.done, 0) / rate) if rate else 0
        eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s, ETA {eta}"

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        with self.lock:
            if self.bar is not None:
                self.bar.write(text, file=sys.stdout)
            else:
                print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


# ---------------------------------------------------------------- errors of the network


def access_token() -> str | bool:
    """The token of the environment; False, which keeps huggingface_hub from looking for a stored one, when unset."""
    token = next(filter(None, (os.environ.get(name, "").strip() for name in TOKEN_VARIABLES)), "")
    if token and not re.fullmatch(r"[!-~]+", token):
        raise DataError("the token in HF_TOKEN holds blanks or other characters that no token has; set it again")
    return token or False


def endpoint() -> str | None:
    """Address of another hub, a mirror for example, from HF_ENDPOINT; None for huggingface_hub's own."""
    address = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    if address and not re.match(r"https?://[^/]", address):
        raise DataError(f"HF_ENDPOINT {address!r} is no address such as https://huggingface.co; mend it or unset it")
    return address or None


def describe(error: BaseException) -> str:
    """An error in a few words, without the token and without the query of an address, which may be a signature."""
    name = type(error).__name__
    if "timeout" in name.lower():
        return f"stalled ({name})"
    text = re.sub(r"\?\S+", "", str(error).partition("\n")[0])
    token = access_token()
    return f"{name}: {text.replace(token, '***') if token else text}"[:200]


def named_wait(headers: object) -> float | None:
    """Seconds that the server asks to wait: Retry-After as seconds or a date, else the hub's RateLimit window."""
    value = str(headers.get("Retry-After") or "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        window = re.search(r"\bt=(\d+)", str(headers.get("RateLimit") or ""))
        return float(window[1]) if window else None


def check_status(status: int, headers: object, what: str) -> None:
    """Raise DataError for an answer that will not change, RetryError for one that may; return for the rest."""
    code = str(headers.get("X-Error-Code") or "")
    if status == 403 and not code:  # a signed address of the store behind the hub ran out; ask for a new one
        raise RetryError("address refused (HTTP 403)")
    if status in (401, 403):
        raise MissingError(f"{what} does not exist or needs a token in HF_TOKEN (HTTP {status} {code})")
    if status in (404, 410):
        raise MissingError(f"{what} is missing (HTTP {status} {code})")
    if status == 429:
        raise RetryError("throttled (HTTP 429)", named_wait(headers))
    if status == 408 or status >= 500:
        raise RetryError(f"server in trouble (HTTP {status})", named_wait(headers))
    if status >= 400 and status != 416:
        raise DataError(f"{what}: the server refuses (HTTP {status} {code})")


def check_worth_retrying(error: Exception, what: str) -> None:
    """Raise what an error of huggingface_hub's own functions amounts to.

    A 429 sometimes arrives dressed as a missing file, so the cause's answer counts before the error's own type.
    """
    if getattr(error, "errno", None) in DISK_ERRORS:
        raise error
    for cause in (error, error.__cause__, error.__context__):
        response = getattr(cause, "response", None)
        if response is not None:
            check_status(response.status_code, response.headers, what)
    if isinstance(error, (ValueError, TypeError)) and not isinstance(error, FileNotFoundError):
        raise DataError(f"{what}: {describe(error)}") from None  # a bad name or setting
    raise RetryError(describe(error)) from None


# ---------------------------------------------------------------- one attempt over plain HTTP


def open_url(url: str, headers: dict[str, str], seconds: float) -> tuple[object, Iterator[bytes]]:
    """An answer and its undecoded blocks as they arrive; `seconds` without a byte end the wait."""
    from huggingface_hub.utils import get_session

    session = get_session()
    try:
        if hasattr(session, "build_request"):  # httpx; below, requests. Both drop the token when redirected elsewhere
            request = session.build_request("GET", url, headers=headers, timeout=seconds)
            response = session.send(request, stream=True, follow_redirects=True)
            return response, response.iter_raw()
        response = session.get(url, headers=headers, timeout=seconds, stream=True)
        read = getattr(response.raw, "read1", response.raw.read)  # read would wait for a whole block on a trickle
        return response, iter(lambda: read(BLOCK_BYTES, decode_content=False), b"")
    except Exception as error:  # noqa: BLE001 (the clients' errors share no useful base)
        raise RetryError(describe(error)) from None


def guarded(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks, with the HTTP client's errors turned into RetryError."""
    while True:
        try:
            block = next(blocks, None)
        except Exception as error:  # noqa: BLE001
            raise RetryError(describe(error)) from None
        if block is None:
            return
        yield block


def body_range(response: object, offset: int) -> tuple[int, int | None]:
    """(first byte, size of the whole file or None) that an answer to a request from `offset` on brings."""
    length = response.headers.get("Content-Length")
    if response.status_code != 206:
        return 0, int(length) if length and length.isdecimal() else None
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if not found or int(found[1]) != offset:
        raise RetryError("the server sent another part than asked for")
    return offset, None if found[2] == "*" else int(found[2])


# ---------------------------------------------------------------- the hub


class Hub:
    """A connection to one repository. `commit` is the revision to fetch from; `retries` counts repeated attempts."""

    def __init__(
        self,
        repository: Repository,
        workers: int = DEFAULT_WORKERS,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
        transport: str = "plain",
    ) -> None:
        self.repository, self.workers, self.stall_seconds = repository, workers, stall_seconds
        self.attempt = {"plain": self.stream, "xet": self.fetch_with_client}[transport]
        self.commit = repository.revision
        self.progress, self.retries = Progress(), 0
        self.stop, self.not_before = threading.Event(), 0.0

    def fetch(self, file: WantedFile, part: Path) -> None:
        """Have the whole, checked file at `part`, continuing what is there and trying again after trouble."""
        failures, furthest = 0, 0
        while True:
            try:
                self.pause(self.not_before - time.monotonic())
                self.attempt(file, part)
                file.check(part)
                return
            except DamagedFileError as error:
                words = str(error).removeprefix(f"{part}: ").removesuffix("; fetch it again")
                problem, reached = RetryError(f"arrived damaged ({words})", damaged=True), furthest
                self.discard(part)
            except RetryError as error:
                problem, reached = error, part.stat().st_size if part.exists() else 0
            failures = 0 if reached > furthest else failures + 1 + problem.damaged  # those cost a whole file each
            furthest = max(furthest, reached)
            self.back_off(problem, failures, file.relative)

    def back_off(self, problem: RetryError, failures: int, what: str) -> None:
        """Wait before the next attempt, as long as the server asks, or twice as long each time, with jitter."""
        if failures >= MAX_ATTEMPTS or (problem.seconds or 0) > LONGEST_NAMED_WAIT_SECONDS:
            asked = f", and the server asks to wait {problem.seconds:.0f} s" if problem.seconds else ""
            if problem.damaged:
                raise DamagedFileError(f"{what}: again and again: {problem}; report it to the publisher")
            raise NetworkError(
                f"{what}: gave up after {failures} attempts without a new byte{asked}; the last one: {problem}. It may "
                "exist; run the command again later, it continues where this ended"
            )
        seconds = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**failures)
        seconds = (seconds if problem.seconds is None else problem.seconds) * random.uniform(1.0, 1.25)
        self.retries += 1
        self.progress.say(f"{what}: {problem}; trying again in {seconds:.1f} s")
        if problem.seconds is not None:  # it is the address that is throttled, not the file
            self.not_before = max(self.not_before, time.monotonic() + seconds)
        self.pause(seconds)

    def pause(self, seconds: float) -> None:
        if self.stop.wait(max(0.0, seconds)):
            raise DataError("stopped, since another file failed")

    def discard(self, part: Path) -> None:
        """Remove a partial file, and take its bytes off the progress."""
        if part.exists():
            self.progress.add(-part.stat().st_size)
            part.unlink()

    def stream(self, file: WantedFile, part: Path) -> None:
        """One attempt over plain HTTP: a Range request continues `part` where it ends."""
        offset = part.stat().st_size if part.exists() else 0
        if file.size is not None and offset >= file.size:
            return  # whole, or too long: the check decides
        headers = {**self.headers(), **({"Range": f"bytes={offset}-"} if offset else {})}
        response, blocks = open_url(self.url(file), headers, self.stall_seconds)
        try:
            check_status(response.status_code, response.headers, f"{file.relative} in {self.repository}")
            self.note_commit(response)
            if response.status_code == 416:  # nothing from here on: the file is whole, or longer than it should be
                if response.headers.get("Content-Range") != f"bytes */{offset}":
                    raise DamagedFileError(f"{part}: longer than the file on the server; fetch it again")
                return
            start, size = body_range(response, offset)
            if file.size is not None and size not in (None, file.size):
                raise RetryError(f"the server offers {size} bytes instead of {file.size}", damaged=True)
            if start < offset:
                self.discard(part)  # the server cannot continue
            with part.open("ab") as out:
                self.copy(guarded(blocks), out, file.size or size)
        finally:
            response.close()

    def copy(self, blocks: Iterator[bytes], out: object, size: int | None) -> None:
        """Append blocks until the file has `size` bytes; RetryError when they end early or only trickle."""
        since, received = time.monotonic(), 0
        for block in blocks:
            self.pause(0)
            out.write(block)
            self.progress.add(len(block))
            received += len(block)
            if size is not None and out.tell() > size:
                out.flush()
                raise DamagedFileError(f"{out.name}: more than {size} bytes arrived; fetch it again")
            elapsed = time.monotonic() - since
            if elapsed >= self.stall_seconds:
                if received < elapsed * STALL_BYTES_PER_SECOND:
                    raise RetryError(f"stalled ({received} bytes in {elapsed:.0f} s)")
                since, received = time.monotonic(), 0
        if size is not None and out.tell() < size:
            raise RetryError(f"disconnected after {out.tell()} of {size} bytes")

    def fetch_with_client(self, file: WantedFile, part: Path) -> None:
        """One attempt with huggingface_hub's client, which uses hf_xet where it can."""
        os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(max(1, int(self.stall_seconds))))
        client = import_client()
        client.utils.disable_progress_bars()  # one bar per file; ours counts the files as they end
        remote, folder = self.repository.remote_path(file.relative), part.with_name(part.name + ".client")
        if folder.is_symlink():
            folder.unlink()
        place = {"repo_type": "dataset", "revision": self.commit, "local_dir": folder, "token": access_token()}
        place["endpoint"] = endpoint()
        try:
            path = Path(client.hf_hub_download(self.repository.repo_id, remote, **place))
        except Exception as error:  # noqa: BLE001 (the client's errors and its HTTP library's share no useful base)
            check_worth_retrying(error, f"{file.relative} in {self.repository}")
        path.replace(part)
        shutil.rmtree(folder, ignore_errors=True)
        self.progress.add(part.stat().st_size)

    def url(self, file: WantedFile) -> str:
        remote = self.repository.remote_path(file.relative)
        place = {"repo_type": "dataset", "revision": self.commit, "endpoint": endpoint()}
        return import_client().hf_hub_url(self.repository.repo_id, remote, **place)

    def headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        return {**build_hf_headers(token=access_token()), "Accept-Encoding": "identity"}

    def note_commit(self, response: object) -> None:
        """Stay with the commit that a branch pointed to at the first answer, so that all files belong together."""
        if self.commit == self.repository.revision:
            answers = [*response.history, response]
            commits = filter(None, (answer.headers.get("X-Repo-Commit") for answer in answers))
            self.commit = next(commits, self.commit)

    def tree(self, folder: str, recursive: bool = True) -> list:
        """Entries under a folder of the repository, as huggingface_hub lists them."""
        api, failures = import_client().HfApi(endpoint(), token=access_token()), 0
        while True:
            try:
                try:
                    place = {"repo_type": "dataset", "revision": self.commit, "recursive": recursive}
                    listed = api.list_repo_tree(self.repository.repo_id, folder or None, **place)
                    return list(itertools.islice(listed, MAX_LISTED_FILES))
                except Exception as error:  # noqa: BLE001
                    check_worth_retrying(error, f"the file list of {self.repository}")
            except RetryError as error:
                failures += 1
                self.back_off(error, failures, "file list")

    def run_all(self, work: Callable[[WantedFile], None], files: list[WantedFile]) -> None:
        """work(file) for all files, `workers` at a time; the first error stops the others and is raised."""
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                futures = [pool.submit(work, file) for file in files]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                errors = [error for future in done if (error := future.exception())]
            finally:  # an interruption from the keyboard comes through here too
                if not all(future.done() for future in futures):
                    self.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
        self.stop.clear()
        if errors:
            raise errors[0]


def import_client() -> object:
    try:
        import huggingface_hub
        from huggingface_hub import constants, utils  # noqa: F401 (its attributes appear when they are imported)
    except ImportError:
        raise DataError("huggingface_hub is not installed: pip install huggingface-hub") from None
    if constants.HF_HUB_OFFLINE:
        raise DataError("HF_HUB_OFFLINE is set, but files are missing; unset it to fetch them")
    return huggingface_hub
