"""`doctor`: is this machine fit for a run? `preflight`: does this script get through all its stages here?"""
from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from golf import scripts, trial
from golf.cli import add_command, number, print_json, print_table
from golf.logs import Log, read_log
from golf.records import EVAL_CAP_SECONDS, SIZE_CAP_BYTES, TRAIN_CAP_SECONDS

# bf16 products that a healthy GPU reaches at least: an H200 that trained faster than others gave 670 after some seconds
TFLOPS = {"H100": 630, "H200": 630, "B200": 1400, "A100": 230}
DISK_MB_S = 200  # 8 ranks at full speed read 16 MB/s of tokens; slower disks still stall at the start of a run
FREE_BYTES = 2_000_000_000  # model, artifact, logs and compile caches
SAMPLED_BATCHES = 4  # Hessian batches of a preflight

@dataclass
class Finding:
    """One line of a verdict: what was looked at, what it is, ok / warn / fail, and what to do about it."""

    check: str
    value: str
    verdict: str = "ok"
    remedy: str = ""

def judged(check: str, value: str, fine: bool, remedy: str, otherwise: str = "warn") -> Finding:
    return Finding(check, value) if fine else Finding(check, value, otherwise, remedy)

def show(title: str, findings: list[Finding], as_json: bool) -> int:
    """Prints the findings as a table or as JSON; 1 when one of them is a failure."""
    failed = any(f.verdict == "fail" for f in findings)
    if as_json:
        print_json({"verdict": "fail" if failed else "ok", "findings": [asdict(f) for f in findings]})
    else:
        print_table(title, ["check", "found", "verdict", "remedy"], [list(asdict(f).values()) for f in findings])
        print("verdict: " + ("not ready, see the remedies" if failed else "ready"))
    return int(failed)

def data_settings(args: argparse.Namespace, defaults: Mapping[str, str]) -> Any:
    """The recipe's settings, with data folder and vocabulary size of the options, else of the environment, else of the
    script that is to run."""
    given = {"DATA_DIR": args.data_dir, "VOCAB_SIZE": args.vocab_size and str(args.vocab_size)}
    names = ("DATA_DIR", "VOCAB_SIZE", "TRANSFORM", "ATTENTION", "EVAL_SEQ_LEN", "EVAL_STRIDE")
    return trial.recipe().Hyperparameters.from_env({name: value for name in names if (
        value := given.get(name) or os.environ.get(name) or defaults.get(name.lower())) is not None})

def asked(name: str, defaults: Mapping[str, str], otherwise: float) -> float:
    """A number that the run would use: the environment's, else the script's default."""
    return float(os.environ.get(name.upper()) or defaults.get(name) or otherwise)

# -- doctor ------------------------------------------------------------------------------------------------------------

def check_software() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    yield judged("Python", platform.python_version(), sys.version_info >= (3, 11), "install Python 3.11", "fail")
    yield judged("free disk", f"{free / 1e9:.1f} GB here", free > FREE_BYTES,
                 f"free {FREE_BYTES / 1e9:.0f} GB, or work in another folder", "fail")
    for name in ("numpy", "sentencepiece", "brotli", "tqdm", "torch"):
        label = name.replace("torch", "PyTorch")
        try:
            yield Finding(label, getattr(importlib.import_module(name), "__version__", "there"))
        except ImportError as error:
            yield Finding(label, str(error), "fail", f"pip install {name}")

def check_gpu() -> Iterator[Finding]:
    """Driver, GPUs and NCCL."""
    import torch

    drivers = trial.nvidia_smi("driver_version")
    driver = "none found" if drivers is None else next(iter(drivers), "nvidia-smi failed")
    yield Finding("NVIDIA driver", f"{driver}; PyTorch is built for CUDA {torch.version.cuda or '-'}")
    if not torch.cuda.is_available():
        verdict = (("warn", "runs on the CPU are for trying out only") if drivers is None else
                   ("fail", "install the PyTorch build for this driver's CUDA version"))
        yield Finding("GPU", "none that PyTorch can use", *verdict)
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info(0)
    yield judged("GPU", f"{len(names)} x {names[0]}, {free >> 20} of {total >> 20} MiB free", free > total // 2,
                 "end the processes that use it")
    yield judged("ranks", f"{len(names)} GPUs", 8 % len(names) == 0, "use 1, 2, 4 or 8: others do not divide the batch")
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    yield judged("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not in this PyTorch",
                 nccl or len(names) == 1, "install a PyTorch build with NCCL", "fail")

