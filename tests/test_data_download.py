"""Tests of download and publication against a local hub. Run: python -m pytest tests/test_data_download.py"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import email.utils
import errno
import fcntl
import hashlib
import io
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import types
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "data", "bench")]
pytest.importorskip("huggingface_hub")

import cached_challenge_fineweb as downloader  # noqa: E402
import data_helpers as helpers  # noqa: E402
import download_faults  # noqa: E402
import hub_files  # noqa: E402
import publish  # noqa: E402
import shards  # noqa: E402
from data_helpers import DATA, assert_refused, run_script, shard_bytes  # noqa: E402
from data_hub import COMMIT, FAULTS, LARGE, LocalHub  # noqa: E402

REPO, SECRET = "some/repo", "hf_secret_token_value"
REMOTE = f"{REPO}/datasets/datasets/fineweb10B_sp512"
TRAIN, VAL = [50, 60, 70], [40, 10]


# ---------------------------------------------------------------- running the scripts


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = LocalHub(stall_seconds=5)
    hub.publish(REPO, "sp512", TRAIN, VAL)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MATCHED_FINEWEB_REPO_ID", REPO)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub_files, "FIRST_WAIT_SECONDS", 0.01)
    yield hub
    hub.close()


@pytest.fixture
def run(monkeypatch):
    """A command's main() in this process, as run_cli ends it: its exit code and what it printed."""

    def run(module, *args):
        output, errors, code = io.StringIO(), io.StringIO(), 0
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                shards.run_cli(module.main)
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(module.__name__, code, output.getvalue(), errors.getvalue())

    return run


@pytest.fixture
def download(run):
    def download(data_dir, *args):
        return run(downloader, "--data-dir", data_dir, "--variant", "sp512", "--stall-seconds", "0.5", *args)

    return download


def ok(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def shard(name):
    return f"{REMOTE}/fineweb_{name}.bin"


def check_complete(hub, data_dir, train_shards=3):
    folder = data_dir / "datasets/fineweb10B_sp512"
    names = [f"fineweb_val_{i:06d}.bin" for i in range(2)] + [f"fineweb_train_{i:06d}.bin" for i in range(train_shards)]
    there = [path.name for path in folder.iterdir() if path.suffix != ".other"]
    assert sorted(there) == sorted([".origin.json", *names])
    for name in names:
        assert (folder / name).read_bytes() == hub.files[f"{REMOTE}/{name}"]
        assert not (folder / name).is_symlink()
    for name in ("fineweb_512_bpe.model", "fineweb_512_bpe.vocab"):
        assert (data_dir / "tokenizers" / name).read_bytes() == hub.files[f"{REPO}/datasets/tokenizers/{name}"]


def edit_manifest(hub, change, repo=REPO):
    path = f"{repo}/datasets/manifest.json"
    manifest = json.loads(hub.files[path])
    change(manifest)
    hub.files[path] = json.dumps(manifest).encode()


# ---------------------------------------------------------------- the usual ways


def test_into_an_empty_folder_and_again(hub, download, tmp_path):
    ok(download(tmp_path, "--train-shards", 1))
    check_complete(hub, tmp_path, train_shards=1)
    assert not (tmp_path / ".download").exists()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["datasets"][0]["downloaded_from"]["repo_id"] == REPO
    assert len(hub.gets(REMOTE)) == 3 and hub.calls == ["tree datasets"]  # one request a file, one list
    hub.requests.clear()
    hub.calls.clear()
    assert "0 fetched" in ok(download(tmp_path, "--train-shards", 1))
    assert not hub.requests and not hub.calls  # the manifest is cached


def test_the_command_itself(hub, tmp_path):
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "MATCHED_FINEWEB_REPO_ID": REPO}
    result = run_script("cached_challenge_fineweb", "--data-dir", tmp_path, "--variant", "sp512", **env)
    assert ok(result).endswith(f"sp512: 7 files in place, 7 fetched, in {tmp_path}\n")
    check_complete(hub, tmp_path)
    assert_refused(run_script("cached_challenge_fineweb", "--data-dir", tmp_path, "--variant", "sp7", **env), "sp7")


def test_broken_files_are_repaired_and_only_those(hub, download, tmp_path):
    ok(download(tmp_path))
    folder = tmp_path / "datasets/fineweb10B_sp512"
    (folder / "fineweb_val_000000.bin").write_bytes(b"")
    (folder / "fineweb_train_000001.bin").write_bytes((folder / "fineweb_train_000001.bin").read_bytes()[:-9])
    (tmp_path / "tokenizers/fineweb_512_bpe.model").write_bytes(b"")
    (folder / "fineweb_train_000002.bin").rename(tmp_path / "elsewhere.bin")
    (folder / "fineweb_train_000002.bin").symlink_to(tmp_path / "elsewhere.bin")
    (folder / "fineweb_train_000000.bin").unlink()
    (folder / "fineweb_train_000000.bin").symlink_to(tmp_path / "dangling")
    before = (tmp_path / "elsewhere.bin").read_bytes()
    assert "4 fetched" in ok(download(tmp_path))
    check_complete(hub, tmp_path)
    assert (tmp_path / "elsewhere.bin").read_bytes() == before and not (tmp_path / "dangling").exists()


def test_verify_compares_hashes(hub, download, tmp_path):
    name, body = "fineweb_val_000000.bin", hub.files[shard("val_000000")]
    rows = [{"name": name, "sha256": hashlib.sha256(body).hexdigest()}]
    edit_manifest(hub, lambda manifest: manifest["datasets"][0].update(files=rows))
    ok(download(tmp_path))
    for damaged in (name, "fineweb_val_000001.bin"):  # by the manifest's hash, and by the file list's
        path = tmp_path / "datasets/fineweb10B_sp512" / damaged
        path.write_bytes(path.read_bytes()[:-1] + b"\7")
        assert "0 fetched" in ok(download(tmp_path))
        assert "1 fetched" in ok(download(tmp_path, "--verify"))
        check_complete(hub, tmp_path)


