"""Does a download from a faulty hub always end correct? Randomised runs against a local hub, compared byte for byte.

    python bench/download_faults.py                              # 50 runs of 300 MB, a result file in bench/results/
    python bench/download_faults.py --runs 3 --megabytes 5       # a quick look

Each run draws faults for every file: throttling (429), errors (503), disconnects, truncated files, wrong sizes,
stalls, flipped bytes, and answers that ignore the Range request. A third of the runs start over a folder with broken
files. The waits are shortened (0.02 s instead of 1 s at first, stalls after 0.3 s); everything else is what users run.
A run counts only when every file equals the hub's. Exit code 1 when one did not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import random
import sys
import tempfile
import time
import types
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "data"), str(PROJECT / "tests")]

import cached_challenge_fineweb as downloader  # noqa: E402
import hub_files  # noqa: E402
from data_hub import FAULTS, LocalHub  # noqa: E402

REPO, VARIANT = "bench/faults", "sp512"
FIRST_WAIT_SECONDS, STALL_SECONDS = 0.02, 0.3
SHARDS = 15
FAULTY_SHARE, MAX_FAULTS = 0.7, 3  # of the files, and for one file
BROKEN_FOLDER_SHARE = 1 / 3
NO_HASH = (".vocab",)  # small files have a sha256 neither in the hub's list nor in the manifest


def make_hub(megabytes: float) -> LocalHub:
    """A hub with one variant of so many MB in SHARDS shards, two of them validation."""
    hub = LocalHub(stall_seconds=4 * STALL_SECONDS)
    tokens = int(megabytes * 1e6 / 2 / SHARDS)
    hub.publish(REPO, VARIANT, train=[tokens] * (SHARDS - 3) + [tokens // 2], val=[tokens, tokens // 2])
    return hub


def local_path(folder: Path, remote: str) -> Path:
    return folder / remote.removeprefix(f"{REPO}/datasets/")


def plan_faults(hub: LocalHub, rng: random.Random) -> None:
    """New faults for the files of the hub; those of the run before are forgotten."""
    hub.faults.clear()
    for path in hub.files:
        kinds = [fault for fault in FAULTS if not (fault == "corrupt" and path.endswith(NO_HASH))]
        if rng.random() < FAULTY_SHARE:
            hub.faults[path] = rng.choices(kinds, k=rng.randint(1, MAX_FAULTS))


def break_folder(hub: LocalHub, folder: Path, rng: random.Random) -> None:
    """Leave behind what killed copies leave: empty, short and foreign files, and links to nowhere."""
    paths = [path for path in hub.files if path.endswith(".bin")]
    for path, kind in zip(rng.sample(paths, 4), ("empty", "short", "foreign", "link")):
        place = local_path(folder, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            place.symlink_to(folder / "nowhere")
        else:
            content = {"empty": b"", "short": hub.files[path][:-2], "foreign": bytes(len(hub.files[path]))}[kind]
            place.write_bytes(content)


def differences(hub: LocalHub, folder: Path) -> list[str]:
    """Files that are not byte for byte the hub's, or not real files."""
    places = {path: local_path(folder, path) for path in hub.files if not path.endswith("manifest.json")}
    same = {
        path: place.is_file() and not place.is_symlink() and place.read_bytes() == hub.files[path]
        for path, place in places.items()
    }
    return sorted(path for path, equal in same.items() if not equal)