def check_attention(hp: Any) -> Finding:
    """The first backend that computes a forward and a backward pass here, and why not the ones before it."""
    tg = trial.recipe()
    device = tg.choose_device("auto", 0)
    try:
        reason = tg.choose_attention(hp, device, tg.choose_dtype("auto", device)[0])[1]
    except ValueError as error:
        return Finding("attention", str(error), "fail", "reinstall PyTorch")
    return judged("attention", reason, device.type != "cuda" or not reason.startswith("math"),
                  "no fast kernel: install a PyTorch for this GPU")

def check_data(hp: Any) -> Iterator[Finding]:
    """Tokenizer and every shard's header and size."""
    tg = trial.recipe()
    fetch = f"{hp.fetch}, or give --data-dir and --vocab-size"
    yield judged("tokenizer", str(hp.tokenizer_path), hp.tokenizer_path.is_file(), fetch, "fail")
    for split in ("train", "val"):
        try:
            counts = [tg.shard_tokens(path) for path in tg.find_shards(hp, split)]
            yield Finding(f"{split} shards", f"{len(counts)}, {sum(counts):,} tokens, headers and sizes right")
        except ValueError as error:
            yield Finding(f"{split} shards", str(error), "fail", fetch)

def check_validation(hp: Any) -> Iterator[Finding]:
    """Whether the whole validation split is what the trainer takes: tokenizer, counts, bytes and manifest agree."""
    tg = trial.recipe()
    try:
        tables = tg.byte_tables(tg.load_tokenizer(hp), hp.transform)
        yield Finding("validation data", tg.load_validation(hp, tables).note)
    except ValueError as error:
        yield Finding("validation data", str(error), "fail", "the run would end with this")

def check_speed(seconds: float, hp: Any) -> Iterator[Finding]:
    """Matrix products and disk reads for about `seconds` together, against what a healthy machine reaches."""
    tflops, device = matmul_tflops(seconds / 2)
    least = next((value for name, value in TFLOPS.items() if name in device), None)
    yield judged("matrix products", f"{tflops:.3g} TFLOP/s ({device}; reference: {least or 'none for it'})",
                 least is None or tflops >= least,
                 "slower than others of its kind: look for other processes and throttling, or take another machine")
    if paths := sorted(hp.dataset_dir.glob("*.bin"), key=lambda p: -p.stat().st_size):
        speed = read_mb_s(paths, seconds / 2)
        yield judged("disk read", f"{speed:,.0f} MB/s (reference: {DISK_MB_S})", speed >= DISK_MB_S,
                     "copy the data to a local disk")

def matmul_tflops(seconds: float) -> tuple[float, str]:
    """bf16 products of 8192 x 8192 on the GPU, fp32 of 1024 x 1024 on a CPU: TFLOP/s and the device's name."""
    import torch
    from torch.utils.benchmark import Timer

    cuda = torch.cuda.is_available()
    size, kind = (8192, {"device": "cuda", "dtype": torch.bfloat16}) if cuda else (1024, {})
    a, b = torch.randn(size, size, **kind), torch.randn(size, size, **kind)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())  # warms up, synchronises
    rate = 2 * size ** 3 / timer.blocked_autorange(min_run_time=seconds).median / 1e12
    return rate, torch.cuda.get_device_name() if cuda else "CPU"

def read_mb_s(paths: list[Path], seconds: float) -> float:
    """Sequential MB/s over the largest shards, pages dropped from the cache first where the system allows it."""
    began, done = time.perf_counter(), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while time.perf_counter() - began < seconds and (block := file.read(1 << 23)):
                done += len(block)
    return done / max(time.perf_counter() - began, 1e-9) / 1e6

def run_doctor(args: argparse.Namespace) -> int:
    findings = list(check_software())
    if all(f.verdict != "fail" for f in findings if f.check in ("numpy", "PyTorch")):
        hp = data_settings(args, {})
        findings += [*check_gpu(), check_attention(hp), *check_data(hp)]
        findings += check_speed(args.seconds, hp) if args.seconds > 0 else []
    return show("doctor", findings, args.json)

# -- preflight ---------------------------------------------------------------------------------------------------------