def test_list_names_variants_and_sizes(hub, download, tmp_path):
    output = ok(download(tmp_path, "--list"))
    assert "sp512: 3 train shards (180 tokens), 2 val shards (50 tokens), tokenizer sp_bpe_512" in output
    assert not (tmp_path / "datasets").exists()
    hub.publish(REPO, "byte260", train=[5], val=[5])
    assert "byte260: 1 train shards" in ok(download(tmp_path, "--list"))  # never from the cache


def test_sidecars_of_shards_come_along(hub, download, tmp_path):
    names = [f"fineweb_{name}{shards.SIDECAR_SUFFIX}" for name in ("val_000000", "train_000000", "train_000002")]
    rows = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in [*names, "../x"]]
    edit_manifest(hub, lambda manifest: manifest["datasets"][0].update(sidecars=rows))
    hub.files |= {f"{REMOTE}/{name}": name.encode() for name in names}
    ok(download(tmp_path, "--train-shards", 1))
    found = sorted(path.name for path in (tmp_path / "datasets/fineweb10B_sp512").glob(f"*{shards.SIDECAR_SUFFIX}"))
    assert found == sorted(names[:2])


def publish_docs(hub, folder, seed=0):
    """Documents under REPO's root on the hub; returns the path of the originals."""
    docs = helpers.write_docs(folder, helpers.make_texts(30, seed), docs_val=4)
    for name in (shards.DOCS_NAME, shards.SIDECAR_NAME):
        hub.files[f"{REPO}/datasets/{name}"] = docs.with_name(name).read_bytes()
    return docs


def test_documents_are_downloaded(hub, download, tmp_path):
    docs = publish_docs(hub, tmp_path / "made")
    hub.faults[f"{REPO}/datasets/docs_selected.jsonl"] = ["disconnect", "corrupt"]
    ok(download(tmp_path / "d", "--train-shards", 0, "--with-docs"))
    path = tmp_path / "d" / "docs_selected.jsonl"
    assert path.read_bytes() == docs.read_bytes()
    path.write_bytes(docs.read_bytes()[:-2] + b"x\n")
    ok(download(tmp_path / "d", "--train-shards", 0, "--with-docs", "--verify"))
    assert path.read_bytes() == docs.read_bytes()
    repository = hub_files.Repository(REPO, "datasets", "main")
    assert downloader.download_docs(tmp_path / "e", repository).read_bytes() == docs.read_bytes()


def test_documents_that_were_cut_short_are_repaired(hub, tmp_path):
    docs, repository = publish_docs(hub, tmp_path / "made"), hub_files.Repository(REPO, "datasets", "main")
    downloader.download_docs(tmp_path / "d", repository)
    for name in (shards.DOCS_NAME, shards.SIDECAR_NAME):
        path = tmp_path / "d" / name
        path.write_bytes(path.read_bytes()[:30])
        downloader.download_docs(tmp_path / "d", repository)
        assert path.read_bytes() == docs.with_name(name).read_bytes()


