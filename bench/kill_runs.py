"""Training runs killed at random moments and resumed: every loss must equal an undisturbed run's, to the last bit.

    python bench/kill_runs.py [--kills 30] [--minutes M] [--ranks 1 2] [--seed 1] [--out bench/results/NAME.json]

Small CPU runs on the golden shards, with RESUME=auto and a snapshot every 0.1 s of the clock. A kill is SIGKILL of one
rank, SIGKILL of all, SIGTERM of the job, or a power cut: SIGKILL of all, and every unsynced file loses half its bytes.
Linux only: ranks are found through /proc.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
STEPS = 60
SETTINGS = {
    "VOCAB_SIZE": "512", "NUM_LAYERS": "3", "XSA_LAST_N": "3", "NUM_KV_HEADS": "2", "MODEL_DIM": "32", "NUM_HEADS": "4",
    "EMBEDDING_DIM": "32", "ROPE_DIMS": "4", "VE_DIM": "8", "VE_LAYERS": "2", "TRAIN_SEQ_LEN": "64",
    "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "16", "TRAIN_BATCH_TOKENS": "2048", "DEVICE": "cpu", "WARMUP_STEPS": "1",
    "MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": str(STEPS), "TRAIN_LOG_EVERY": "1", "VAL_LOSS_EVERY": "0",
    "EMA_DECAY": "0.9", "OMP_NUM_THREADS": "1", "GPTQ_CALIBRATION_BATCHES": "2", "COMPRESSOR": "lzma", "RUN_ID": "run"}
KILLS = ("one rank", "all ranks", "terminate", "power cut")


def new_folder(folder: Path) -> Path:
    """A folder with data/ made of the golden shards."""
    shutil.copytree(GOLDEN / "shards", folder / "data/datasets/fineweb10B_sp512")
    (folder / "data/tokenizers").mkdir()
    shutil.copy(GOLDEN / "tokenizer_512.model", folder / "data/tokenizers/fineweb_512_bpe.model")
    return folder


def start(folder: Path, ranks: int, **changes: str) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen([sys.executable, *launcher, str(ROOT / "train_gpt.py")], cwd=folder, stdout=output,
                                stderr=output, env={**os.environ, **SETTINGS, **changes}, start_new_session=True)


def losses(folder: Path) -> list[dict[int, float]]:
    """Loss by step, one dictionary for each part of a run."""
    parts = []
    for path in sorted((folder / "logs").glob("*.jsonl"), key=lambda p: p.stat().st_mtime):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        parts.append({row["step"]: row["train_loss"] for row in rows if row["type"] == "step"})
    return parts


def descendants(pid: int) -> list[int]:
    """Processes below this one, nearest first."""
    try:
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]
    except OSError:
        return []
    return children + [below for child in children for below in descendants(child)]


def strike(job: subprocess.Popen, how: str, folder: Path, rng: random.Random) -> None:
    ranks = descendants(job.pid) or [job.pid]
    if how == "terminate":
        job.terminate()
    elif how == "one rank":
        os.kill(rng.choice(ranks), signal.SIGKILL)
    else:
        os.killpg(job.pid, signal.SIGKILL)
        for pid in ranks:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    job.wait(timeout=90)
    if how == "power cut":
        for path in folder.glob("checkpoints/.*.tmp/*"):  # only what was renamed had been synced
            os.truncate(path, path.stat().st_size // 2)


def one_run(folder: Path, ranks: int, rng: random.Random, kills: int, every: str = "0.1") -> list[str]:
    """A run that is killed up to `kills` times and resumed until it ends well; returns the kinds of its kills."""
    done: list[str] = []
    while True:
        before = len(losses(folder))
        job, struck = start(folder, ranks, RESUME="auto", CHECKPOINT_EVERY_SECONDS=every), False
        wanted = rng.randrange(STEPS)
        while job.poll() is None and len(done) < kills:
            parts = losses(folder) if (folder / "logs").is_dir() else []
            if len(parts) > before and max(parts[-1], default=-1) >= wanted:
                time.sleep(rng.random() * 0.3)
                how = rng.choice(KILLS if ranks > 1 else KILLS[1:])
                if struck := job.poll() is None:
                    strike(job, how, folder, rng)
                    done.append(how)
                break
            time.sleep(0.02)
        code = job.wait(timeout=300)
        if code == 0:
            return done
        if not struck:
            raise SystemExit(f"a run that nobody killed ended with {code}: {folder}/output.txt")


def verify(folder: Path, reference: Path) -> int:
    """Compares all parts' losses and the artifact with the undisturbed run; returns the number of losses compared."""
    expected, compared = losses(reference)[0], 0
    for part in losses(folder):
        for step, loss in part.items():
            if loss != expected[step]:
                raise SystemExit(f"{folder}: step {step} has loss {loss!r}, the undisturbed run {expected[step]!r}")
            compared += 1
    if (folder / "final_model.int6.ptz").read_bytes() != (reference / "final_model.int6.ptz").read_bytes():
        raise SystemExit(f"{folder}: the artifact differs from the undisturbed run's")
    return compared


def campaign(base: Path, ranks: int, kills: int, seconds: float, seed: int) -> dict:
    """Runs until that many kills and that many seconds are over."""
    rng, done, compared, runs, began = random.Random(seed), [], 0, 0, time.monotonic()
    reference = new_folder(base / f"reference_{ranks}")
    if start(reference, ranks).wait(timeout=300) != 0:
        raise SystemExit(f"the undisturbed run failed: {reference}/output.txt")
    while len(done) < kills or time.monotonic() - began < seconds:
        folder = new_folder(base / f"run_{ranks}_{runs}")
        done += one_run(folder, ranks, rng, 3)
        compared += verify(folder, reference)
        shutil.rmtree(folder)
        runs += 1
        print(f"{ranks} ranks: {len(done)} kills, {compared} losses equal", flush=True)
    return {"ranks": ranks, "kills": {kind: done.count(kind) for kind in KILLS}, "runs": runs, "losses_equal": compared,
            "minutes": round((time.monotonic() - began) / 60, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills in all, shared by the numbers of ranks")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for that long, shared likewise")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as base:
        kills, seconds = (-(-amount // len(args.ranks)) for amount in (args.kills, 60 * args.minutes))
        results = [campaign(Path(base), ranks, int(kills), seconds, args.seed) for ranks in args.ranks]
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    about = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__,
             "commit": commit.stdout.strip(), "command": " ".join(sys.argv), "campaigns": results}
    print(json.dumps(about, indent=1))
    if args.out:
        args.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