def slice_data(hp: Any, val_tokens: int, target: Path) -> tuple[int, int]:
    """A data folder that links to the train shards and holds the first validation tokens: (tokens there, in all)."""
    import numpy as np

    there = trial.recipe().Hyperparameters(data_dir=str(target), vocab_size=hp.vocab_size, transform=hp.transform)
    for folder in (there.dataset_dir, there.tokenizer_path.parent):
        folder.mkdir(parents=True)
    there.tokenizer_path.symlink_to(hp.tokenizer_path.resolve())
    for path in trial.recipe().find_shards(hp, "train"):
        (there.dataset_dir / path.name).symlink_to(path.resolve())
    paths = trial.recipe().find_shards(hp, "val")
    tokens = np.fromfile(paths[0], "<u2", val_tokens, offset=1024)
    trial.write_shard(there.dataset_dir / paths[0].name, tokens)
    if hp.transform:
        slice_sidecar(hp, paths[0], len(tokens), there)
    return len(tokens), sum(map(trial.recipe().shard_tokens, paths))

def slice_sidecar(hp: Any, shard: Path, tokens: int, there: Any) -> None:
    """The bytes of those tokens, and a manifest that names their file but no totals; what is missing the run says."""
    import numpy as np

    path = Path(hp.data_dir) / "manifest.json"
    datasets = json.loads(path.read_text(encoding="utf-8"))["datasets"] if path.is_file() else []
    for entry in datasets:
        if entry["name"] == hp.dataset_dir.name and (sidecar := entry.get("bytes_sidecar")):
            file = shard.with_suffix(sidecar["suffix"])
            np.fromfile(file, sidecar["dtype"], tokens).tofile(there.dataset_dir / file.name)
            part = {"datasets": [{"name": entry["name"], "bytes_sidecar": sidecar}]}
            (Path(there.data_dir) / path.name).write_text(json.dumps(part), encoding="utf-8")

def run_preflight(args: argparse.Namespace) -> int:
    """0 when every stage ran and the projections fit the limits, 1 otherwise."""
    if not args.script.is_file():
        raise ValueError(f"{args.script}: no such file; give the path of a training script")
    defaults: dict[str, str] = {}
    with contextlib.suppress(SyntaxError):  # the run will say it
        defaults = scripts.defaults(args.script.read_text(encoding="utf-8", errors="replace"))
    hp, findings = data_settings(args, defaults), []
    for check in (check_data, check_validation):
        findings += check(hp)
        if any(f.verdict == "fail" for f in findings):
            return show("preflight", findings, args.json)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"] * (args.ranks > 1)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        part = slice_data(hp, args.val_tokens, base / "data")
        environment = {**os.environ, **trial.SHORT, "RUN_ID": "preflight", "DATA_DIR": f"{base / 'data'}/",
                       "OUTPUT_DIR": str(base), "GPTQ_CALIBRATION_BATCHES": str(SAMPLED_BATCHES),
                       "VOCAB_SIZE": str(hp.vocab_size)}
        environment.pop("EVAL_ONLY", None)
        began = time.perf_counter()
        status, output = trial.run_limited([sys.executable, *launcher, str(args.script.resolve())], base, environment,
                                           args.timeout)
        seconds, logs = time.perf_counter() - began, sorted(base.glob("logs/*.txt"))
        findings.append(judged("run", f"exit status {status} after {seconds:.0f} s", status == 0,
                               trial.last_lines(output), "fail"))
        if logs:
            findings += judge(logs[0], *part, defaults)
        elif not status:
            findings.append(Finding("log", "no logs/*.txt", "fail", "the script must write its log there"))
    return show("preflight", findings, args.json)