def test_interrupted_documents_continue_where_they_ended(hub, tmp_path):
    docs, repository = publish_docs(hub, tmp_path / "made"), hub_files.Repository(REPO, "datasets", "main")
    path = f"{REPO}/datasets/docs_selected.jsonl"
    hub.faults[path] = ["disconnect"] + ["throttle"] * 9
    with pytest.raises(hub_files.NetworkError, match="gave up"):
        downloader.download_docs(tmp_path / "d", repository)
    hub.faults.clear()
    hub.requests.clear()
    assert downloader.download_docs(tmp_path / "d", repository).read_bytes() == docs.read_bytes()
    assert [request.start for request in hub.gets(path)] == [docs.stat().st_size // 2]


def test_other_documents_are_refused_and_left_alone(hub, tmp_path):
    own, repository = helpers.write_docs(tmp_path, ["a"] * 9, 4), hub_files.Repository(REPO, "datasets", "main")
    publish_docs(hub, tmp_path / "made")
    before = own.read_bytes()
    for sidecar in (own.with_name(shards.SIDECAR_NAME), None):
        with pytest.raises(shards.DataError, match=r"is of other documents than those of some/repo.*another folder"):
            downloader.download_docs(tmp_path, repository)
        assert own.read_bytes() == before and (sidecar is None or sidecar.exists())
        own.with_name(shards.SIDECAR_NAME).unlink(missing_ok=True)


def test_the_exporter_downloads_its_documents(hub, tmp_path):
    pytest.importorskip("sentencepiece")
    docs = publish_docs(hub, tmp_path / "made")
    specs = helpers.write_specs(tmp_path / "s.json")
    args = ("--output-root", tmp_path / "out", "--tokenizer-config", specs, "--repo-id", REPO)
    with downloader.only_one(tmp_path / "out"):  # both would write to the same half-fetched files
        assert_refused(run_script("download_hf_docs_and_tokenize", *args), "another download is at work")
    ok(run_script("download_hf_docs_and_tokenize", *args))
    assert (tmp_path / "out" / "docs_selected.jsonl").read_bytes() == docs.read_bytes()
    assert (tmp_path / "out" / "manifest.json").exists()


# ---------------------------------------------------------------- trouble on the way


@pytest.mark.parametrize("fault", [*FAULTS, "trickle"])
def test_every_fault_ends_well(hub, download, tmp_path, fault):
    path = shard("train_000000")
    hub.files[path] = shard_bytes([7] * 5000)
    edit_manifest(hub, lambda manifest: manifest["datasets"][0]["stats"].update(tokens_train=5130))
    hub.faults[path] = [fault] if fault != "ignore_range" else ["disconnect", fault]
    output = ok(download(tmp_path))
    check_complete(hub, tmp_path)
    assert len(hub.gets(path)) == 2 and "trying again in" in output
    if fault in ("throttle", "error", "disconnect", "stall", "wrong_size", "truncate"):
        refused = fault in ("wrong_size", "truncate")  # an offer of another size is not read
        assert hub.sent_bytes(path) - refused * hub.gets(path)[0].sent == len(hub.files[path])  # no byte twice


def test_small_files_and_the_manifest_meet_faults_too(hub, download, tmp_path):
    for name in ("manifest.json", "tokenizers/fineweb_512_bpe.vocab", "tokenizers/fineweb_512_bpe.model"):
        hub.faults[f"{REPO}/datasets/{name}"] = ["error", "truncate", "disconnect"]
    ok(download(tmp_path))
    check_complete(hub, tmp_path)


def test_killed_download_continues_where_it_ended(hub, download, tmp_path):
    path = shard("train_000001")
    hub.files[path] = shard_bytes([7] * 400_000)
    edit_manifest(hub, lambda manifest: manifest["datasets"][0]["stats"].update(tokens_train=400_120))
    hub.faults[path], hub.stall_seconds = ["stall"], 20
    command = [sys.executable, DATA / "cached_challenge_fineweb.py", "--data-dir", tmp_path, "--variant", "sp512"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    half = len(hub.files[path]) // 2
    deadline = time.monotonic() + 20
    while not any(part.stat().st_size >= half - 8192 for part in (tmp_path / ".download").glob("*train_000001*.part")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    (part,) = (tmp_path / ".download").glob("*train_000001*.part")
    here = part.stat().st_size
    hub.requests.clear()
    ok(download(tmp_path))
    check_complete(hub, tmp_path)
    assert [request.start for request in hub.gets(path)] == [here] and here > half - 8192
    assert hub.sent_bytes(path) == len(hub.files[path]) - here


def test_half_fetched_files_stay_until_they_are_wanted(hub, download, tmp_path, monkeypatch):
    path = shard("train_000001")
    hub.publish(REPO, "sp700", train=[5], val=[5])
    hub.faults[path] = ["disconnect"] + ["throttle"] * 9
    assert download(tmp_path, "--workers", 1).returncode == 1
    (part,) = (tmp_path / ".download").glob("*train_000001*.part")
    older = part.with_name(part.name.replace(".bin.", ".bin.0"))
    older.write_bytes(b"of an older version")
    for options in (["--list"], ["--variant", "sp700"], ["--train-shards", 0]):
        ok(download(tmp_path, *options))
        assert part.stat().st_size == len(hub.files[path]) // 2, options
    monkeypatch.setenv("HF_TOKEN", SECRET)
    ok(upload("me/mine", "--data-dir", tmp_path, "--variant", "sp700"))
    left = {file.name for file in (tmp_path / ".download").iterdir()}  # the next shard may have begun too
    assert left >= {part.name, older.name} and all(name.endswith(".part") for name in left)
    hub.faults.clear()
    hub.requests.clear()
    ok(download(tmp_path))
    assert [request.start for request in hub.gets(path)] == [len(hub.files[path]) // 2]
    assert not (tmp_path / ".download").exists()


def test_interruption_from_the_keyboard(hub, tmp_path):
    hub.faults[shard("train_000001")] = ["trickle"]
    command = [sys.executable, DATA / "cached_challenge_fineweb.py", "--data-dir", tmp_path, "--variant", "sp512"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not hub.gets(shard("train_000001")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "error: interrupted\n")


def test_a_partial_file_of_another_origin_is_not_continued(tmp_path):
    wanted = hub_files.WantedFile("datasets/x/fineweb_val_000000.bin", 10, "0" * 64)
    client = hub_files.Hub(hub_files.Repository("a/b", "r", "main"))
    paths = {downloader.part_path(wanted, client, tmp_path)}
    client.commit = COMMIT
    paths.add(downloader.part_path(wanted, client, tmp_path))
    paths.add(downloader.part_path(hub_files.WantedFile(wanted.relative, 11, "0" * 64), client, tmp_path))
    client.repository = hub_files.Repository("a/c", "r", "main")
    paths.add(downloader.part_path(wanted, client, tmp_path))
    assert len(paths) == 4 and all(path.parent == tmp_path / ".download" for path in paths)


def test_a_partial_file_of_no_known_version_is_not_continued(hub, download, tmp_path):
    hub.commit, hub.has_tree, path = "", False, shard("train_000001")
    hub.files[path] = shard_bytes([7] * 5000)
    edit_manifest(hub, lambda manifest: manifest["datasets"][0]["stats"].update(tokens_train=5120))
    hub.faults[path] = ["disconnect"] + ["throttle"] * 9
    assert download(tmp_path).returncode == 1
    assert list((tmp_path / ".download").glob("*train_000001*.part"))
    hub.faults.clear()
    hub.files[path] = shard_bytes([9] * 5000)
    ok(download(tmp_path))
    check_complete(hub, tmp_path)


def test_complete_and_too_long_partial_files_of_unknown_size(hub, download, tmp_path):
    hub.has_tree = False
    for extra, starts in ((b"", [1124]), (b"xy", [1126, 0])):
        folder = tmp_path / str(len(extra))
        client = hub_files.Hub(hub_files.Repository(REPO, "datasets", "main"))
        client.commit = COMMIT
        wanted = hub_files.WantedFile("datasets/fineweb10B_sp512/fineweb_train_000000.bin")
        downloader.part_path(wanted, client, folder).write_bytes(hub.files[shard("train_000000")] + extra)
        hub.requests.clear()
        assert "sizes and hashes come from the manifest alone" in ok(download(folder))
        check_complete(hub, folder)
        assert [request.start for request in hub.gets(shard("train_000000"))] == starts


def test_random_runs_end_correct():
    rows = download_faults.run_all(3, megabytes=5, seed=random.SystemRandom().randrange(10**9), say=lambda text: None)
    assert [(row["error"], row["wrong"]) for row in rows] == [("", [])] * 3, rows
    assert download_faults.summarise(rows)["faults"] > 10


def test_giving_up_is_exit_code_1_and_continues_later(hub, download, tmp_path):
    hub.faults[shard("val_000000")] = ["throttle"] * 9
    result = download(tmp_path)
    assert result.returncode == 1 and "gave up after 7 attempts" in result.stderr and "HTTP 429" in result.stderr
    hub.faults.clear()
    ok(download(tmp_path))


def test_content_that_stays_damaged_is_the_publishers_fault(hub, download, tmp_path):
    hub.faults[shard("val_000000")] = ["corrupt"] * 9
    assert_refused(download(tmp_path), "fineweb_val_000000.bin", "arrived damaged", "report it to the publisher")
    assert len(hub.gets(shard("val_000000"))) == 4


def test_long_waits_asked_for_end_the_run(hub, download, tmp_path):
    hub.retry_after = "7200"
    hub.faults[shard("val_000000")] = ["throttle"]
    result = download(tmp_path)
    assert result.returncode == 1 and "asks to wait 7200 s" in result.stderr


def test_unreachable_hub(hub, download, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = download(tmp_path)
    assert result.returncode == 1 and "manifest.json: gave up" in result.stderr


@pytest.mark.parametrize("address", ["hub.example", "ftp://hub.example", "http://"])
def test_an_endpoint_that_is_no_address_is_refused_at_once(hub, download, tmp_path, monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    result = download(tmp_path)
    assert_refused(result, f"HF_ENDPOINT '{address.rstrip('/')}' is no address")
    assert "trying again" not in result.stdout


def test_one_missing_file_stops_the_others(hub, download, tmp_path):
    hub.has_tree, hub.stall_seconds = False, 0.3
    del hub.files[shard("val_000000")]
    hub.faults[shard("train_000000")] = ["trickle"] * 50
    started = time.monotonic()
    assert_refused(download(tmp_path, "--stall-seconds", 60), "val_000000.bin", "is missing (HTTP 404 EntryNotFound)")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"Retry-After": "7"}, 7, 7),
        ({"Retry-After": email.utils.format_datetime(datetime.datetime.now(datetime.timezone.utc))}, 0, 1),
        ({"RateLimit": '"resolvers";r=0;t=42'}, 42, 42),
        ({"Retry-After": "soon", "RateLimit": "none"}, None, None),
    ],
)
def test_waits_that_servers_ask_for(headers, low, high):
    seconds = hub_files.named_wait(headers)
    assert seconds is None if low is None else low <= seconds <= high


def test_back_off_grows_with_jitter_and_progress_starts_it_anew(tmp_path, monkeypatch):
    client, waits = hub_files.Hub(hub_files.Repository("a/b", "", "main")), []
    part = tmp_path / "part"
    outcomes = [None, b"1234", None, None, b"56"]

    def attempt(file, part):
        outcome = outcomes.pop(0)
        part.write_bytes((part.read_bytes() if part.exists() else b"") + (outcome or b""))
        if outcomes:
            raise hub_files.RetryError("disconnected", 7.0 if len(outcomes) == 1 else None)

    monkeypatch.setattr(client, "attempt", attempt)
    monkeypatch.setattr(client, "pause", lambda seconds: waits.append(seconds) if seconds > 0.5 else None)
    client.fetch(hub_files.WantedFile("x", 6), part)
    for wait, expected in zip(waits, [2, 1, 2, 7]):
        assert expected <= wait <= 1.25 * expected
    assert part.read_bytes() == b"123456" and client.retries == 4


class RefusalError(Exception):
    """What a hub client raises: an error with the server's answer attached."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__("from the server")
        self.response = types.SimpleNamespace(status_code=status, headers=headers)


def test_a_throttle_dressed_as_a_missing_file_is_a_throttle():
    disguised = FileNotFoundError("not found")
    disguised.__cause__ = RefusalError(429)
    with pytest.raises(hub_files.RetryError, match="throttled"):
        hub_files.check_worth_retrying(disguised, "x")
    for status, kind in ((404, hub_files.MissingError), (401, hub_files.MissingError), (400, shards.DataError)):
        with pytest.raises(kind):
            hub_files.check_worth_retrying(RefusalError(status), "x")
    with pytest.raises(hub_files.RetryError):
        hub_files.check_worth_retrying(ConnectionError("reset"), "x")
    with pytest.raises(OSError, match="full"):
        hub_files.check_worth_retrying(OSError(28, "full"), "x")


# ---------------------------------------------------------------- files of another origin, of the same sizes


def republish(hub, repo, token=7):
    """The data set of REPO under `repo`, with other training shards of the same lengths."""
    for path in [path for path in hub.files if path.startswith(f"{REPO}/")]:
        index = TRAIN[int(path[-5])] if "_train_" in path else 0
        hub.files[path.replace(REPO, repo)] = shard_bytes([token] * index) if index else hub.files[path]


def check_train_shards(hub, data_dir, repo, count):
    for index in range(count):
        path = f"datasets/fineweb10B_sp512/fineweb_train_{index:06d}.bin"
        assert (data_dir / path).read_bytes() == hub.files[f"{repo}/datasets/{path}"]


def test_shards_of_another_repository_are_replaced(hub, download, tmp_path):
    ok(download(tmp_path))
    republish(hub, "other/repo")
    output = ok(download(tmp_path, "--repo-id", "other/repo", "--train-shards", 1))
    assert "4 of 7 files here are not known to be of other/repo" in output and "2 fetched" in output
    assert len(list(tmp_path.glob("datasets/*/*_train_*.bin"))) == 1  # nobody trains on a mixture
    assert len(list(tmp_path.glob("datasets/*/*_train_*.bin.other"))) == 3  # and nothing is lost
    check_train_shards(hub, tmp_path, "other/repo", 1)
    origin = json.loads((tmp_path / "manifest.json").read_text())["datasets"][0]["downloaded_from"]
    assert (origin["repo_id"], origin["commit"]) == ("other/repo", COMMIT)
    ok(download(tmp_path))
    check_complete(hub, tmp_path)


def test_an_interrupted_change_of_origin_goes_on(hub, download, tmp_path):
    ok(download(tmp_path))
    republish(hub, "other/repo")
    hub.faults[shard("train_000002").replace(REPO, "other/repo")] = ["throttle"] * 9
    assert download(tmp_path, "--repo-id", "other/repo").returncode == 1
    hub.faults.clear()
    ok(download(tmp_path))  # and back: what had come already is the other's
    check_complete(hub, tmp_path)


@pytest.mark.parametrize("options", [(), ("--revision", "v2")])
def test_shards_published_anew_are_fetched_anew(hub, download, tmp_path, options):
    ok(download(tmp_path))
    republish(hub, REPO)
    hub.commit = "b" * 40
    assert "0 fetched" in ok(download(tmp_path))  # one commit, in whole
    ok(download(tmp_path, *options, "--list"))
    assert "4 fetched" in ok(download(tmp_path, *options))
    check_complete(hub, tmp_path)


def test_without_a_note_of_the_origin_hashes_decide(hub, download, tmp_path):
    ok(download(tmp_path))
    (tmp_path / "datasets/fineweb10B_sp512/.origin.json").unlink()
    assert "1 fetched" in ok(download(tmp_path))  # the .vocab, for which nobody gives a hash
    (tmp_path / "datasets/fineweb10B_sp512/.origin.json").unlink()
    hub.has_tree = False
    (tmp_path / ".manifests").rename(tmp_path / "old")
    assert "7 fetched" in ok(download(tmp_path))


def test_a_folder_of_a_downloader_that_noted_no_origin_goes_on(hub, download, tmp_path):
    ok(download(tmp_path, "--train-shards", 1))
    (tmp_path / "datasets/fineweb10B_sp512/.origin.json").unlink()
    (tmp_path / "manifest.json").write_bytes(hub.files[f"{REPO}/datasets/manifest.json"])
    ok(download(tmp_path))
    check_complete(hub, tmp_path)


def test_an_export_made_here_is_not_overwritten(hub, download, tmp_path):
    own = {"name": "fineweb10B_sp512", "tokenizer_name": "mine"}
    for row in (own, {"name": "fineweb10B_mine", "tokenizer_name": "sp_bpe_512"}):
        (tmp_path / "manifest.json").write_text(json.dumps({"datasets": [row]}))
        assert_refused(download(tmp_path), f"{row['name']} was exported here", "--data-dir")
    assert not hub.gets(REMOTE) and not (tmp_path / "datasets").exists()


# ---------------------------------------------------------------- manifests: stale, wrong, hostile


def test_stale_manifest_is_refetched(hub, download, tmp_path):
    ok(download(tmp_path, "--train-shards", 0))
    hub.publish(REPO, "sp700", train=[5], val=[5])
    ok(download(tmp_path, "--variant", "sp700"))
    hub.publish("other/repo", "sp701", train=[5], val=[5], root="x/y")
    ok(download(tmp_path, "--variant", "sp701", "--repo-id", "other/repo", "--remote-root", "x/y"))
    names = [dataset["name"] for dataset in json.loads((tmp_path / "manifest.json").read_text())["datasets"]]
    assert names == ["fineweb10B_sp512", "fineweb10B_sp700", "fineweb10B_sp701"]


def test_the_present_manifest_is_the_revisions_not_the_cached_commits(hub, download, tmp_path, monkeypatch):
    ok(download(tmp_path, "--train-shards", 0))
    hub.publish(REPO, "sp700", train=[5], val=[5])
    hub.commit, urls, original = "b" * 40, [], hub_files.open_url
    monkeypatch.setattr(hub_files, "open_url", lambda url, *args: urls.append(url) or original(url, *args))
    assert "out of date" in ok(download(tmp_path, "--variant", "sp700"))
    assert "/resolve/main/" in urls[0] and all(f"/resolve/{hub.commit}/" in url for url in urls[1:]) and len(urls) > 2


def test_a_malformed_manifest_does_no_harm_once_it_is_mended(hub, download, tmp_path):
    edit_manifest(hub, lambda manifest: manifest["datasets"][0]["stats"].update(files_train="3"))
    assert_refused(download(tmp_path), "files_train is '3'", "report it to the publisher")
    edit_manifest(hub, lambda manifest: manifest["datasets"][0]["stats"].update(files_train=3))
    ok(download(tmp_path))
    check_complete(hub, tmp_path)


@pytest.mark.parametrize("change", ["files", "sizes", "count"])
def test_cached_manifest_that_no_longer_fits_is_refetched(hub, download, tmp_path, change):
    ok(download(tmp_path, "--train-shards", 1))
    stats = {"files": {"files_val": 1, "tokens_val": 40}, "sizes": {"tokens_train": 190}, "count": {"files_train": 4}}
    edit_manifest(hub, lambda manifest: manifest["datasets"][0]["stats"].update(stats[change]))
    if change == "files":
        del hub.files[shard("val_000001")]
        (tmp_path / "datasets/fineweb10B_sp512/fineweb_val_000001.bin").unlink()
        assert "out of date" in ok(download(tmp_path, "--train-shards", 1))
    elif change == "sizes":
        hub.files[shard("train_000001")] = shard_bytes([1] * 70)
        assert "out of date" in ok(download(tmp_path))
        check_complete(hub, tmp_path)
    else:
        hub.files[shard("train_000003")] = shard_bytes([])
        ok(download(tmp_path, "--train-shards", 4))


@pytest.mark.parametrize("junk", ["", "[]", '{"repo_id": 5}', '{"manifest": {}, "commit": []}'])
def test_junk_in_the_cache_and_old_manifests_are_no_obstacle(hub, download, tmp_path, junk):
    ok(download(tmp_path, "--train-shards", 0))
    (cache,) = (tmp_path / ".manifests").iterdir()
    cache.write_text(junk)
    (tmp_path / "manifest.json").write_text('{"version": "10B", "datasets": [{"name": "fineweb10B_sp1024"}]}')
    ok(download(tmp_path, "--train-shards", 0))


def test_all_files_come_from_one_commit(hub, download, tmp_path):
    urls = []
    original = hub_files.open_url

    def spy(url, *args):
        urls.append(url)
        return original(url, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_files, "open_url", spy)
        ok(download(tmp_path, "--revision", "v2"))
    assert "/resolve/v2/" in urls[0] and all(f"/resolve/{COMMIT}/" in url for url in urls[1:]) and len(urls) == 8


def test_missing_things_are_named(hub, download, tmp_path):
    assert_refused(download(tmp_path, "--variant", "sp999"), REPO, "no variant sp999", "it has: sp512")
    assert_refused(download(tmp_path, "--train-shards", 4), "--train-shards 4", "has 3")
    wrong = download(tmp_path, "--remote-root", "wrong")
    assert_refused(wrong, "manifest.json", "wrong", "is missing (HTTP 404", "the repository has: datasets")
    assert_refused(download(tmp_path, "--repo-id", "no/body"), "no/body", "HTTP 404 RepoNotFound")
    del hub.files[shard("val_000001")]
    result = download(tmp_path / "new")
    assert_refused(result, "fineweb_val_000001.bin is missing", "has: fineweb_train_000000.bin", "fineweb_val_000000")
    assert not hub.gets(REMOTE)  # seen before anything was fetched


def test_short_split_that_agrees_with_its_header_is_refused(hub, download, tmp_path):
    hub.files[shard("val_000001")] = shard_bytes([1] * 5)
    assert_refused(download(tmp_path, "--train-shards", 0), "45 val tokens", "50")


@pytest.mark.parametrize("key", ["model_path", "vocab_path", "bytes_path"])
@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "tokenizers/../../evil", "shards.py", "tokenizers\\x", 5])
def test_hostile_tokenizer_paths_write_nothing(hub, download, tmp_path, key, path):
    edit_manifest(hub, lambda manifest: manifest["tokenizers"][0].update({key: path}))
    assert_refused(download(tmp_path / "d"), "only tokenizers/NAME is allowed")
    assert {file.name for file in (tmp_path / "d").iterdir()} <= {".manifests", ".download"}
    assert not hub.gets(REMOTE)


@pytest.mark.parametrize("name", ["../../evil", "..", "fineweb10B_../x"])
def test_hostile_variant_names(hub, download, tmp_path, name):
    edit_manifest(hub, lambda manifest: manifest["datasets"][0].update(name=name))
    assert_refused(download(tmp_path), "no variant sp512")
    assert_refused(download(tmp_path, "--variant", name.removeprefix("fineweb10B_")), "is not a name such as sp4096")


@pytest.mark.parametrize("sha256", [5, "abc", ["x"], "../x"])
def test_hostile_hashes(hub, download, tmp_path, sha256):
    rows = [{"name": "fineweb_val_000000.bin", "sha256": sha256}]
    edit_manifest(hub, lambda manifest: manifest["datasets"][0].update(files=rows))
    assert_refused(download(tmp_path), "fineweb_val_000000.bin", "sha256")


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_malformed_manifests_give_a_clear_error(junk):
    repository = hub_files.Repository("a/b", "", "main")
    good = {"name": "fineweb10B_sp4", "tokenizer_name": "t", "stats": {"files_train": 1, "files_val": 1}}
    for manifest in (
        {"datasets": junk},
        {"datasets": [good], "tokenizers": junk},
        {"datasets": [{**good, "stats": junk}]},
    ):
        with pytest.raises(shards.DataError):
            dataset = downloader.find_dataset(manifest, "sp4", repository)
            downloader.wanted_files(downloader.Snapshot("", manifest, {}), dataset, None)


@pytest.mark.parametrize("place", ["datasets", "datasets/fineweb10B_sp512", "tokenizers", ".manifests", ".download"])
def test_links_lead_nowhere_outside(hub, download, tmp_path, place):
    data, outside = tmp_path / "data", tmp_path / "outside"
    outside.mkdir()
    (data / place).parent.mkdir(parents=True)
    (data / place).symlink_to(outside)
    assert_refused(download(data), "is a link to", "outside", "--data-dir")
    assert not list(outside.iterdir())


def test_a_folder_on_another_disk_is_refused_before_the_download(hub, download, tmp_path, monkeypatch):
    original = Path.replace

    def replace(self, target):
        if (tmp_path / "datasets") in Path(target).parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert_refused(download(tmp_path), "fineweb10B_sp512 is on another disk", "--data-dir")
    assert not hub.gets(REMOTE)


def test_links_in_place_of_files_are_replaced_not_followed(hub, download, tmp_path):
    data, outside = tmp_path / "data", tmp_path / "outside"
    outside.mkdir()
    client = hub_files.Hub(hub_files.Repository(REPO, "datasets", "main"))
    client.commit = COMMIT
    body = hub.files[shard("val_000000")]
    wanted = hub_files.WantedFile(
        "datasets/fineweb10B_sp512/fineweb_val_000000.bin", len(body), hashlib.sha256(body).hexdigest()
    )
    for path in (
        downloader.part_path(wanted, client, data),
        data / ".download" / "manifest.json",
        data / ".download" / "manifest.json.part",
        data / ".download" / "lock",
        data / "manifest.json",
        data / wanted.relative,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(outside / path.name)
    linked = tmp_path / "linked"
    linked.symlink_to(data)  # the data folder itself may be a link
    ok(download(linked))
    check_complete(hub, data)
    assert not list(outside.iterdir()) and not (data / "manifest.json").is_symlink()


def test_a_folder_where_a_file_belongs(hub, download, tmp_path):
    (tmp_path / "tokenizers/fineweb_512_bpe.model").mkdir(parents=True)
    assert_refused(download(tmp_path), "fineweb_512_bpe.model is a folder", "remove it")


# ---------------------------------------------------------------- tokens


def test_token_goes_to_the_hub_only_and_is_never_printed(hub, download, tmp_path, monkeypatch):
    hub.private = True
    assert_refused(download(tmp_path), "needs a token in HF_TOKEN (HTTP 401")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.requests.clear()
    hub.faults[shard("val_000000")] = ["throttle", "disconnect", "stall", "truncate", "corrupt"]
    output = ok(download(tmp_path))
    check_complete(hub, tmp_path)
    for request in hub.gets():
        assert request.had_token != request.path.endswith(LARGE), request  # the store behind the hub gets none
    result = download(tmp_path, "--variant", "sp999")
    assert SECRET not in output + result.stdout + result.stderr and "confidential" not in output
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_stored_token_is_not_used(hub, download, tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    ok(download(tmp_path / "d"))
    assert not any(request.had_token for request in hub.requests)


def test_errors_show_neither_token_nor_signatures(monkeypatch, hub, download, tmp_path):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    text = hub_files.describe(RuntimeError(f"bad header {SECRET} at https://x/y?sig=confidential&z failed\nmore"))
    assert text == "RuntimeError: bad header *** at https://x/y failed"
    monkeypatch.setenv("HF_TOKEN", f"{SECRET}\nx")
    result = download(tmp_path)
    assert_refused(result, "the token in HF_TOKEN holds blanks")
    assert SECRET not in result.stdout + result.stderr


# ---------------------------------------------------------------- options and surroundings


def test_default_repositories_and_their_overrides(monkeypatch):
    def arguments(**changes):
        return types.SimpleNamespace(**{"repo_id": None, "remote_root": None, "revision": "main", **changes})

    make = downloader.Repository.from_arguments
    for name in (hub_files.REPOSITORY_VARIABLE, hub_files.REMOTE_ROOT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert make(arguments(), "sp1024").repo_id == "willdepueoai/parameter-golf"
    assert make(arguments(), "sp4096").repo_id == "kevclark/parameter-golf"
    assert str(make(arguments(), "sp8192")) == "kevclark/parameter-golf (folder datasets, revision main)"
    with pytest.raises(shards.DataError, match=r"byte260 .*--repo-id.*build the variant"):
        make(arguments(), "byte260")
    monkeypatch.setenv(hub_files.REPOSITORY_VARIABLE, "env/repo")
    monkeypatch.setenv(hub_files.REMOTE_ROOT_VARIABLE, "root/")
    assert make(arguments(), "sp77") == hub_files.Repository("env/repo", "root", "main")
    assert make(arguments(repo_id="a/b", remote_root=""), "sp77").remote_path("x") == "x"
    for bad in ({"repo_id": "a"}, {"repo_id": "a/b/c"}, {"remote_root": "a/../b"}):
        with pytest.raises(shards.DataError, match="must"):
            make(arguments(**bad), "sp77")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--variant", "../x"), ("--variant '../x'",)),
        (("--train-shards", -1), ("--train-shards -1", "must not be negative")),
        (("--workers", 0), ("--workers 0", "from 1 to 64")),
        (("--stall-seconds", 0), ("--stall-seconds 0",)),
        (("--stall-seconds", "nan"), ("--stall-seconds nan",)),
    ],
)
def test_bad_options(download, tmp_path, args, parts):
    assert_refused(download(tmp_path, *args), *parts)


def test_workers_fetch_at_the_same_time(hub, download, tmp_path, monkeypatch):
    busy, most, lock = 0, Counter(), threading.Lock()
    original = hub_files.Hub.stream

    def slow(self, file, part):
        nonlocal busy
        with lock:
            busy += 1
            most[self.workers] = max(most[self.workers], busy)
        time.sleep(0.05)
        original(self, file, part)
        with lock:
            busy -= 1

    monkeypatch.setattr(hub_files.Hub, "stream", slow)
    for workers in (1, 3):
        ok(download(tmp_path / str(workers), "--workers", workers))
        check_complete(hub, tmp_path / str(workers))
    assert most == {1: 1, 3: 3}


def test_xet_transport_uses_the_hubs_client(hub, download, tmp_path, monkeypatch):
    import huggingface_hub

    names, original = [], huggingface_hub.hf_hub_download

    def spy(repo_id, filename, **options):
        names.append(filename)
        return original(repo_id, filename, **options)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", spy)
    ok(download(tmp_path, "--transport", "xet"))
    check_complete(hub, tmp_path)
    assert len(names) == 8 and not (tmp_path / ".download").exists()
    del hub.files[shard("val_000001")]
    assert_refused(download(tmp_path / "new", "--transport", "xet"), "val_000001.bin is missing")


def test_file_lists_of_several_pages(hub, download, tmp_path):
    hub.page = 3
    ok(download(tmp_path))
    assert hub.calls == ["tree datasets"] * 3


def test_a_full_disk_is_seen_before_the_download(hub, download, tmp_path, monkeypatch):
    monkeypatch.setattr(downloader.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10_000_000))
    assert_refused(download(tmp_path), "0.01 GB are free", "--train-shards", "--data-dir")
    assert not hub.gets(REMOTE)


def test_two_downloads_into_one_folder(hub, download, tmp_path):
    with downloader.only_one(tmp_path):
        assert_refused(download(tmp_path), "another download is at work", str(tmp_path))
    ok(download(tmp_path))


def test_progress_lines_tell_bytes_and_time_left(monkeypatch, capsys):
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(hub_files.time, "monotonic", lambda: next(clock))
    progress = hub_files.Progress()
    progress.start(4_000_000_000, 1_000_000_000)
    for _ in range(6):
        progress.add(100_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 6  # not one for each block
    assert lines[0].startswith("1,200.0 of 4,000.0 MB, ") and "MB/s, ETA 0:0" in lines[0]


def test_a_terminal_gets_one_bar(hub, tmp_path):
    pytest.importorskip("tqdm")
    hub.faults[shard("val_000000")] = ["throttle"]
    command = [sys.executable, str(DATA / "cached_challenge_fineweb.py"), "--data-dir", str(tmp_path)]
    main_side, other_side = pty.openpty()
    fcntl.ioctl(other_side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.run([*command, "--variant", "sp512"], stdout=subprocess.PIPE, stderr=other_side, check=True)
    os.close(other_side)
    shown = ""
    with contextlib.suppress(OSError):  # that is how the end reads
        while block := os.read(main_side, 100_000):
            shown += block.decode()
    os.close(main_side)
    assert "fetching" in shown and "100%" in shown and "B/s" in shown
    total = sum(len(body) for path, body in hub.files.items() if "manifest" not in path)
    assert f"{total / 1000:.0f}k/{total / 1000:.0f}k" in shown
    assert "throttled (HTTP 429); trying again" in process.stdout.decode()


# ---------------------------------------------------------------- publication


@pytest.fixture
def export(hub, download, tmp_path, monkeypatch):
    """A complete data folder, and the surroundings for uploading it."""
    ok(download(tmp_path / "export"))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.calls.clear()
    return tmp_path / "export"


def upload(*args):
    """The command in a process of its own: huggingface_hub reads the address of the hub when it is imported."""
    return run_script("publish", *args, HF_HUB_DISABLE_XET="1")  # the local hub does not speak it


def test_published_data_can_be_downloaded(hub, download, export, tmp_path):
    result = upload("me/mine", "--data-dir", export, "--remote-root", "x/y", "--private")
    assert "published 7 files" in ok(result)
    assert SECRET not in result.stdout + result.stderr
    assert any(call.startswith("create me/mine") and call != "create me/mine None" for call in hub.calls)
    commits = [call for call in hub.calls if call.startswith("commit")]
    assert commits[-1] == "commit x/y/manifest.json" and "manifest" not in " ".join(commits[:-1])
    ok(download(tmp_path / "copy", "--repo-id", "me/mine", "--remote-root", "x/y"))
    check_complete(hub, tmp_path / "copy")
    rows = json.loads(hub.files["me/mine/x/y/manifest.json"])["datasets"][0]["files"]
    assert {row["name"]: row["sha256"] for row in rows} == {
        name.rpartition("/")[2]: hashlib.sha256(body).hexdigest() for name, body in hub.files.items() if REMOTE in name
    }
    assert sorted(path.name for path in export.iterdir()) == [".manifests", "datasets", "manifest.json", "tokenizers"]


def test_publishing_again_sends_nothing_twice(hub, export):
    ok(upload("me/mine", "--data-dir", export))
    assert hub.calls.count("put") == 6  # five shards and the model
    hub.calls.clear()
    ok(upload("me/mine", "--data-dir", export))
    assert "put" not in hub.calls


def test_a_variant_named_twice_is_published_once(export):
    twice = publish.prepare(export, ["sp512", "sp512"])
    assert [row["name"] for row in twice.manifest["datasets"]] == ["fineweb10B_sp512"]


def test_interrupted_upload_is_continued(hub, export):
    hub.refused_puts = [3]
    if upload("me/mine", "--data-dir", export).returncode:
        assert "me/mine/datasets/manifest.json" not in hub.files
        ok(upload("me/mine", "--data-dir", export))
    assert hub.calls.count("refused") == 1 and hub.calls.count("put") == 6


def test_other_variants_of_the_repository_stay(hub, download, export, tmp_path):
    hub.publish("me/mine", "sp700", train=[5], val=[5])
    assert "keeps fineweb10B_sp700" in ok(upload("me/mine", "--data-dir", export))
    for variant in ("sp512", "sp700"):
        ok(download(tmp_path / "copy", "--repo-id", "me/mine", "--variant", variant))


def test_dry_run_needs_no_token_and_sends_nothing(hub, run, export, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    hub.requests.clear()
    assert "7 files, 0.3 MB would go to me/mine" in ok(run(publish, "me/mine", "--data-dir", export, "--dry-run"))
    assert not hub.requests and not hub.calls
    assert_refused(run(publish, "me/mine", "--data-dir", export), "token with write access in HF_TOKEN")


def test_bad_exports_are_not_published(hub, run, export):
    folder, hubs_calls = export / "datasets/fineweb10B_sp512", len(hub.calls)
    path = folder / "fineweb_train_000001.bin"
    body = path.read_bytes()

    def refused(*parts):
        assert_refused(run(publish, "me/mine", "--data-dir", export, "--dry-run"), *parts)

    path.unlink()
    refused("fineweb_train_000001.bin is missing", "in full")
    path.write_bytes(body[:-1])
    refused("fineweb_train_000001.bin", "bytes")
    path.write_bytes(shard_bytes([1] * 59))
    refused("179 train tokens", "180")
    path.write_bytes(body)
    manifest = json.loads((export / "manifest.json").read_text())
    manifest["datasets"][0]["files"] = [{"name": path.name, "sha256": "0" * 64}]
    (export / "manifest.json").write_text(json.dumps(manifest))
    refused("fineweb_train_000001.bin: sha256", "0" * 64)
    assert_refused(run(publish, "me/mine", "--data-dir", export, "--variant", "sp9"), "no variant sp9", "it has: sp512")
    assert_refused(run(publish, "mine", "--data-dir", export), "OWNER/NAME")
    assert len(hub.calls) == hubs_calls


def test_what_the_repository_lists_is_compared(hub, run, export, monkeypatch):
    monkeypatch.setattr(publish, "upload", lambda *args: None)
    hub.files["me/mine/datasets/x"] = b"y"
    assert_refused(run(publish, "me/mine", "--data-dir", export), "the repository lists None", "run the upload again")


# ---------------------------------------------------------------- the house


def test_sources_are_ascii():
    ours = [DATA / name for name in ("cached_challenge_fineweb.py", "hub_files.py", "publish.py")]
    for path in [*ours, Path(download_faults.__file__), Path(__file__), Path(__file__).with_name("data_hub.py")]:
        assert path.read_bytes().isascii(), path


def test_help_texts(capsys):
    for module in (downloader, publish):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(sys, "argv", ["x", "--help"])
            module.parse_arguments()
        assert "Exit codes" in capsys.readouterr().out
    parser = argparse.ArgumentParser()
    downloader.add_repository_arguments(parser)
    assert parser.parse_args([]).revision == "main"