def run_once(hub: LocalHub, seed: int, folder: Path) -> dict:
    """One download with the faults of this seed; what happened, with `wrong` empty when all is well."""
    rng = random.Random(seed)
    plan_faults(hub, rng)
    hub.requests.clear()
    hub.injected.clear()
    over_broken = rng.random() < BROKEN_FOLDER_SHARE
    if over_broken:
        break_folder(hub, folder, rng)
    client = hub_files.Hub(hub_files.Repository(REPO, "datasets", "main"), stall_seconds=STALL_SECONDS)
    args = types.SimpleNamespace(variant=VARIANT, train_shards=None, verify=False, data_dir=folder)
    output, error, started = io.StringIO(), "", time.monotonic()
    with contextlib.redirect_stdout(output):
        try:
            downloader.download_variant(args, client)
        except hub_files.DataError as problem:
            error = str(problem)
    return {
        "seed": seed,
        "over_broken_folder": over_broken,
        "faults": dict(hub.injected),
        "retries": client.retries,
        "bytes_sent": hub.sent_bytes(),
        "bytes_needed": sum(len(body) for body in hub.files.values()),
        "seconds": round(time.monotonic() - started, 2),
        "error": error,
        "wrong": differences(hub, folder),
    }


@contextlib.contextmanager
def short_waits(hub: LocalHub):
    """Point huggingface_hub at the local hub, and wait less between attempts."""
    before, environment = hub_files.FIRST_WAIT_SECONDS, os.environ.get("HF_ENDPOINT")
    hub_files.FIRST_WAIT_SECONDS, os.environ["HF_ENDPOINT"] = FIRST_WAIT_SECONDS, hub.endpoint
    try:
        yield
    finally:
        hub_files.FIRST_WAIT_SECONDS = before
        os.environ.pop("HF_ENDPOINT")
        if environment is not None:
            os.environ["HF_ENDPOINT"] = environment


def run_all(runs: int, megabytes: float, seed: int, say=print) -> list[dict]:
    """All runs, one after the other, each in a folder of its own."""
    hub, rows = make_hub(megabytes), []
    with short_waits(hub):
        for number in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run_once(hub, seed + number, Path(folder)))
            row = rows[-1]
            say(
                f"{number + 1:4d} {sum(row['faults'].values()):7d} {row['retries']:8d} "
                f"{row['bytes_sent'] / row['bytes_needed']:14.2f} {row['seconds']:8.1f}  "
                f"{row['error'] or ', '.join(row['wrong']) or 'correct'}"
            )
    hub.close()
    return rows


def summarise(rows: list[dict]) -> dict:
    kinds = Counter()
    for row in rows:
        kinds.update(row["faults"])
    return {
        "runs": len(rows),
        "correct": sum(not row["error"] and not row["wrong"] for row in rows),
        "over_broken_folder": sum(row["over_broken_folder"] for row in rows),
        "faults": sum(kinds.values()),
        "faults_by_kind": dict(sorted(kinds.items())),
        "retries": sum(row["retries"] for row in rows),
        "bytes_sent_per_byte_needed": round(
            sum(r["bytes_sent"] for r in rows) / sum(r["bytes_needed"] for r in rows), 3
        ),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def describe_machine() -> dict:
    import huggingface_hub

    versions = {"python": platform.python_version(), "huggingface_hub": huggingface_hub.__version__}
    return {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count(), **versions}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--megabytes", type=float, default=300.0, help="per run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run (default %(default)s)")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/DATE_download_faults.json)")
    args = parser.parse_args()
    now = datetime.now(timezone.utc)
    print(" run  faults  retries  sent / needed  seconds")
    rows = run_all(args.runs, args.megabytes, args.seed)
    summary = summarise(rows)
    for name, value in summary.items():
        print(f"{name}: {value}")
    out = args.out or PROJECT / "bench" / "results" / f"{now:%Y-%m-%d}_download_faults.json"
    setting = {"megabytes": args.megabytes, "shards": SHARDS, "first_seed": args.seed, "machine": describe_machine()}
    setting |= {
        "first_wait_seconds": FIRST_WAIT_SECONDS,
        "stall_seconds": STALL_SECONDS,
        "time": f"{now:%Y-%m-%dT%H:%M:%SZ}",
    }
    out.write_text(json.dumps({**setting, "summary": summary, "runs": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out}")
    return int(summary["correct"] != summary["runs"])


if __name__ == "__main__":
    sys.exit(main())