def judge(path: Path, val_tokens: int, all_tokens: int, defaults: Mapping[str, str]) -> Iterator[Finding]:
    """What the log of a short run says about a whole one. Seconds are projected, not measured."""
    text = path.read_text(encoding="utf-8")
    try:
        log = read_log(path)
    except ValueError as error:
        yield Finding("log", str(error), "fail", "the run ended before its first step; see its last lines")
        return
    yield Finding("attention", log.attention or "not in the log")
    falling = len(log.steps) > 1 and log.steps[-1][1] < log.steps[0][1]
    yield judged("training", "losses " + " ".join(f"{s[1]:.3f}" for s in log.steps), falling,
                 "the loss does not fall: check rates and data before a whole run")
    if log.steps and log.steps[-1][3]:
        yield Finding("speed", f"{log.steps[-1][3]:,.0f} tokens/s" + steps_in_cap(log, asked(
            "max_wallclock_seconds", defaults, TRAIN_CAP_SECONDS)))
    if log.hessian_seconds is not None:
        yield from judge_hessians(log, text, round(asked("gptq_calibration_batches", defaults, 64)))
    for name, score in log.evaluations.items():
        yield Finding(f"evaluation {name}", f"bpb {score[1]:.4f} of an untrained model on {val_tokens:,} tokens")
    if "int6" not in log.evaluations:
        yield Finding("artifact", "never scored", "fail", "the run stopped before the end; see its last lines")
    if log.eval_seconds is not None:
        whole = log.eval_seconds * all_tokens / max(val_tokens, 1)
        yield judged("evaluation time", f"{log.eval_seconds:.1f} s, about {whole:,.0f} s on all {all_tokens:,} tokens",
                     whole < EVAL_CAP_SECONDS, f"over {EVAL_CAP_SECONDS} s: more GPUs, or a larger EVAL_STRIDE")
    yield from judge_size(log, text)

def steps_in_cap(log: Log, cap_seconds: float) -> str:
    """About how many steps the cap holds at the speed of the last two logged steps; nothing without a cap."""
    (first, _, began, _), (last, _, ended, _) = (log.steps * 2)[-2:]
    if cap_seconds <= 0 or None in (began, ended) or last <= first or ended <= began:
        return ""
    each = (ended - began) / (last - first)
    return f", {1000 * each:.0f} ms a step: {cap_seconds / each:,.0f} steps in {cap_seconds:g} s"

def judge_hessians(log: Log, text: str, batches: int) -> Iterator[Finding]:
    reserve = float(log.settings.get("gptq_reserve_seconds", "10"))
    whole = log.hessian_seconds * batches / SAMPLED_BATCHES
    yield judged("Hessians", f"{log.hessian_seconds:.1f} s for {SAMPLED_BATCHES} batches, so at most {whole:.1f} s for "
                 f"{batches}; reserve {reserve:g} s", whole <= reserve,
                 f"set GPTQ_RESERVE_SECONDS={whole + 1:.0f}, or fewer batches")
    if match := re.search(r"([1-9]\d*) fallback", text):
        yield Finding("GPTQ", f"{match[1]} matrices fell back to row search", "warn", "their Hessians are not usable")

def judge_size(log: Log, text: str) -> Iterator[Finding]:
    """The script's own estimate where it prints one; an untrained model's artifact says little. A script that scales
    what it rounds to TARGET_TOTAL_BYTES fits all the same, at a price in bpb."""
    size, source = log.total_bytes, "of the untrained weights, which compress otherwise than trained ones"
    if match := re.search(r"artifact estimate: ([\d.]+) MB", text):
        size, source = float(match[1]) * 1e6, "the script's estimate"
    target = float(log.settings.get("target_total_bytes", "0"))
    price = f"; else coarser codes down to {target:,.0f} bytes cost bpb" if 0 < target <= SIZE_CAP_BYTES else ""
    if size is not None:
        yield judged("size", f"about {size / 1e6:.2f} MB, {source}; code {log.code_bytes or 0:,} bytes",
                     size <= SIZE_CAP_BYTES,
                     f"over {SIZE_CAP_BYTES:,} bytes: a smaller model, or more weight decay" + price,
                     "warn" if price else "fail")

# -- commands ----------------------------------------------------------------------------------------------------------

def add_parser(subparsers: Any) -> None:
    doctor = add_command(subparsers, "doctor", run_doctor, "is this machine fit for a run?")
    doctor.add_argument("--seconds", type=float, default=10.0, help="length of the speed checks (0: none; default: 10)")
    flight = add_command(subparsers, "preflight", run_preflight,
                         "all stages of a run in about a minute, with the settings of the environment")
    for parser in (doctor, flight):
        parser.add_argument("--data-dir", help="default: DATA_DIR, else ./data/")
        parser.add_argument("--vocab-size", type=int, help="default: VOCAB_SIZE, else the script's")
    flight.add_argument("script", type=Path, nargs="?", default=Path("train_gpt.py"))
    flight.add_argument("--ranks", type=number(int, 1), default=1, help="GPUs to use, through torchrun (default: 1)")
    flight.add_argument("--val-tokens", type=number(int, 1), default=262_144,
                        help="validation tokens to score (default: 262144)")
    flight.add_argument("--timeout", type=float, default=600.0, help="seconds until the run is ended (default: 600)")
