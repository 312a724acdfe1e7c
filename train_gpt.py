"""The 16 MB language-model challenge in one file: train, quantise, write, re-read, score.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the real run: 8 GPUs, ten minutes
    python train_gpt.py                                       # one process: GPU if there is one, else CPU
    EVAL_ONLY=final_model.int6.ptz python train_gpt.py        # score an artifact that exists
    python train_gpt.py --help                                # every setting, its default and meaning

Settings are environment variables. This file plus the compressed weights must fit in 16,000,000 bytes.
"""
from __future__ import annotations

import argparse
import contextlib
import difflib
import faulthandler
import hashlib
import io
import json
import lzma
import math
import os
import pickletools
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

try:
    import fcntl
    import resource
except ImportError:  # Windows: no lock on the output folder, no peak memory
    fcntl = resource = None

# ---- Errors and limits -----------------------------------------------------------------------------------------------

SIZE_CAP_BYTES = 16_000_000  # decimal megabytes, code plus compressed weights
EVAL_CAP_SECONDS = 600

class RunError(Exception):
    """A failure with one clear message and an exit code of its own; no traceback is printed."""
    exit_code = 1
class SetupError(RunError, ValueError):
    exit_code = 2
class DivergedError(RunError):
    exit_code = 3
class OversizeError(RunError):
    exit_code = 4
class ClockError(RunError):
    exit_code = 5
class ArtifactError(RunError, ValueError):
    exit_code = 6

def first_line(error: BaseException) -> str:
    """Without the allocator's account of itself, with which torch lets one line about memory grow to 600 characters."""
    return re.split(r"\n|[.;] Of the allocated memory", str(error), maxsplit=1)[0]

EXIT_CODES = """Exit codes: 0 fine, 1 unexpected error, 2 settings, data or machine, 3 loss or weights diverged,
4 over the size cap, 5 training data used after the cap, 6 artifact unreadable, 130 interrupted. (torchrun exits 1 and
lists them.)"""

# ---- Settings --------------------------------------------------------------------------------------------------------

def setting(default: Any, meaning: str, **bounds: float) -> Any:
    """A field with its help text and bounds: least (allowed itself), above and below (not allowed themselves), most."""
    return field(default=default, metadata={"help": meaning, "bounds": bounds})

IGNORED_SETTINGS = ("ROPE_TRAIN_SEQ_LEN", "MUON_BETA2")  # in published run commands, where they have no effect either

@dataclass(frozen=True)
class Hyperparameters:
    """Every setting of a run, read from the environment (upper-case names) by `from_env`."""
    # data and output
    data_dir: str = setting("./data/", "folder with datasets/ and tokenizers/; its spelling decides the data order")
    vocab_size: int = setting(4096, "tokenizer size; names the dataset folder fineweb10B_sp{V}", above=0, most=65536)
    transform: Literal["", "caseops"] = setting("", "text transform of the data set: caseops, or empty")
    run_id: str = setting("", "name of the log files (empty: a random one)")
    output_dir: str = setting(".", "where logs/, final_model.pt and final_model.int6.ptz are written")
    eval_only: str = setting("", "path of an artifact to score instead of training")
    seed: int = setting(1337, "decides the initial weights only, never the data order", least=0, most=2**63 - 1)
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = setting("auto", "auto: cuda, else mps, else cpu")
    precision: Literal["auto", "bf16", "fp32"] = setting("auto", "activations; auto: bf16 on GPUs that have it")
    attention: Literal["auto", "fa3", "cudnn", "flash", "math"] = setting("auto", "attention kernel; a name forces it")
    kernels: Literal["auto", "0", "1"] = setting("auto", "fused Triton kernels; auto: on Hopper GPUs in bf16; 0: plain")
    deterministic: bool = setting(False, "same settings and machine, same artifact bytes; slower on a GPU")
    compile: Literal["auto", "0", "1"] = setting("auto", "torch.compile; auto: on with CUDA and Triton")
    # length of the run
    iterations: int = setting(20000, "steps at most", above=0)
    max_wallclock_seconds: float = setting(600.0, "cap on training plus Hessian seconds (0 or less: none)")
    checkpoint_every_seconds: float = setting(0.0, "seconds of the clock between snapshots (0: none)", least=0)
    resume: Literal["", "auto"] = setting("", "auto: go on from the newest snapshot in OUTPUT_DIR, if there is one")
    stall_seconds: float = setting(60.0, "longest step; then every rank prints its stack and ends (0: any)", least=0)
    warmup_steps: int = setting(20, "steps before the clock starts, whose effect is undone", least=0)
    warmdown_frac: float = setting(0.667, "last share of the run in which the rate falls linearly", most=1)
    min_lr: float = setting(0.0, "floor of the rate as a factor of the base rate", least=0)
    # batches
    train_batch_tokens: int = setting(786_432, "tokens of one optimizer step over all ranks", above=0)
    micro_batch_tokens: int = setting(0, "tokens of one rank's forward (0: a step in max(1, 8 / ranks) parts)", least=0)
    train_seq_len: int = setting(2048, "training context", above=0)
    eval_seq_len: int = setting(2048, "evaluation context", above=0)
    val_batch_tokens: int = setting(524_288, "tokens of one validation batch over all ranks and parts", above=0)
    # evaluation and logs
    train_log_every: int = setting(500, "steps between log lines (0: never)", least=0)
    val_loss_every: int = setting(4000, "steps between validations (0: only at the end)", least=0)
    sliding_window_enabled: bool = setting(True, "score the artifact with overlapping windows: the official number")
    eval_stride: int = setting(64, "positions between sliding windows", above=0)
    # model
    num_layers: int = setting(11, "blocks; the first half feeds skips to the second", above=0)
    model_dim: int = setting(512, "width", above=0)
    embedding_dim: int = setting(512, "width of the token table", above=0)
    num_heads: int = setting(8, "query heads", above=0)
    num_kv_heads: int = setting(4, "key and value heads", above=0)
    mlp_mult: float = setting(4.0, "MLP width over model width", above=0)
    xsa_last_n: int = setting(11, "last blocks whose attention output drops its part along the own value", least=0)
    skip_gates_enabled: bool = setting(True, "learned gates on the skips")
    tie_embeddings: bool = setting(True, "output head = token table")
    logit_softcap: float = setting(30.0, "logits are cap * tanh(z / cap)", above=0)
    rope_base: float = setting(10000.0, "rotary base at the training length", above=0)
    rope_dims: int = setting(16, "rotated dimensions of a head (0: all)", least=0)
    ln_scale: bool = setting(True, "scale normed inputs of block l by 1 / sqrt(l + 1)")
    ve_enabled: bool = setting(True, "shared value embedding")
    ve_dim: int = setting(128, "width of the value embedding", above=0)
    ve_layers: str = setting("9,10", "blocks that add the value embedding")
    qk_gain_init: float = setting(4.0, "initial gain on normed queries")
    tied_embed_init_std: float = setting(0.005, "initial deviation of the tied token table", above=0)
    # optimizers
    embed_lr: float = setting(0.6, "learning rate of the tables, untied", least=0, most=1e30)
    head_lr: float = setting(0.008, "learning rate of the output head, untied", least=0, most=1e30)
    tied_embed_lr: float = setting(0.03, "learning rate of the tables, tied", least=0, most=1e30)
    matrix_lr: float = setting(0.02, "Muon's learning rate", least=0, most=1e30)
    scalar_lr: float = setting(0.02, "learning rate of gains, gates and scales", least=0, most=1e30)
    muon_momentum: float = setting(0.99, "Muon's momentum after its warm-up", least=0, below=1)
    muon_backend_steps: int = setting(5, "Newton-Schulz iterations", above=0)
    muon_momentum_warmup_start: float = setting(0.92, "Muon's momentum at step 0", least=0, below=1)
    muon_momentum_warmup_steps: int = setting(1500, "steps until Muon's full momentum", least=0)
    beta1: float = setting(0.9, "AdamW's beta1", least=0, below=1)
    beta2: float = setting(0.95, "AdamW's beta2", least=0, below=1)
    adam_eps: float = setting(1e-8, "AdamW's epsilon", above=0)
    grad_clip_norm: float = setting(0.3, "largest 2-norm of the whole gradient (0: no clipping)", least=0)
    adam_wd: float = setting(0.02, "weight decay of gains, gates and scales", least=0)
    muon_wd: float = setting(0.085, "weight decay of Muon's matrices: the dial of the artifact's size", least=0)
    embed_wd: float = setting(0.085, "weight decay of the tables", least=0)
    ema_decay: float = setting(0.997, "average of the weights that is quantised", least=0, below=1)
    # quantisation and artifact
    compressor: Literal["brotli", "lzma"] = setting("brotli", "brotli quality 11 or lzma preset 6")
    gptq_enabled: bool = setting(True, "GPTQ with Hessians from training data; else row search")
    gptq_calibration_batches: int = setting(64, "micro-batches for the Hessians", above=0)
    gptq_reserve_seconds: float = setting(10.0, "part of the cap kept for the Hessians", least=0)
    target_total_bytes: int = setting(15_990_000, "code plus artifact over it is quantised coarser (0: off)", least=0)
    control_tensor_name_patterns: str = setting(
        "attn_scale,mlp_scale,resid_mix,q_gain,skip_weight,skip_gates,ve_layer_scales,ve_shared.scale",
        "parameters that stay fp32 and out of Muon and int8, by part of name")

    # derived
    head_dim = property(lambda hp: hp.model_dim // hp.num_heads)
    ve_layer_list = property(lambda hp: [int(n) for n in re.findall(r"\d+", hp.ve_layers) if hp.ve_enabled])
    control_patterns = property(lambda hp: re.findall(r"[^,\s]+", hp.control_tensor_name_patterns))
    variant = property(lambda hp: hp.transform and f"_{hp.transform}")
    snapshots = property(lambda hp: Path(hp.output_dir, "checkpoints"))
    dataset_dir = property(lambda hp: Path(hp.data_dir, f"datasets/fineweb10B_sp{hp.vocab_size}{hp.variant}"))
    tokenizer_path = property(lambda hp: Path(hp.data_dir, f"tokenizers/fineweb_{hp.vocab_size}_bpe{hp.variant}.model"))
    fetch = property(
        lambda hp: f"`python data/cached_challenge_fineweb.py --variant sp{hp.vocab_size}{hp.variant}` or set DATA_DIR")
    train_cap_seconds = property(  # so that the Hessians still fit; 0: no cap
        lambda hp: max(0.0, hp.max_wallclock_seconds - hp.gptq_reserve_seconds * hp.gptq_enabled))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Hyperparameters:
        """Settings from environment variables. Raises SetupError with all problems."""
        hints, values, problems = get_type_hints(cls), {}, []
        for item in fields(cls):
            try:
                if (raw := environ.get(item.name.upper())) is not None:
                    values[item.name] = parse_setting(raw, hints[item.name], item.metadata["bounds"])
            except ValueError as error:
                problems.append(f"{item.name.upper()}={raw!r} {error}")
        hp, known = cls(**values), [*map(str.upper, hints), *IGNORED_SETTINGS]
        misspelt = [f"{name} is no setting; did you mean {near[0]}? (rename or unset it)" for name in sorted(environ)
                    if name not in known and (near := close_settings(name.upper(), known))]
        if problems := misspelt + (problems or conflicts(hp)):  # conflicts need sane values
            raise SetupError("settings:\n" + "\n".join(f"  - {p}" for p in problems))
        return hp

def close_settings(name: str, known: list[str]) -> list[str]:
    """Settings that `name` may be meant for: alike on the whole, or, since short names never are, but for one slip."""
    def slips(other: str) -> bool:
        wrong = [pair for pair in zip(name, other) if pair[0] != pair[1]]
        return len(name) == len(other) and (len(wrong) == 1 or (len(wrong) == 2 and wrong[0] == wrong[1][::-1]))
    return difflib.get_close_matches(name, known, 1, 0.87) or [*filter(slips, known)]

def parse_setting(raw: str, kind: Any, bounds: Mapping[str, float]) -> Any:
    """One environment value as bool (0 or 1), int, float, str or one of a Literal's choices. Raises ValueError."""
    if choices := ("0", "1") if kind is bool else get_args(kind):
        if raw not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return raw == "1" if kind is bool else raw
    try:
        value = kind(raw)
        if kind is float and not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise ValueError(f"must be a {'whole' if kind is int else 'finite'} number") from None
    for bound, limit in bounds.items():
        words, holds = {"least": ("at least", value >= limit), "above": ("greater than", value > limit),
                        "most": ("at most", value <= limit), "below": ("below", value < limit)}[bound]
        if not holds:
            raise ValueError(f"must be {words} {limit}")
    return value

def format_setting(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)

def conflicts(hp: Hyperparameters) -> list[str]:
    """Every broken rule between settings, as a message with values, rule and remedy."""
    layers, rotated = hp.ve_layer_list, hp.rope_dims or hp.head_dim
    fits = [n for n in range(1, hp.model_dim + 1) if hp.model_dim % (2 * n) == 0]
    rules = [
        ("NUM_HEADS", hp.num_heads in fits, f"must cut MODEL_DIM={hp.model_dim} into heads of even size: {fits}"),
        ("NUM_KV_HEADS", hp.num_heads % hp.num_kv_heads == 0, f"must divide NUM_HEADS={hp.num_heads}"),
        ("ROPE_DIMS", rotated % 2 == 0 and 4 <= rotated <= hp.head_dim,
         f"must be 0 or an even number from 4 to the head size {hp.head_dim}"),
        ("MLP_MULT", hp.mlp_mult * hp.model_dim >= 1, f"times MODEL_DIM={hp.model_dim} must be at least 1"),
        ("XSA_LAST_N", hp.xsa_last_n <= hp.num_layers, f"must be at most NUM_LAYERS={hp.num_layers}"),
        ("VE_LAYERS", re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*|", hp.ve_layers) and len({*layers}) == len(layers)
         and max(layers, default=0) < hp.num_layers, f"must be different numbers below NUM_LAYERS={hp.num_layers}"),
        ("EVAL_STRIDE", hp.eval_stride <= hp.eval_seq_len, f"must be at most EVAL_SEQ_LEN={hp.eval_seq_len}"),
        ("MAX_WALLCLOCK_SECONDS", hp.max_wallclock_seconds <= 0 or hp.train_cap_seconds > 0,
         f"must be over GPTQ_RESERVE_SECONDS={hp.gptq_reserve_seconds}, or 0 for no cap"),
        ("RUN_ID", re.fullmatch(r"[\w.@+-]*", hp.run_id), "names files: use letters, digits and . _ @ + - only")]
    return [f"{name}={getattr(hp, name.lower())!r} {rule}" for name, holds, rule in rules if not holds]

@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut: `grad_accum_steps` forwards of `micro_sequences` on each rank."""
    grad_accum_steps: int
    micro_sequences: int
    draw_windows: int  # windows of one loader draw, over all ranks
    eval_sequences: int  # sequences of one evaluation forward

def plan_batches(hp: Hyperparameters, world_size: int) -> BatchPlan:
    """Cuts TRAIN_BATCH_TOKENS over ranks and accumulation. Raises SetupError naming sizes that divide."""
    batch, unit = hp.train_batch_tokens, world_size * hp.train_seq_len
    per_rank, rest = divmod(batch, unit)
    if rest:
        fits = " or ".join(str(n * unit) for n in (per_rank, per_rank + 1) if n)
        raise SetupError(f"TRAIN_BATCH_TOKENS={batch} must be a multiple of {unit}, ranks x TRAIN_SEQ_LEN; use {fits}")
    divisors = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    micro = hp.micro_batch_tokens / hp.train_seq_len or per_rank / max(1, 8 / world_size)
    if micro not in divisors:
        raise SetupError(f"MICRO_BATCH_TOKENS={hp.micro_batch_tokens} must cut a rank's {per_rank * hp.train_seq_len} "
                         f"tokens; set MICRO_BATCH_TOKENS to one of {[n * hp.train_seq_len for n in divisors]}")
    accum, micro = per_rank // int(micro), int(micro)
    eval_sequences = max(1, hp.val_batch_tokens // (world_size * accum) // hp.eval_seq_len)
    return BatchPlan(accum, micro, micro * world_size, eval_sequences)

# ---- Machine: ranks, device, clock, log ------------------------------------------------------------------------------

@dataclass(frozen=True)
class World:
    """Place of this process among all ranks, and every collective the file uses; with one rank each is the identity."""
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: Any = None  # group and stream for small messages, which must not wait for queued GPU work
    control_stream: Any = None
    saver: Any = None  # group for the thread that writes snapshots
    is_main = property(lambda self: self.rank == 0)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Every rank's numbers, in rank order, on every rank."""
        if self.size == 1:
            return [values]
        with torch.cuda.stream(self.control_stream):
            mine = torch.tensor(values, dtype=torch.float64, device=self.device)
            rows = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(rows, mine, group=self.control)
            return torch.stack(rows).tolist()

    def fetch(self, scalar: Tensor) -> Callable[[], float]:
        """Starts copying a number to the host; the returned call waits for it, not for work queued afterwards."""
        if self.device.type != "cuda":
            return lambda: float(scalar)
        host, done = torch.empty((), dtype=scalar.dtype, pin_memory=True), torch.cuda.Event()
        host.copy_(scalar, non_blocking=True)
        done.record()
        def wait() -> float:
            done.synchronize()
            return float(host)
        return wait

    def gather_stacked(self, part: Tensor) -> tuple[Tensor, Any]:
        """All ranks' equal parts, stacked along the first dimension, and the work to wait for (None with one rank)."""
        if self.size == 1:
            return part, None
        everyone = part.new_empty(self.size * part.size(0), *part.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in PyTorch 2.13
        return everyone, gather(everyone, part, async_op=True)

    def sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor
    def broadcast_weights(self, model: nn.Module) -> None:
        """Rank 0's weights everywhere: other nodes' processors may round the initialisation differently."""
        for tensor in model.state_dict().values() if self.size > 1 else ():
            dist.broadcast(tensor, src=0)
    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's picklable value on every rank, also on nodes that do not see rank 0's disk."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

def rank_share(count: int, rank: int, world_size: int) -> range:
    """The part [count * rank // world, count * (rank + 1) // world) of `count` items that belongs to one rank."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)

def choose_device(wanted: str, local_rank: int) -> torch.device:
    """cuda, else mps (untested by us), else cpu; a name forces one. Raises SetupError when it is not there."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(n for n in present if present[n]) if wanted == "auto" else wanted
    if not present[name]:
        raise SetupError(f"DEVICE={name}, but PyTorch {torch.__version__} finds none; unset DEVICE")
    if name == "cuda" and local_rank >= (count := torch.cuda.device_count()):
        raise SetupError(f"LOCAL_RANK={local_rank}, but {count} GPUs are visible; use --nproc_per_node={count}")
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)

def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    if wanted != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[wanted], f"PRECISION={wanted}"
    if device.type != "cuda":
        return torch.float32, device.type
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "the GPU has bf16"
    return torch.float32, "WARNING: no bf16 on this GPU: slower, twice the memory"

def choose_compile(wanted: str, device: torch.device) -> tuple[bool, str]:
    if wanted != "auto":
        return wanted == "1", f"COMPILE={wanted}"
    if device.type != "cuda":
        return False, f"{device.type}; COMPILE=1 forces it"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return False, f"WARNING: slow eager mode, no Triton ({error})"
    return True, "CUDA and Triton"

def read_ranks(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """torchrun's rank, number of ranks and rank on this machine. Raises SetupError when others set them."""
    try:
        rank, size, local = (int(environ.get(*item)) for item in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    except ValueError as error:
        raise SetupError(f"RANK, WORLD_SIZE and LOCAL_RANK are torchrun's ({error}); unset them") from None
    if size > 1 and "MASTER_ADDR" not in environ:
        raise SetupError(f"WORLD_SIZE={size} without MASTER_ADDR; start with torchrun, or unset WORLD_SIZE")
    return rank, size, local

def join_world(hp: Hyperparameters, environ: Mapping[str, str]) -> World:
    """Reads torchrun's variables, picks the device and joins the process group when there are several ranks."""
    rank, size, local_rank = read_ranks(environ)
    device = choose_device(hp.device, local_rank)
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    if size > 1:
        # Half an hour: the longest wait is for rank 0's compression, at most 6 tries of 76 to 116 s.
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=30), device_id=gpu)
    control, saver = (dist.new_group(), dist.new_group(backend="gloo")) if size > 1 else (None, None)
    return World(rank, size, device, control, torch.cuda.Stream(gpu) if gpu else None, saver)

def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

def peak_memory_mib(device: torch.device) -> tuple[int, int]:
    """Peak MiB (allocated, reserved) on the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20, torch.cuda.max_memory_reserved(device) >> 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource else 0
    return (peak >> (20 if sys.platform == "darwin" else 10),) * 2  # it is in bytes on macOS, in KiB on Linux

class Stopwatch:
    """The training clock: it counts only between start() and stop(), and only it is held against the cap."""
    def __init__(self, seconds: float = 0.0) -> None:
        self._total, self._since = seconds, None
    @property
    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else time.perf_counter() - self._since)
    def start(self) -> None:
        self._since = time.perf_counter()
    def stop(self) -> None:
        self._total, self._since = self.seconds, None

class RunLog:
    """Rank 0's log: a text file in the published layout, a .jsonl of records, the console; without a folder nothing."""
    def __init__(self, folder: Path | None, run_id: str) -> None:
        self._files = {ending: (folder / f"{run_id}.{ending}").open("x", encoding="utf-8", buffering=1)
                       for ending in ("txt", "jsonl") if folder}
    def __call__(self, line: str, console: bool = True) -> None:
        self._write("txt", line)
        if self._files and console:
            with contextlib.suppress(OSError):  # a closed console must not end a paid run either
                tqdm.write(line)
                sys.stdout.flush()
    def record(self, kind: str, **values: Any) -> None:
        self._write("jsonl", json.dumps({"type": kind, **values}))
    def _write(self, ending: str, line: str) -> None:
        try:
            if self._files:
                self._files[ending].write(line + "\n")
        except OSError as error:  # a full disk must not end a paid run
            print(f"WARNING: {self._files[ending].name} was not written ({error})", file=sys.stderr)

def write_file(path: Path, data: bytes) -> None:
    """Writes under a temporary name, syncs and renames: a full disk never leaves half a file under `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as error:  # a failed write alone does not name its file
        raise OSError(error.errno, f"{error.strerror}; free some space or set OUTPUT_DIR", str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)

# ---- Data: tokenizer bytes, shards, validation tokens, coprime-stride loader -----------------------------------------

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_INTS = 20240520, 1, 256
BOS_ID = 1
SPACE_MARKER = "\u2581"  # SentencePiece's visible space; an escape, since encoding accidents have faked scores

@dataclass(frozen=True)
class ByteTables:
    """UTF-8 bytes of each token: `base_bytes` int16, `has_leading_space` and `is_boundary` bool, all (vocab,)."""
    base_bytes: np.ndarray
    has_leading_space: np.ndarray
    is_boundary: np.ndarray
    note: str = ""  # why a score with them compares with no other

    def count(self, tokens: np.ndarray) -> int:
        """Bytes of tokens[1:], each after its predecessor: a piece's space counts unless a boundary comes before."""
        spaces = self.has_leading_space[tokens[1:]] & ~self.is_boundary[tokens[:-1]]
        return int(self.base_bytes[tokens[1:]].sum(dtype=np.int64) + spaces.sum())

PLAIN_TEXT = "The Quick Brown Fox, 2 Dogs & I: 'OK?'"  # the recipe's normalisation leaves it as it is

def byte_tables(tokenizer: Any, transform: str = "") -> ByteTables:
    """Tables of a SentencePiece processor. Raises SetupError when it has no piece for a lone space, or a piece that is
    damaged or, without a transform whose bytes come from files, would be counted wrongly."""
    if tokenizer.piece_to_id(SPACE_MARKER) == tokenizer.unk_id():
        raise SetupError("the tokenizer has no piece for a space (U+2581); train it on text with spaces")
    ids = range(tokenizer.vocab_size())
    boundary = [tokenizer.is_control(i) or tokenizer.is_unknown(i) or tokenizer.is_unused(i) for i in ids]
    try:
        pieces = ["" if boundary[i] else "x" if tokenizer.is_byte(i) else tokenizer.id_to_piece(i) for i in ids]
    except UnicodeDecodeError as error:
        raise SetupError(f"a piece of the tokenizer is damaged ({error}); fetch it again") from None
    if (inner := [piece for piece in pieces if SPACE_MARKER in piece[1:]]) and not transform:
        raise SetupError(f"the tokenizer's piece {inner[0]!a} has a space that is not its first character and would "
                         "count as 3 bytes; train one whose pieces have spaces in front only")
    changed = not transform and tokenizer.decode(tokenizer.encode(PLAIN_TEXT)) != PLAIN_TEXT
    note = "; UNOFFICIAL TOKENIZER: it changes plain text, such as upper case" * changed
    sizes = [len(piece.removeprefix(SPACE_MARKER).encode()) for piece in pieces]
    spaces = [piece.startswith(SPACE_MARKER) for piece in pieces]
    return ByteTables(np.array(sizes, np.int16), np.array(spaces), np.array(boundary), note)

def load_tokenizer(hp: Hyperparameters) -> Any:
    """The SentencePiece processor of this run. Raises SetupError when missing or of another size."""
    try:
        import sentencepiece
    except ImportError as error:
        raise SetupError(f"{error}; pip install sentencepiece") from None
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(hp.tokenizer_path))
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # the last: a message that quotes a damaged piece
        raise SetupError(f"no tokenizer at {hp.tokenizer_path} ({error}); {hp.fetch}") from None
    if (size := tokenizer.vocab_size()) != hp.vocab_size:
        raise SetupError(f"VOCAB_SIZE={hp.vocab_size} must be {size}, the pieces of {hp.tokenizer_path}")
    return tokenizer

def shard_tokens(path: Path) -> int:
    """Token count of a shard, with header and file size checked. Raises SetupError."""
    header, size = np.fromfile(path, "<i4", SHARD_HEADER_INTS).tolist(), path.stat().st_size
    count = header[2] if len(header) == SHARD_HEADER_INTS else 0
    expected = SHARD_HEADER_INTS * 4 + 2 * count
    if header[:2] != [SHARD_MAGIC, SHARD_VERSION] or size != expected:
        raise SetupError(f"{path} must begin with {SHARD_MAGIC}, {SHARD_VERSION} and have {expected} bytes, not "
                         f"{header[:2]} and {size}; fetch it again")
    return count

def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard as a read-only uint16 memory map. Raises SetupError."""
    shard_tokens(path)
    return np.memmap(path, "<u2", "r")[2 * SHARD_HEADER_INTS:]
def find_shards(hp: Hyperparameters, split: str) -> list[Path]:
    if paths := sorted(hp.dataset_dir.glob(f"fineweb_{split}_*.bin")):
        return paths
    raise SetupError(f"no {split} shards in {hp.dataset_dir}; {hp.fetch}")
def check_token_ids(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    if tokens.max(initial=0) >= vocab_size:
        raise SetupError(f"{path} holds token {tokens.max()}, but VOCAB_SIZE={vocab_size}; fetch both again")

def check_train_shards(hp: Hyperparameters) -> list[Path]:
    """Train shards in order, with headers, sizes and the first ids of each checked. Raises SetupError."""
    paths, total = find_shards(hp, "train"), 0
    for path in paths:
        tokens = open_shard(path)
        check_token_ids(tokens[:65_536], hp.vocab_size, path)
        total += len(tokens)
    if total <= hp.train_batch_tokens:
        raise SetupError(f"{total} train tokens must exceed TRAIN_BATCH_TOKENS={hp.train_batch_tokens}; fetch more")
    return paths

@dataclass(frozen=True)
class ValidationSet:
    """Tokens (uint16) to score and the bytes that their targets stand for."""
    tokens: np.ndarray
    target_bytes: int
    note: str  # what the number of bytes stands for
    targets = property(lambda self: len(self.tokens) - 1)

    def bits_per_byte(self, mean_loss: float) -> float:
        """Mean nats per target token -> bits per byte."""
        return mean_loss / math.log(2) * self.targets / self.target_bytes

def load_validation(hp: Hyperparameters, tables: ByteTables) -> ValidationSet:
    """All validation shards, joined and cut to whole sequences plus one token. Raises SetupError."""
    paths, manifest = find_shards(hp, "val"), Path(hp.data_dir) / "manifest.json"
    tokens = np.concatenate([open_shard(path) for path in paths])
    check_token_ids(tokens, hp.vocab_size, hp.dataset_dir)
    if len(tokens) <= hp.eval_seq_len:
        raise SetupError(f"{len(tokens)} val tokens must exceed EVAL_SEQ_LEN={hp.eval_seq_len}; fetch more")
    rest = (len(tokens) - 1) % hp.eval_seq_len
    used = tokens[:len(tokens) - rest]
    try:
        datasets = json.loads(manifest.read_text("utf-8"))["datasets"] if manifest.is_file() else []
        entry = next((dict(d) for d in datasets if d["name"] == hp.dataset_dir.name), {})
        count = sidecar_count(hp, entry, paths, len(tokens)) if hp.transform else tables.count
        whole = {"docs_val": int((tokens == BOS_ID).sum()), "tokens_val": len(tokens),
                 "bytes_val_normalised": count(tokens)}
        if (target_bytes := count(used)) < 1:
            raise SetupError(f"the val tokens stand for {target_bytes} bytes; fetch shards and manifest again")
        note = f"normalised text; {rest} tail tokens not scored; {check_manifest(hp, entry, whole)}{tables.note}"
    except SetupError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SetupError(f"{manifest} is damaged ({error!r}); fetch it again or remove it") from None
    return ValidationSet(used, target_bytes, note)

def sidecar_count(hp: Hyperparameters, entry: dict, paths: list[Path], n: int) -> Callable[[np.ndarray], int]:
    """Bytes of the original text behind the first tokens, from the files beside the shards. Raises SetupError."""
    sidecar = entry.get("bytes_sidecar") or {}
    files = [path.with_suffix(sidecar.get("suffix", ".bytes")) for path in paths]
    if not sidecar or not all(file.is_file() for file in files):
        raise SetupError(f"TRANSFORM={hp.transform} needs manifest.json and a .bytes file beside each val shard")
    sizes = np.concatenate([np.fromfile(file, np.dtype(sidecar["dtype"]).newbyteorder("<")) for file in files])
    if len(sizes) != n:
        raise SetupError(f"{n} val tokens, but {len(sizes)} in their .bytes files; fetch both again")
    return lambda tokens: int(sizes[1:len(tokens)].sum(dtype=np.int64))

def check_manifest(hp: Hyperparameters, entry: dict[str, Any], whole: dict[str, int]) -> str:
    """The whole validation split against the manifest, in words. Raises SetupError: such a score compares with none."""
    stats, splits = entry.get("stats") or {}, entry.get("splits") or {}
    if wrong := [f"{name} {stats[name]}, found {n}" for name, n in whole.items() if stats.get(name, n) != n]:
        raise SetupError(f"{hp.dataset_dir} is not that of manifest.json ({'; '.join(wrong)}); {hp.fetch}")
    listed = {row["name"]: row.get("sha256") for row in entry.get("files") or []}
    for path in hp.dataset_dir.glob("fineweb_val_*.bin"):
        if listed.get(path.name) not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
            raise SetupError(f"{path.name} is not that of manifest.json (sha256); {hp.fetch}")
    if {"val", "train"} <= {*splits}:
        (a, b), (c, d) = ((splits[split]["first_doc"], splits[split]["last_doc"]) for split in ("val", "train"))
        if a <= d and c <= b:
            raise SetupError(f"val documents {a} to {b} and train documents {c} to {d} overlap; export them again")
    note = ", ".join(f"{count} {name}" for name, count in whole.items())
    note += f", {stats['bytes_val_source']} source bytes" if "bytes_val_source" in stats else ""
    known = "yes" if {*whole} <= {*stats} else "as far as it says" if {*whole} & {*stats} else "it says nothing"
    unofficial = "; UNOFFICIAL SPLIT" * bool(entry.get("unofficial_split"))
    return f"whole split: {note}; matches manifest: {known}{unofficial}"

def draw_walk(rng: np.random.Generator, tokens: int, seq_len: int) -> tuple[int, Iterator[int]]:
    """A walk over a shard of more than seq_len tokens: the number of its blocks and their first tokens, each once."""
    phase = int(rng.integers(min(seq_len, tokens - seq_len)))
    blocks = (tokens - 1 - phase) // seq_len
    start, stride = int(rng.integers(blocks)), 0  # (a choice among one number takes nothing from `rng`)
    while math.gcd(stride, blocks) != 1:  # coprime: all blocks come
        stride = int(rng.integers(1, blocks))
    return blocks, (phase + seq_len * ((start + i * stride) % blocks) for i in range(blocks))

MIX_RAMP_DRAWS = 1800  # the recipe's: over these the mix of shards widens and their weights even out

class CoprimeLoader:
    """The recipe's data order, alike on all ranks and in each new loader: each draw mixes windows of many shards."""
    def __init__(self, paths: list[Path], seq_len: int, draw_windows: int, rank: int = 0, world_size: int = 1,
                 vocab_size: int = 65536) -> None:
        self.paths, self.seq_len, self.draw_windows, self.vocab_size = paths, seq_len, draw_windows, vocab_size
        self.rank, self.world_size, self.draws = rank, world_size, 0
        self.lengths = [shard_tokens(path) for path in paths]
        self.walks: dict[int, Iterator[int]] = {}  # by shard
        self.blocks_left = {i: (n - 1) // seq_len for i, n in enumerate(self.lengths) if n > seq_len}
        if not self.blocks_left:
            raise SetupError(f"no train shard has more than TRAIN_SEQ_LEN={seq_len} tokens; fetch more or lower it")
        # FNV-style 64-bit fold over the bytes of all paths: the data order depends on names alone
        seed = reduce(lambda fold, byte: (fold ^ byte) * 1099511628211 % 2**64, "".join(map(str, paths)).encode(), 0)
        self.rng = np.random.Generator(np.random.PCG64(seed))

    def next_windows(self) -> list[tuple[int, int]]:
        """(shard, first token) of all ranks' windows of the next draw."""
        progress = min(self.draws / MIX_RAMP_DRAWS, 1.0)
        self.draws += 1
        weights = np.maximum([*self.blocks_left.values()], 1.0) ** (0.90 - 0.40 * progress)
        shards, p = list(self.blocks_left), weights / weights.sum()
        low, high = (min(max(least, each * self.world_size), len(shards), self.draw_windows)
                     for least, each in ((8, 1), (32, 8)))
        mix = round(low + progress * (high - low))
        chosen = self.rng.choice(len(shards), size=mix, replace=False, p=p)
        counts = 1 + self.rng.multinomial(self.draw_windows - mix, p[chosen] / p[chosen].sum())
        buckets = [self._take(shards[chosen[k]], int(counts[k])) for k in self.rng.permutation(mix)]
        windows = []
        while buckets:  # rounds of one window from each shard, the shards in a new order each round
            buckets = [buckets[k] for k in self.rng.permutation(len(buckets))]
            windows += [bucket.pop() for bucket in buckets]
            buckets = [bucket for bucket in buckets if bucket]
        return windows

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """This rank's inputs and targets of the next draw, int64, each (draw_windows / world_size, seq_len)."""
        mine = self.next_windows()[self.rank::self.world_size]
        rows = np.stack([self._read(shard, start) for shard, start in mine])
        check_token_ids(rows, self.vocab_size, self.paths[mine[int(rows.max(axis=1).argmax())][0]])
        rows = rows.astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    def _read(self, shard: int, start: int) -> np.ndarray:
        """Read, not mapped: a mapped file that shrinks or whose disk fails would kill the process without a word."""
        path, count = self.paths[shard], self.seq_len + 1
        tokens = np.fromfile(path, "<u2", count, offset=4 * SHARD_HEADER_INTS + 2 * start)
        if len(tokens) < count:
            raise SetupError(f"{path} ends before token {start + count}: it changed; fetch it again")
        return tokens

    def _take(self, shard: int, count: int) -> list[tuple[int, int]]:
        windows = []
        for _ in range(count):
            if shard not in self.walks or not self.blocks_left[shard]:
                self.blocks_left[shard], self.walks[shard] = draw_walk(self.rng, self.lengths[shard], self.seq_len)
            self.blocks_left[shard] -= 1
            windows.append((shard, next(self.walks[shard])))
        return [windows[k] for k in self.rng.permutation(count)]

class Prefetcher:
    """Reads a loader ahead in a thread. Each batch has its own pinned memory, so none is overwritten in flight.

    A step queues all its micro-batches at once: with fewer of them ahead its last ones waited, 3 ms in a step of 4."""
    def __init__(self, loader: CoprimeLoader, device: torch.device, clock: Stopwatch, ahead: int) -> None:
        self.loader, self.device, self.clock = loader, device, clock
        self.last_read_seconds = self.wait_seconds = 0.0  # of batches in use: those ahead at the end never are
        self._thread = ThreadPoolExecutor(1)
        self._ahead = deque(self._thread.submit(self._read) for _ in range(ahead))
    def _read(self) -> tuple[list[Tensor], float]:
        batch = [torch.from_numpy(np.ascontiguousarray(part)) for part in self.loader.next_batch()]
        seconds = self.clock.seconds
        return [part.pin_memory() for part in batch] if self.device.type == "cuda" else batch, seconds

    def next(self) -> list[Tensor]:
        """Inputs and targets on the device, int64 (sequences, seq_len); waits for the reader or raises its error."""
        began = time.perf_counter()
        batch, self.last_read_seconds = self._ahead.popleft().result()
        self._ahead.append(self._thread.submit(self._read))
        self.wait_seconds += time.perf_counter() - began
        return [part.to(self.device, non_blocking=True) for part in batch]

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

# ---- Attention: one entry point, chosen by a probe -------------------------------------------------------------------

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal; q (B, T, H, D), k and v (B, T, KV, D) -> as q

def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's kernel, the one that `use_sdpa_backend` left on."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)
def use_sdpa_backend(name: str) -> None:
    for backend in ("cudnn", "flash", "math", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(backend == name)

def fa3_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-3. Raises ImportError when the package is not there."""
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True)
    return out[0] if isinstance(out, tuple) else out  # some versions also return the log-sum-exp

def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, written out: what every kernel must equal."""
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
    future = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)

def random_inputs(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]

def largest_error(function: Callable[..., Any], twin: Callable[..., Any], inputs: list[Tensor],
                  constants: Iterable[Any] = ()) -> float:
    """Largest |ours - twin| / |twin| over outputs and gradients, NaN if one is; the twin computes in fp32."""
    results = []
    for run, values in ((function, inputs), (twin, [x.detach().float().requires_grad_() for x in inputs])):
        out = run(*values, *constants)
        outs = out if isinstance(out, tuple) else (out,)
        gradients = torch.autograd.grad(sum(o.float().square().sum() for o in outs), values)
        results.append([t.detach().float() for t in (*outs, *gradients)])
    return float(torch.stack([(ours - twins).norm() / twins.norm() for ours, twins in zip(*results)]).max())

def hopper_or_newer(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

def choose_attention(hp: Hyperparameters, device: torch.device, dtype: torch.dtype) -> tuple[AttentionFunction, str]:
    """FlashAttention-3, else cuDNN on Hopper or newer, else flash, else math, and why; ATTENTION forces one.

    Each is tried forward and backward: builds exist that import and fail at the first launch. Raises SetupError."""
    forced, refused, kv_shape = hp.attention != "auto", [], (2, 96, hp.num_kv_heads, hp.head_dim)
    inputs = random_inputs(device, dtype, (2, 96, hp.num_heads, hp.head_dim), kv_shape, kv_shape)
    for name in [hp.attention] if forced else ["fa3", "cudnn", "flash", "math"]:
        try:
            if name == "cudnn" and not (device.type == "cuda" if forced else hopper_or_newer(device)):
                raise RuntimeError("needs a CUDA GPU; slower than flash before Hopper")
            if name != "fa3":
                use_sdpa_backend(name)
            function = fa3_attention if name == "fa3" else sdpa_attention
            if not (error := largest_error(function, math_attention, inputs)) < 3e-2:  # bf16 rounding is under 1e-2
                raise RuntimeError(f"its result is off by {error:.1e}")
            reason = f"ATTENTION={name}" if forced else "; ".join(refused) or "first choice"
            return function, f"{name} ({reason})"
        except (ImportError, RuntimeError, AttributeError, TypeError) as error:
            refused.append(f"{name}: {first_line(error)}")
    raise SetupError(f"ATTENTION={hp.attention} cannot be used here: {'; '.join(refused)}; unset ATTENTION")

# ---- Operations: plain PyTorch, and the Triton kernels that must equal it --------------------------------------------

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the plain functions are used, and the log says so
    triton = None

QKV = tuple[Tensor, Tensor, Tensor]  # (B, T, H, D), (B, T, KV, D), (B, T, KV, D)
Rope = tuple[Tensor, Tensor]  # cos and sin, each (T, 1, rotated dims / 2)
RMS_EPS = 2.0 ** -23  # F.rms_norm's default: fp32's epsilon, also for bf16
HEAD_ROWS = 64  # tokens of a program that works on one head
MLP_TILE = (128, 128, 64)  # rows, columns and depth; measured best of 25 variants on an H200, with 3 stages and 8 warps

jit = triton.jit if triton else lambda function: function

def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

def rope_tables(hp: Hyperparameters, length: int, device: torch.device, dtype: torch.dtype) -> Rope:
    """Tables for `length` positions, computed in fp32; the base grows beyond the training length."""
    dims = hp.rope_dims or hp.head_dim
    base = hp.rope_base * max(1.0, length / hp.train_seq_len) ** (dims / (dims - 2))
    frequencies = base ** -(torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first dims of each head, as halves (a, b); x (B, T, H, D)."""
    half = cos.size(-1)
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)
def split_qkv(qkv: Tensor, value: Tensor | None, gain: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> QKV:
    """One product (B, T, (H + 2 KV) D) -> normed, rotated q (times `gain` (H)) and k, and v (plus `value`)."""
    q, k, v = qkv.unflatten(-1, (len(gain) + 2 * kv_heads, -1)).split([len(gain), kv_heads, kv_heads], dim=2)
    q = rotate(rms_norm(q), cos, sin) * gain.to(q.dtype)[:, None]
    return q, rotate(rms_norm(k), cos, sin), v if value is None else v + value.view_as(v)

@jit
def split_qkv_kernel(x_ptr, value_ptr, gain_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, dx_ptr, dgain_ptr, tokens,
                     length, heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, half: tl.constexpr,
                     eps: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):
    """A tile (rows, width), one head of some tokens, from x to q, k or v.

    With `dx_ptr` q, k and v hold their gradients, and the tile goes back to the gradients of x and gain.
    """
    head, column = tl.program_id(1), tl.arange(0, width)[None, :]
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    inside, token = (row < tokens) & (column < dim), row.to(tl.int64)
    x_at = (token * (heads + 2 * kv_heads) + head) * dim + column
    own_at = tl.where(head < heads, token * heads + head, token * kv_heads + (head - heads) % kv_heads) * dim + column
    own_ptr, gain = v_ptr, 1.0
    if head < heads:
        own_ptr, gain = q_ptr, tl.load(gain_ptr + head)
    elif head < heads + kv_heads:
        own_ptr = k_ptr
    from_at = x_ptr + x_at if dx_ptr is None else own_ptr + own_at
    if head >= heads + kv_heads:
        y = tl.load(from_at, mask=inside, other=0.0).to(tl.float32)
        if value_ptr is not None:
            y += tl.load(value_ptr + own_at, mask=inside, other=0.0).to(tl.float32)
    else:
        rope_at, first, rotated = row % length * half + column % half, column < half, column < 2 * half
        cos = tl.load(cos_ptr + rope_at, mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + rope_at, mask=rotated, other=0.0).to(tl.float32)
        sin = tl.where(first == (dx_ptr is None), sin, -sin)
        partner_at = from_at + tl.where(rotated, tl.where(first, half, -half), 0)
        y = tl.load(from_at, mask=inside, other=0.0).to(tl.float32)
        x = y if dx_ptr is None else tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
        y = y * cos + tl.load(partner_at, mask=inside, other=0.0).to(tl.float32) * sin
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / dim + eps)
        if dx_ptr is not None:
            x *= scale[:, None]
            along = tl.sum(y * x, axis=1)
            y -= x * (along / dim)[:, None]
            if head < heads:
                tl.store(dgain_ptr + tl.program_id(0) * heads + head, tl.sum(along))
        y *= (scale * gain)[:, None]
    tl.store(own_ptr + own_at if dx_ptr is None else dx_ptr + x_at, y.to(x_ptr.dtype.element_ty), mask=inside)

class SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, value, gain, cos, sin, kv_heads):
        (batch, length, width), heads = qkv.shape, len(gain)
        dim = width // (heads + 2 * kv_heads)
        q, k, v = (qkv.new_empty(batch, length, n, dim) for n in (heads, kv_heads, kv_heads))
        ctx.grid, ctx.has_value = (-(-batch * length // HEAD_ROWS), heads + 2 * kv_heads), value is not None
        tile = (HEAD_ROWS, 1 << (dim - 1).bit_length())  # powers of two
        ctx.sizes = (batch * length, length, heads, kv_heads, dim, cos.size(-1), RMS_EPS, *tile)
        ctx.save_for_backward(qkv, gain, cos, sin)
        split_qkv_kernel[ctx.grid](qkv, value, gain, cos, sin, q, k, v, None, None, *ctx.sizes)
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, gain, cos, sin = ctx.saved_tensors
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        dqkv, dgain = torch.empty_like(qkv), gain.new_empty(ctx.grid[0], len(gain))
        split_qkv_kernel[ctx.grid](qkv, None, gain, cos, sin, dq, dk, dv, dqkv, dgain, *ctx.sizes)
        return dqkv, dv.flatten(2) if ctx.has_value else None, dgain.sum(0), None, None, None

def remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    """XSA (Zhai 2026, arXiv:2603.09078): drops from each head's output (B, T, H, D) its part along the value
    (B, T, KV, D) at the same position."""
    direction = F.normalize(v, dim=-1).unsqueeze(3)
    grouped = y.unflatten(2, (v.size(2), -1))
    return (grouped - (grouped * direction).sum(-1, keepdim=True) * direction).flatten(2, 3)
def leaky_square(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.5).square()
def mlp(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """leaky_square(x w_in^T) w_out^T; x (B, T, D), w_in (hidden, D), w_out (D, hidden)."""
    return F.linear(leaky_square(F.linear(x, w_in)), w_out)

@jit
def mlp_kernel(a_ptr, b_ptr, hidden_ptr, out_ptr, columns: tl.constexpr, depth: tl.constexpr, mode: tl.constexpr,
               bit: tl.constexpr, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    """A tile of a (M, depth) times b (N, depth) transposed; all are tensor descriptors, which cut what lies outside.

    evaluate: out = leaky_square(product). train: the same, the product's sign in its last mantissa bit (number `bit` of
    an fp32), so that the backward needs no second tensor. backward: out = product times the slope at `hidden`.
    """
    m, n = tl.program_id(0) // columns * bm, tl.program_id(0) % columns * bn  # neighbours share rows of a in the cache
    product = tl.zeros((bm, bn), dtype=tl.float32)
    for k in range(0, depth, bk):
        product = tl.dot(a_ptr.load([m, k]), b_ptr.load([n, k]).T, product)
    if mode == "backward":
        hidden = hidden_ptr.load([m, n]).to(tl.float32)
        root = tl.sqrt(hidden)
        product *= tl.where((hidden.to(tl.int32, bitcast=True) >> bit) & 1 == 1, -root, 2 * root)
    else:
        negative = (product < 0).to(tl.int32) << bit
        product *= product * tl.where(product < 0, 0.25, 1.0)
        if mode == "train":  # rounds to the nearest number with that bit
            half, step = 1 << bit, bit + 1
            bits = ((product.to(tl.int32, bitcast=True) - negative + half >> step) << step) | negative
            product = bits.to(tl.float32, bitcast=True)
    out_ptr.store([m, n], product.to(out_ptr.dtype))

def run_mlp_kernel(a: Tensor, b: Tensor, hidden: Tensor | None, mode: str) -> Tensor:
    """`mlp_kernel` on a (M, K), b (N, K) and, in the backward, hidden (M, N); returns (M, N)."""
    (m, k), n, (bm, bn, bk) = a.shape, len(b), MLP_TILE
    out = a.new_empty(m, n)
    operands = [TensorDescriptor.from_tensor(t, [rows, bk]) for t, rows in ((a, bm), (b, bn))]
    results = [TensorDescriptor.from_tensor(t, [bm, bn]) for t in (out if hidden is None else hidden, out)]
    columns = -(-n // bn)
    mlp_kernel[(-(-m // bm) * columns,)](*operands, *results, columns, k, mode, 16 if a.dtype == torch.bfloat16 else 0,
                                         bm, bn, bk, num_stages=3, num_warps=8)
    return out

class FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_in, w_out, training):
        hidden = run_mlp_kernel(x, w_in, None, "train" if training else "evaluate")
        ctx.save_for_backward(x, w_in, w_out, hidden)
        return F.linear(hidden, w_out)
    @staticmethod
    def backward(ctx, d):
        x, w_in, w_out, hidden = ctx.saved_tensors
        d = d.contiguous()
        d_product = run_mlp_kernel(d, w_out.T.contiguous(), hidden, "backward")
        return d_product @ w_in, d_product.T @ x, d.T @ hidden, None

def mlp_fused(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    return FusedMLP.apply(x.flatten(0, -2), w_in, w_out, torch.is_grad_enabled()).view_as(x)
def head_losses(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """fp32 nats of the targets (N) from the last activations (N, D), the head (V, D) and logits cap * tanh(z / cap)."""
    logits = cap * torch.tanh(F.linear(x, weight) / cap)
    return F.cross_entropy(logits.float(), targets, reduction="none")

@jit
def losses_kernel(logits_ptr, targets_ptr, losses_ptr, vocab, cap: tl.constexpr, gradient: tl.constexpr,
                  width: tl.constexpr):
    """A row's loss. With `gradient` the loss's gradient takes the row's place: logits are never stored twice."""
    row, column = tl.program_id(0), tl.arange(0, width)
    at, inside = logits_ptr + row.to(tl.int64) * vocab + column, column < vocab
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tanh = 1 - 2 / (1 + tl.exp(z * (2 / cap)))
    capped = tl.where(inside, cap * tanh, float("-inf"))
    top = tl.max(capped, axis=0)
    exps = tl.exp(capped - top)
    total = tl.sum(exps, axis=0)
    hit = column == tl.load(targets_ptr + row)
    tl.store(losses_ptr + row, top + tl.log(total) - tl.sum(tl.where(hit, capped, 0.0), axis=0))
    if gradient:
        dz = (exps / total - hit.to(tl.float32)) * (1 - tanh * tanh)
        tl.store(at, dz.to(logits_ptr.dtype.element_ty), mask=inside)

class HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, cap, training):
        logits = F.linear(x, weight)  # in training the kernel replaces them
        (rows, vocab), width = logits.shape, 1 << (weight.size(0) - 1).bit_length()
        losses = logits.new_empty(rows, dtype=torch.float32)
        losses_kernel[(rows,)](logits, targets, losses, vocab, cap, training, width,
                               num_warps=min(max(width // 512, 4), 32))
        ctx.save_for_backward(x, weight, logits)
        return losses

    @staticmethod
    def backward(ctx, d_losses):
        x, weight, d_logits = ctx.saved_tensors
        d_losses = d_losses.to(x.dtype)[:, None]
        return d_logits @ weight * d_losses, d_logits.T @ (x * d_losses), None, None, None

def head_losses_fused(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    return HeadLosses.apply(x, weight, targets, cap, torch.is_grad_enabled())

@dataclass(frozen=True)
class Operations:
    """What the model computes with: the plain functions, or others that equal them."""
    attend: AttentionFunction
    split_qkv: Callable[..., QKV] = split_qkv
    mlp: Callable[[Tensor, Tensor, Tensor], Tensor] = mlp
    head_losses: Callable[..., Tensor] = head_losses

def operation_cases(hp: Hyperparameters, device: torch.device, dtype: torch.dtype, batch: int,
                    length: int) -> dict[str, tuple[list[Tensor], list[Any]]]:
    """Each fused operation's arguments for `batch` random sequences: those that need gradients, then the others."""
    heads, kv_heads, width, hidden = hp.num_heads, hp.num_kv_heads, hp.model_dim, int(hp.mlp_mult * hp.model_dim)
    qkv, value, gain, x, w_in, w_out, w_head = random_inputs(
        device, dtype, (batch, length, (heads + 2 * kv_heads) * hp.head_dim), (batch, length, kv_heads * hp.head_dim),
        (heads,), (batch, length, width), (hidden, width), (width, hidden), (hp.vocab_size, width))
    targets = torch.arange(batch * length, device=device) % hp.vocab_size
    return {"split_qkv": ([qkv, value, gain.float()], [*rope_tables(hp, length, device, dtype), kv_heads]),
            "mlp": ([x, w_in / width ** 0.5, w_out / hidden ** 0.5], []),
            "head_losses": ([x.flatten(0, 1), w_head / 5], [targets, hp.logit_softcap])}

def choose_operations(hp: Hyperparameters, attend: AttentionFunction, device: torch.device,
                      dtype: torch.dtype) -> tuple[Operations, str]:
    """The Triton kernels on Hopper or newer GPUs in bf16, else plain PyTorch, and why; KERNELS=1 insists."""
    plain, fused = Operations(attend), Operations(attend, SplitQKV.apply, mlp_fused, head_losses_fused)
    widths = hp.model_dim, int(hp.mlp_mult * hp.model_dim)
    needs = {"CUDA and Triton": triton is not None and device.type == "cuda",
             "Hopper or newer": hopper_or_newer(device), "bf16": dtype == torch.bfloat16,
             f"widths in eights, not {widths}": not any(w % 8 for w in widths)}
    refused = [f"need {need}" for need, met in needs.items() if not met]
    if hp.kernels == "0":
        return plain, "0 (KERNELS=0)"
    try:
        for name, case in operation_cases(hp, device, dtype, 2, 96).items() if not refused else ():
            if not (error := largest_error(getattr(fused, name), getattr(plain, name), *case)) < 3e-2:
                refused.append(f"WARNING: slow; {name} is off by {error:.1e}")
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways; each means that the kernels are of no use
        refused.append(f"WARNING: slow; {type(error).__name__}: {first_line(error)}")
    if refused and hp.kernels == "1":
        raise SetupError(f"KERNELS=1 cannot be used here: {'; '.join(refused)}; unset KERNELS")
    return (plain, f"0 ({'; '.join(refused)})") if refused else (fused, "1 (equal to plain PyTorch in a probe)")

# ---- Model -----------------------------------------------------------------------------------------------------------

class Linear(nn.Linear):
    """Bias-free; the fp32 master weight is cast to the activation's dtype at every use.

    A gain on the outputs is multiplied into the weight's rows: the same product, but neither the scaled activations
    nor the sum over all tokens for the gain's gradient pass through memory."""
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)
    def cast(self, dtype: torch.dtype, gain: Tensor | None = None) -> Tensor:
        return (self.weight if gain is None else self.weight * gain[:, None]).to(dtype)
    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        return F.linear(x, self.cast(x.dtype, gain))

class SelfAttention(nn.Module):
    def __init__(self, hp: Hyperparameters, ops: Operations, use_xsa: bool) -> None:
        super().__init__()
        self.kv_heads, self.ops, self.use_xsa = hp.num_kv_heads, ops, use_xsa
        dim, kv_dim = hp.model_dim, hp.num_kv_heads * hp.head_dim
        self.q_gain = nn.Parameter(torch.full((hp.num_heads,), hp.qk_gain_init))
        self.c_q, self.c_k, self.c_v = Linear(dim, dim), Linear(dim, kv_dim), Linear(dim, kv_dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor, rope: Rope, value: Tensor | None, gain: Tensor, first: int) -> Tensor:
        """x (B, T, model_dim) -> the same from position `first` on."""
        weights = torch.cat([self.c_q.weight, self.c_k.weight, self.c_v.weight])
        qkv = F.linear(x, weights.to(x.dtype))  # one product: x is read once, its gradient needs no sum
        q, k, v = self.ops.split_qkv(qkv, value, self.q_gain, *rope, self.kv_heads)
        y, v = self.ops.attend(q, k, v)[:, first:], v[:, first:]
        return self.proj((remove_own_value(y, v) if self.use_xsa else y).flatten(2), gain)

class MLP(nn.Module):
    def __init__(self, hp: Hyperparameters, ops: Operations) -> None:
        super().__init__()
        self.ops, hidden = ops, int(hp.mlp_mult * hp.model_dim)
        self.fc, self.proj = Linear(hp.model_dim, hidden), Linear(hidden, hp.model_dim)
    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return self.ops.mlp(x, self.fc.cast(x.dtype), self.proj.cast(x.dtype, gain))

class Block(nn.Module):
    def __init__(self, hp: Hyperparameters, layer: int, ops: Operations) -> None:
        super().__init__()
        self.norm_scale = 1.0 / math.sqrt(layer + 1) if hp.ln_scale else 1.0
        self.attn_scale, self.mlp_scale = (nn.Parameter(torch.ones(hp.model_dim)) for _ in range(2))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, hp.model_dim))
        self.attn = SelfAttention(hp, ops, use_xsa=layer >= hp.num_layers - hp.xsa_last_n)
        self.mlp = MLP(hp, ops)

    def forward(self, x: Tensor, rope: Rope, value: Tensor | None, first: int) -> Tensor:
        """x (B, T, model_dim) -> (B, T - first, model_dim)."""
        x = x[:, first:] + self.attn(rms_norm(x) * self.norm_scale, rope, value, self.attn_scale, first)
        return x + self.mlp(rms_norm(x) * self.norm_scale, self.mlp_scale)

class ValueEmbedding(nn.Module):
    """One table of token values for several layers: proj(embed[ids]) * scale, (B, T, kv_dim)."""
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        kv_dim = hp.num_kv_heads * hp.head_dim
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.embed = nn.Embedding(hp.vocab_size, hp.ve_dim)
        self.proj = Linear(hp.ve_dim, kv_dim) if hp.ve_dim != kv_dim else nn.Identity()
    def forward(self, ids: Tensor) -> Tensor:
        value = self.proj(self.embed(ids))
        return value * self.scale.to(value.dtype)

class GPT(nn.Module):
    """U-Net transformer: the first half of the blocks feeds gated skips to the second half, last output first."""
    def __init__(self, hp: Hyperparameters, ops: Operations) -> None:
        super().__init__()
        self.hp, self.ops, self.skips = hp, ops, hp.num_layers // 2
        self.rope: dict[int, Rope] = {}  # by length; in the graph they would be computed per element
        self.skip_weights = nn.Parameter(torch.ones(self.skips, hp.model_dim))
        self.skip_gates = nn.Parameter(torch.zeros(self.skips, hp.model_dim)) if hp.skip_gates_enabled else None
        self.tok_emb = nn.Embedding(hp.vocab_size, hp.embedding_dim)
        projection = Linear if hp.embedding_dim != hp.model_dim else nn.Identity
        self.embed_proj = projection(hp.embedding_dim, hp.model_dim)
        self.head_proj = projection(hp.model_dim, hp.embedding_dim)
        self.blocks = nn.ModuleList(Block(hp, layer, ops) for layer in range(hp.num_layers))
        self.ve_shared = ValueEmbedding(hp) if hp.ve_layer_list else None
        self.ve_layer_scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in hp.ve_layer_list)
        self.lm_head = None if hp.tie_embeddings else Linear(hp.embedding_dim, hp.vocab_size)

    def hidden(self, ids: Tensor, first: int = 0) -> Tensor:
        """Token ids (B, T) -> normed output (B, T - first, model_dim): what comes before `first` is context only."""
        x = x0 = self.embed_proj(rms_norm(self.tok_emb(ids)))
        rope = self.rope.get(ids.size(1)) or rope_tables(self.hp, ids.size(1), ids.device, x.dtype)
        shared = None if self.ve_shared is None else self.ve_shared(ids)
        values = {n: shared * scale.to(x.dtype) for n, scale in zip(self.hp.ve_layer_list, self.ve_layer_scales)}
        skips: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            keep, add = block.resid_mix
            terms = [(keep, x), (add, x0)]
            if skips and layer >= self.skips:
                # keep * lerp(weight * skip, x, sigmoid(gate)), without gates keep * (x + weight * skip). Folded factors
                # need three sums over all tokens for their gradients, nested products would need four.
                i, gate, rest = layer - self.skips, 1.0, 1.0
                if self.skip_gates is not None:
                    gate = torch.sigmoid(self.skip_gates[i])
                    rest = 1 - gate
                terms = [(keep * gate, x), (keep * rest * self.skip_weights[i], skips.pop()), (add, x0)]
            x = sum(factor.to(x.dtype) * term for factor, term in terms)
            x = block(x, rope, values.get(layer), first if layer == len(self.blocks) - 1 else 0)
            if layer < self.skips:
                skips.append(x)
        return rms_norm(x)

    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Normed output (..., model_dim) -> what the head multiplies: (..., embedding_dim) and (vocab_size, same)."""
        x = self.head_proj(hidden)
        return x, self.tok_emb.weight.to(x.dtype) if self.lm_head is None else self.lm_head.cast(x.dtype)
    def forward(self, ids: Tensor, targets: Tensor, first: int = 0, reduction: str = "mean") -> Tensor:
        """fp32 nats of the targets (B, T) from position `first` on: their mean, or each (reduction none)."""
        x, weight = self.head(self.hidden(ids, first))
        targets = targets[:, first:]
        losses = self.ops.head_losses(x.flatten(0, 1), weight, targets.flatten(), self.hp.logit_softcap)
        return losses.mean() if reduction == "mean" else losses.view_as(targets)

@torch.no_grad()
def init_matrices(model: GPT) -> None:
    """Draws tables and matrices in the order of the state dict; small matrices keep PyTorch's default."""
    deviations = {"tok_emb": model.hp.tied_embed_init_std if model.hp.tie_embeddings else 1.0, "ve_shared.embed": 0.01}
    for name, module in model.named_modules():
        if name in deviations:
            module.weight.normal_(0.0, deviations[name])
        elif isinstance(module, Linear):
            small = min(module.weight.shape) < 64
            if name.endswith(("attn.proj", "mlp.proj", "lm_head")) or (small and name == "ve_shared.proj"):
                module.weight.zero_()
            elif not small:
                nn.init.orthogonal_(module.weight)

def is_control(name: str, hp: Hyperparameters) -> bool:
    return any(pattern in name for pattern in hp.control_patterns)

def build_model(hp: Hyperparameters, ops: Operations, device: torch.device, dtype: torch.dtype) -> GPT:
    """A freshly initialised model; the same seed gives the same weights on any device and rank.

    bf16 rounds all parameters; linear weights, control tensors and vectors go back to fp32, tables stay bf16."""
    torch.manual_seed(hp.seed)
    model = GPT(hp, ops)
    init_matrices(model)
    linears = {id(module.weight) for module in model.modules() if isinstance(module, Linear)}
    for name, p in model.named_parameters():
        master = id(p) in linears or p.ndim < 2 or is_control(name, hp)
        p.data = p.data.to(dtype).to(torch.float32 if master else dtype)
    model.rope = {length: rope_tables(hp, length, device, dtype) for length in {hp.train_seq_len, hp.eval_seq_len}}
    return model.to(device)

# ---- Optimizers ------------------------------------------------------------------------------------------------------

def newton_schulz(g: Tensor, steps: int) -> Tensor:
    """Approximate orthogonal factor of each matrix of a batch (K, rows, cols), in bf16: singular values go to about 1.

    The order bA + (cA)A is the published one; other orders differ by up to 2e-2 in bf16. A zero matrix stays zero."""
    a, b, c = 3.4445, -4.7750, 2.0315  # of the quintic, https://kellerjordan.github.io/posts/muon/
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x.mT if tall else x

Orthogonalizer = Callable[[Tensor, int], Tensor]

class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised updates, for 2-D weights (Jordan et al. 2024), decay decoupled.

    Matrices of one shape form a group and are orthogonalised as one batch. Each rank does a contiguous share of a group
    and keeps the momentum of that share only; updates are gathered in bf16 while the next group is computed."""
    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, steps: int, world: World,
                 orthogonalize: Orthogonalizer = newton_schulz) -> None:
        by_shape = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        super().__init__([{"params": group} for group in by_shape.values()],
                         {"lr": lr, "weight_decay": weight_decay, "momentum": 0.0})
        self.steps, self.world, self.orthogonalize = steps, world, orthogonalize

    @torch.no_grad()
    def step(self) -> None:
        started = []
        for group in self.param_groups:
            mine, momenta = self.share(group)
            g = torch.stack([p.grad for p in mine])
            g.add_(momenta.mul_(group["momentum"]).add_(g), alpha=group["momentum"])  # Nesterov
            rows, cols = mine[0].shape
            updates = self.orthogonalize(g, self.steps) * max(1.0, rows / cols) ** 0.5
            started.append((group, *self.world.gather_stacked(updates.contiguous())))
        for group, updates, pending in started:
            if pending is not None:
                pending.wait()
            params = group["params"]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates[:len(params)].to(params[0].dtype).unbind(), alpha=-group["lr"])

    def share(self, group: dict[str, Any]) -> tuple[list[nn.Parameter], Tensor]:
        """This rank's matrices of a group, and their momenta (K, rows, cols)."""
        params, rank, size = group["params"], self.world.rank, self.world.size
        count = -(-len(params) // size)
        filled = params + params[:1] * (count * size - len(params))  # equal shares; surplus updates are dropped
        mine, state = filled[rank * count:(rank + 1) * count], self.state[params[0]]
        if not state:
            state["momentum"] = torch.zeros_like(torch.stack(list(mine)))
        return mine, state["momentum"]

def parameter_groups(model: GPT) -> dict[str, list[str]]:
    """Names by optimizer group: embed, muon, scalar, head. Every parameter is in exactly one."""
    groups: dict[str, list[str]] = {"embed": [], "muon": [], "scalar": [], "head": []}
    for name, p in model.named_parameters():
        in_block = name.startswith("blocks.")
        if name in ("tok_emb.weight", "ve_shared.embed.weight"):
            key = "embed"
        elif name == "lm_head.weight":
            key = "head"
        elif is_control(name, model.hp) or (in_block and p.ndim < 2):
            key = "scalar"
        elif in_block or name.endswith("proj.weight"):
            key = "muon"
        else:
            raise SetupError(f"{name} is in no optimizer group; CONTROL_TENSOR_NAME_PATTERNS must cover it")
        groups[key].append(name)
    return groups

class Optimizers:
    """Muon for matrices, AdamW for tables, scalars and the untied head; all rates follow one factor."""
    def __init__(self, model: GPT, world: World, orthogonalize: Orthogonalizer = newton_schulz) -> None:
        hp, named = model.hp, dict(model.named_parameters())
        self.names = {p: name for name, p in named.items()}
        groups = {key: [named[name] for name in names] for key, names in parameter_groups(model).items()}
        table_lr = hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr
        rates = ("embed", table_lr, hp.embed_wd), ("scalar", hp.scalar_lr, hp.adam_wd), ("head", hp.head_lr, 0.0)
        self.adam = torch.optim.AdamW(
            [{"params": groups[key], "lr": lr, "weight_decay": decay} for key, lr, decay in rates if groups[key]],
            betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, fused=world.device.type == "cuda")
        self.muon = Muon(groups["muon"], hp.matrix_lr, hp.muon_wd, hp.muon_backend_steps, world, orthogonalize)
        self.groups = self.adam.param_groups + self.muon.param_groups
        for group in self.groups:
            group["base_lr"] = group["lr"]

    def step(self, lr_factor: float, momentum: float) -> None:
        for group in self.groups:  # AdamW has no use for a momentum
            group |= {"lr": group["base_lr"] * lr_factor, "momentum": momentum}
        self.muon.step()
        self.adam.step()

    def tensors(self) -> dict[str, Tensor]:
        """All moments by parameter, made if there are none yet; Muon's only of this rank's matrices."""
        found = {}
        for group in self.adam.param_groups:
            for p in group["params"]:
                state = self.adam.state[p]
                if not state:  # as AdamW makes it at its first step
                    step = torch.zeros((), device=p.device if group["fused"] else "cpu")
                    state |= {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                found |= {f"adam.{self.names[p]}.{key}": value for key, value in state.items()}
        for group in self.muon.param_groups:
            found |= {f"muon.{self.names[p]}": momentum for p, momentum in zip(*self.muon.share(group))}
        return found

def lr_factor(progress: float, warmdown_frac: float, min_lr: float) -> float:
    """1, then over the last `warmdown_frac` of the run linearly down to 0, never under `min_lr`."""
    flat = warmdown_frac <= 0 or progress < 1 - warmdown_frac
    return 1.0 if flat else max((1 - progress) / warmdown_frac, min_lr)
def muon_momentum(step: int, hp: Hyperparameters) -> float:
    share = min(step / hp.muon_momentum_warmup_steps, 1.0) if hp.muon_momentum_warmup_steps else 1.0
    return (1 - share) * hp.muon_momentum_warmup_start + share * hp.muon_momentum

class EMA:
    """fp32 average of the weights from their start on, no bias correction: shadow = d * shadow + (1 - d) * weights."""
    def __init__(self, model: GPT, decay: float) -> None:
        self.decay, self.weights = decay, [p.detach() for p in model.parameters()]
        self.shadow = [w.float().clone() for w in self.weights]
    def update(self) -> None:
        torch._foreach_mul_(self.shadow, self.decay)
        torch._foreach_add_(self.shadow, [w.float() for w in self.weights], alpha=1 - self.decay)
    def copy_to_model(self) -> None:
        torch._foreach_copy_(self.weights, self.shadow)

# ---- Evaluation ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Score:
    val_loss: float  # nats per token
    val_bpb: float
    eval_seconds: float

def sliding_windows(targets: int, seq_len: int, stride: int) -> np.ndarray:
    """Rows (start, first, end): a window each `stride` scores its targets [first, end), counted from `start`.

    The first scores all, a later one what the earlier ones left: each target once. stride = seq_len: no overlap."""
    start = np.arange(0, max(targets - seq_len + stride, 1), stride)
    return np.stack([start, np.where(start == 0, 0, seq_len - stride), np.minimum(seq_len, targets - start)], axis=1)

class Evaluator:
    """Scores the validation set with the weights that the model has at the moment."""
    def __init__(self, hp: Hyperparameters, plan: BatchPlan, world: World, val: ValidationSet,
                 loss_function: Callable[..., Tensor]) -> None:
        self.hp, self.plan, self.world, self.val, self.loss_function = hp, plan, world, val, loss_function
        self.sum_dtype = torch.float32 if world.device.type == "mps" else torch.float64  # mps has no fp64
        self._tokens = torch.from_numpy(val.tokens.astype(np.int32)).to(world.device)
    def full(self) -> Score:
        return self._score("validation", self.hp.eval_seq_len)
    def sliding(self) -> Score:
        return self._score("sliding evaluation", self.hp.eval_stride)

    @torch.no_grad()
    def _score(self, title: str, stride: int) -> Score:
        world = self.world
        synchronize(world.device)
        began = time.perf_counter()
        windows = sliding_windows(self.val.targets, self.hp.eval_seq_len, stride)
        share = rank_share(len(windows), world.rank, world.size)
        windows = windows[share.start:share.stop]
        batch = min(self.plan.eval_sequences, len(windows))  # always this shape: each shape would be compiled
        sums = torch.zeros(2, dtype=self.sum_dtype, device=world.device)  # losses, number of scored targets
        with tqdm(total=len(windows), desc=title, leave=False, disable=not world.is_main or None) as bar:
            for first in np.unique(windows[:, 1]):  # alike windows form batches: logits start at `first`
                alike = windows[windows[:, 1] == first]
                for at in range(0, len(alike), batch):
                    part = torch.from_numpy(alike[at:at + batch]).to(world.device)
                    filled = F.pad(part, (0, 0, 0, batch - len(part)))  # rows of zeros score nothing
                    sums += self._batch_sums(filled, int(first))
                    bar.update(len(part))
        loss_sum, scored = world.sum(sums).tolist()
        assert scored == self.val.targets, f"{title} scored {scored:.0f} targets instead of {self.val.targets}"
        loss = loss_sum / scored
        return Score(loss, self.val.bits_per_byte(loss), time.perf_counter() - began)

    def _batch_sums(self, windows: Tensor, first: int) -> Tensor:
        """(2,) scored losses and their number of windows (B, 3) that start scoring at `first` or not at all."""
        start, begin, end = windows.T[:, :, None]
        column = torch.arange(self.hp.eval_seq_len + 1, device=windows.device)
        tokens = self._tokens[(start + column).clamp_max(self.val.targets)].long()
        losses = self.loss_function(tokens[:, :-1], tokens[:, 1:], first, "none")
        column = column[first:-1]
        scored = (column >= begin) & (column < end)
        return torch.stack([torch.where(scored, losses, 0).to(self.sum_dtype).sum(), scored.sum()])

# ---- Training --------------------------------------------------------------------------------------------------------

class Gradients:
    """The gradients of a step, in one flat buffer per dtype: one all-reduce, one norm, and addresses that stay."""
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.groups: list[tuple[Tensor, list[nn.Parameter]]] = []
        largest_first = sorted(parameters, key=lambda p: -p.numel())  # the odd sizes last: the others stay aligned
        for dtype in dict.fromkeys(p.dtype for p in largest_first):
            group = [p for p in largest_first if p.dtype == dtype]
            sizes = [p.numel() for p in group]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=group[0].device)
            for p, piece in zip(group, flat.split(sizes)):
                p.grad = piece.view_as(p)
            self.groups.append((flat, group))

    def add(self, loss: Tensor) -> None:
        parameters = [p for _, group in self.groups for p in group]  # skips may be unused: zeros
        found = dict(zip(parameters, torch.autograd.grad(loss, parameters, materialize_grads=True)))
        for _, group in self.groups:
            torch._foreach_add_([p.grad for p in group], [found[p] for p in group])
    def average(self, world: World) -> None:
        """Mean over ranks: one all-reduce per dtype (127 MB in fp32 and 5 MB in bf16 at full size)."""
        for flat, _ in self.groups:
            world.sum(flat.div_(world.size))
    def clip(self, largest_norm: float) -> None:
        """Scales all so that the 2-norm of the whole is at most that."""
        norms = torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float32) for flat, _ in self.groups])
        factor = (largest_norm / (norms.norm() + 1e-6)).clamp_max(1.0)
        for flat, _ in self.groups:
            flat.mul_(factor)
    def zero(self) -> None:
        for flat, _ in self.groups:
            flat.zero_()

CHECK_WEIGHTS_EVERY = 100  # steps; 0.1 ms on a GPU

class Trainer:
    """The loop: warm-up whose effect is undone, then steps until the cap or the last iteration."""
    def __init__(self, model: GPT, evaluator: Evaluator, train_paths: list[Path], log: RunLog,
                 orthogonalize: Orthogonalizer) -> None:
        self.model, self.hp, self.train_paths, self.evaluator, self.log = model, model.hp, train_paths, evaluator, log
        self.plan, self.world, self.loss_function = evaluator.plan, evaluator.world, evaluator.loss_function
        self.clock, self.steps_done, self.last_read_seconds = Stopwatch(), 0, 0.0
        self.gradients = Gradients(model.parameters())
        self.optimizers = Optimizers(model, self.world, orthogonalize)
        size = (self.plan.micro_sequences, self.hp.train_seq_len)
        self.inputs, self.targets = (torch.zeros(size, dtype=torch.int64, device=self.world.device) for _ in range(2))
        self.loss = torch.zeros((), device=self.world.device)  # the mean over a step's micro-batches
        self.parts = 1  # of a micro-batch, one after the other
        self.run_micro_batch = self.micro_batch

    @contextlib.contextmanager
    def on_the_clock(self, skip: int = 0) -> Iterator[Prefetcher]:
        """A new reader while the clock runs; notes when the last batch in use was read."""
        synchronize(self.world.device)
        self.clock.start()
        loader = CoprimeLoader(self.train_paths, self.hp.train_seq_len, self.plan.draw_windows, self.world.rank,
                               self.world.size, self.hp.vocab_size)
        for _ in range(skip):
            loader.next_windows()
        ahead = max(3, self.plan.grad_accum_steps)
        with contextlib.closing(Prefetcher(loader, self.world.device, self.clock, ahead)) as data:
            yield data
        synchronize(self.world.device)
        self.clock.stop()
        self.last_read_seconds = data.last_read_seconds

    def step(self, data: Prefetcher, step: int, factor: float) -> Callable[[], float]:
        """Queues one optimizer step; the returned call waits for this rank's mean loss, not for the optimizers."""
        self.gradients.zero()
        self.loss.zero_()
        for _ in range(self.plan.grad_accum_steps):
            for buffer, batch in zip((self.inputs, self.targets), data.next()):
                buffer.copy_(batch)
            self.run_micro_batch()
        mean_loss = self.world.fetch(self.loss)
        self.gradients.average(self.world)
        if self.hp.grad_clip_norm > 0:
            self.gradients.clip(self.hp.grad_clip_norm)
        self.optimizers.step(factor, muon_momentum(step, self.hp))
        return mean_loss

    def micro_batch(self) -> None:
        """Forward and backward of what is in `inputs` and `targets`; adds to the loss and the gradients."""
        for ids, targets in zip(self.inputs.chunk(self.parts), self.targets.chunk(self.parts)):
            loss = self.loss_function(ids, targets) / (self.plan.grad_accum_steps * self.parts)
            self.gradients.add(loss)
            self.loss += loss.detach()

    def fit_memory(self) -> None:
        """Runs a micro-batch, in ever more parts until it fits into the memory of every rank; the data order stays.
        Raises SetupError when MICRO_BATCH_TOKENS was set or one sequence is too much."""
        while True:
            problem = self.try_micro_batch()
            if not any(failed for failed, in self.world.gather([bool(problem)])):  # nobody waited for anyone before
                return
            problem, whole, tokens = problem or "another rank is out of memory", len(self.inputs), self.inputs.numel()
            cuts = [n for n in range(2 * self.parts, whole + 1) if whole % n == 0]
            if self.hp.micro_batch_tokens or not cuts:
                remedy = f"one of {[tokens // n for n in cuts]}" if cuts else "less, with a shorter TRAIN_SEQ_LEN"
                raise SetupError(f"{problem}; set MICRO_BATCH_TOKENS to {remedy}")
            self.parts = cuts[0]
            self.log(f"WARNING: {problem}; a micro-batch of {tokens} tokens runs in {self.parts} parts from now on "
                     f"(MICRO_BATCH_TOKENS={tokens // self.parts} does too, with another data order)")
            torch.cuda.empty_cache()

    def try_micro_batch(self) -> str:
        """What went wrong when memory did not suffice, else nothing."""
        try:
            self.micro_batch()
            synchronize(self.world.device)
        except torch.OutOfMemoryError as error:
            return first_line(error)
        return ""

    def record_graph(self) -> None:
        """On a GPU, makes one launch of the micro-batch's several hundred: the gaps between kernels shrink."""
        if self.world.device.type != "cuda":
            return
        torch.cuda.empty_cache()  # the graph has memory of its own, as much as the steps before it took
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the reader pins memory meanwhile
            self.micro_batch()
        self.run_micro_batch = graph.replay

    def warm_up(self) -> None:
        """Compiles and settles all on real shapes, then puts weights, optimizers and clock back to their start."""
        steps, before = self.hp.warmup_steps, {name: t.clone() for name, t in self.model.state_dict().items()}
        if steps:
            self.fit_memory()
        with self.on_the_clock() as data:
            for step in range(1, steps + 1):
                self._agree(self.step(data, step - 1, 1.0), f"warm-up step {step}")
                if step == 1:
                    self.record_graph()
                if step <= 6 or step % 10 == 0 or step == steps:
                    self.log(f"warmup_step: {step}/{steps}")
        self.model.load_state_dict(before)
        for optimizer in (self.optimizers.adam, self.optimizers.muon):
            optimizer.state.clear()
        self.clock = Stopwatch()

    def release(self) -> None:
        """Gives back memory that only training needs: of 10.5 GiB in use at the Hessians 8.9 were the graph's."""
        del self.run_micro_batch, self.gradients, self.optimizers
        self.model.zero_grad()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def fit(self) -> EMA:
        """Trains; returns the averaged weights. The clock holds everything but validation."""
        hp, cap, ema = self.hp, self.hp.train_cap_seconds, EMA(self.model, self.hp.ema_decay)
        snapshots = Snapshots(self, ema)
        if not snapshots.resume():
            log_validation(self.log, hp, 0, self.evaluator.full())
        seconds = self.clock.seconds
        quiet = not self.world.is_main or None
        first = 0 if hp.warmup_steps else self.steps_done + 1  # under watch; without warm-up one step compiles
        bar = tqdm(range(self.steps_done, hp.iterations), "training", leave=False, disable=quiet)
        with bar, self.on_the_clock(self.steps_done * self.plan.grad_accum_steps) as data:
            for step in bar:
                if hp.stall_seconds and step >= first:
                    faulthandler.dump_traceback_later(hp.stall_seconds, exit=True)
                factor = lr_factor(seconds / cap if cap else step / hp.iterations, hp.warmdown_frac, hp.min_lr)
                loss = self.step(data, step, factor)
                ema.update()
                seconds, mean_loss = self._agree(loss, f"step {step + 1}")
                self.steps_done = step + 1
                if hp.train_log_every and (step < 5 or self.steps_done % hp.train_log_every == 0):
                    self._log_step(mean_loss, seconds, factor, data.wait_seconds)
                if self.steps_done % CHECK_WEIGHTS_EVERY == 0:
                    self._compare_weights()
                faulthandler.cancel_dump_traceback_later()
                snapshots.after_step(seconds)
                if cap and seconds >= cap:
                    break
                if hp.val_loss_every and self.steps_done % hp.val_loss_every == 0 and self.steps_done < hp.iterations:
                    synchronize(self.world.device)
                    self.clock.stop()
                    log_validation(self.log, hp, self.steps_done, self.evaluator.full())
                    self.clock.start()
            snapshots.finish()
        self._report_end(self.clock.seconds, data.wait_seconds)
        return ema

    def _agree(self, loss: Callable[[], float], where: str) -> tuple[float, float]:
        """Waits for the loss; the slowest rank's seconds and the mean loss over ranks, equal on every rank."""
        value = loss()
        seconds, losses = zip(*self.world.gather([self.clock.seconds, value]))
        if broken := [rank for rank, loss_here in enumerate(losses) if not math.isfinite(loss_here)]:
            raise DivergedError(f"loss not finite at {where} on ranks {broken}; lower MATRIX_LR or TIED_EMBED_LR")
        return max(seconds), sum(losses) / len(losses)

    def _compare_weights(self) -> None:
        """Ranks whose weights have drifted apart train a model that none of them has. Raises DivergedError."""
        weights = self.model.parameters()
        bits = sum(p.detach().flatten().view(torch.int16).sum(dtype=torch.int64) for p in weights)
        sums = [row[0] for row in self.world.gather([int(bits) % 2**48])]
        if wrong := [rank for rank, value in enumerate(sums) if value != sums[0]]:
            raise DivergedError(f"ranks {wrong} have other weights than rank 0 after step {self.steps_done}: a GPU or "
                                "link computes wrongly; go on from a snapshot (RESUME=auto) elsewhere")

    def _log_step(self, loss: float, seconds: float, factor: float, waited: float) -> None:
        step, tokens = self.steps_done, self.steps_done * self.hp.train_batch_tokens
        self.log(f"{step}/{self.hp.iterations} train_loss: {loss:.4f} train_time: {seconds / 60:.1f}m "
                 f"tok/s: {tokens / seconds:.0f}")
        self.log.record("step", step=step, train_loss=loss, train_seconds=seconds, tokens=tokens, lr_factor=factor,
                        tokens_per_second=tokens / seconds, loader_wait_seconds=waited)

    def _report_end(self, seconds: float, waited: float) -> None:
        step, hp = self.steps_done, self.hp
        if step < hp.iterations:
            self.log(f"stopping_early: wallclock_cap train_time: {1000 * seconds:.0f}ms step: {step}/{hp.iterations}")
        self.log("peak memory allocated: {} MiB reserved: {} MiB".format(*peak_memory_mib(self.world.device)))
        warning = " WARNING: over 2%: the disk or the CPU is too slow" * (waited > 0.02 * seconds)
        self.log(f"loader_wait: {waited:.2f}s ({waited / seconds:.1%} of training){warning}")
        if step * (1 - hp.ema_decay) < 5:
            share = f"{hp.ema_decay ** step:.0%} initial weights"
            self.log(f"WARNING: EMA_DECAY={hp.ema_decay} averages {share} after only {step} steps; lower it")

# What may differ between the parts of a run: it does not decide what is learnt.
FREE_SETTINGS = ("output_dir", "run_id", "resume", "checkpoint_every_seconds", "stall_seconds", "attention", "kernels",
                 "compile", "micro_batch_tokens", "train_log_every", "val_loss_every", "sliding_window_enabled")

class Snapshots:
    """What a killed run goes on from, in OUTPUT_DIR/checkpoints: complete or absent, written while training goes on.

    torch.distributed.checkpoint writes and syncs all ranks' files under a temporary name; the last two are kept. Muon's
    momenta are stored by matrix, so that any number of ranks can go on."""
    def __init__(self, trainer: Trainer, ema: EMA) -> None:
        self.trainer, self.ema, self.hp, self.world = trainer, ema, trainer.hp, trainer.world
        self.saved_at, self.pending = 0.0, None  # or the snapshot under way: (future, path)
        if self.hp.checkpoint_every_seconds or self.hp.resume:
            import torch.distributed.checkpoint as checkpoint  # takes 0.6 s: before the clock, and only where needed

            self.library = checkpoint

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step changes, by name."""
        trainer, named = self.trainer, dict(self.trainer.model.named_parameters())
        found = {f"model.{name}": p.detach() for name, p in named.items()}
        found |= {f"ema.{name}": t for name, t in zip(named, self.ema.shadow)} | trainer.optimizers.tensors()
        found["progress"] = torch.tensor([trainer.steps_done, trainer.clock.seconds], dtype=torch.float64)
        return {name: t for name, t in found.items() if t.numel()}

    def after_step(self, seconds: float) -> None:
        """Names a finished snapshot; begins one when it is time: `seconds` is equal on all ranks, so all begin it."""
        if self.pending and self.pending[0].done():
            self.finish()
        if 0 < self.hp.checkpoint_every_seconds <= seconds - self.saved_at:
            self.finish()
            self.saved_at, path = seconds, self.hp.snapshots / f".step_{self.trainer.steps_done:06d}.tmp"
            save = self.library.async_save
            self.pending = save(self.tensors(), checkpoint_id=path, process_group=self.world.saver), path

    def finish(self) -> None:
        """Waits for the snapshot under way, gives it its name and drops the third oldest. A full disk costs only it."""
        if self.pending is None:
            return
        (future, path), self.pending = self.pending, None
        try:
            future.result()
            if self.world.is_main:
                write_file(path / "settings.json", json.dumps(self._settings()).encode())
                path.replace(path.with_name(path.stem[1:]))
                for old in sorted(self.hp.snapshots.glob("step_*"))[:-2]:
                    shutil.rmtree(old, ignore_errors=True)
        except (self.library.CheckpointException, OSError) as error:
            self.trainer.log(f"WARNING: snapshot {path.stem[1:]} was not written ({first_line(error)})")

    def _settings(self) -> dict[str, str]:
        return {name: format_setting(value) for name, value in asdict(self.hp).items() if name not in FREE_SETTINGS}

    def resume(self) -> bool:
        """With RESUME=auto, loads the newest snapshot if there is one. Raises SetupError when it is of another run."""
        folder, world = self.hp.snapshots, self.world
        for leftover in folder.glob(".step_*.tmp") if world.is_main else ():
            shutil.rmtree(leftover, ignore_errors=True)
        path = world.broadcast_object(max(folder.glob("step_*"), default=None) if self.hp.resume else None)
        if path is None:
            return False
        saved, tensors = json.loads((path / "settings.json").read_bytes()), self.tensors()
        if others := [f"{name.upper()}={ours} (there {saved.get(name)})" for name, ours in self._settings().items()
                      if ours != saved.get(name)]:
            raise SetupError(f"{path} is of a run with other settings: {', '.join(others)}; set them alike")
        try:
            self.library.load(tensors, checkpoint_id=path, process_group=world.saver)
        except self.library.CheckpointException as error:
            raise SetupError(f"{path} cannot be read ({first_line(error)}); remove it to use the one before") from None
        steps, self.saved_at = tensors["progress"].tolist()
        self.trainer.steps_done, self.trainer.clock = int(steps), Stopwatch(self.saved_at)
        self.trainer.log(f"resumed after step {int(steps)} and {self.saved_at:.1f}s from {path}")
        return True

def log_validation(log: RunLog, hp: Hyperparameters, step: int, score: Score) -> None:
    log(f"{step}/{hp.iterations} val_loss: {score.val_loss:.4f} val_bpb: {score.val_bpb:.4f}")
    log.record("validation", step=step, **asdict(score))

# ---- Quantisation ----------------------------------------------------------------------------------------------------

INT6_MAX, INT8_MAX = 31, 127
INT6_CLIP_QUANTILES = (0.9990, 0.9995, 0.9999, 0.99999, 1.0)
INT8_CLIP_QUANTILE = 0.9999984
PASSTHROUGH_MAX_ELEMENTS = 65_536  # smaller tensors stay fp16: their share of the artifact is under 1 %
GPTQ_BLOCK = 128
GPTQ_DAMPING = (0.01, 0.1, 1.0)  # times the mean diagonal; more only when the Hessian does not factor

def storage_class(name: str, tensor: Tensor, hp: Hyperparameters) -> str:
    """How a tensor is stored: passthrough (fp16), passthrough_ctrl (fp32), int6 or int8."""
    if tensor.numel() <= PASSTHROUGH_MAX_ELEMENTS:
        return "passthrough"
    if is_control(name, hp):
        return "passthrough_ctrl"
    return "int6" if ".attn." in name or ".mlp." in name or name == "ve_shared.proj.weight" else "int8"

def row_quantiles(weight: Tensor, quantiles: tuple[float, ...]) -> Tensor:
    """Quantiles of |w| along each row of (R, C), fp32 (len(quantiles), R); torch.quantile takes 16 million at most."""
    q = torch.tensor(quantiles, dtype=torch.float32, device=weight.device)
    parts = weight.float().abs().split(max(1, 2**23 // weight.size(1)))
    return torch.cat([torch.quantile(part, q, dim=1) for part in parts], dim=1)
def int6_row_scales(weight: Tensor, coarseness: float) -> Tensor:
    """Candidate scales of (R, C), a set per clip quantile, fp32 (5, R): the recipe's, rounded to fp16, times that."""
    clip = row_quantiles(weight, INT6_CLIP_QUANTILES)
    return ((clip / INT6_MAX).clamp_min(1 / INT6_MAX) * coarseness).half().float()
def best_candidate(weight: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Of codes (5, R, C) with scales (5, R), the first with the least mean squared error: int8 (R, C), fp16 (R)."""
    best = int((weight - codes * scales[..., None]).square().mean(dim=(1, 2)).argmin())
    return codes[best].to(torch.int8), scales[best].half()
def quantize_int6_rows(weight: Tensor, coarseness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Row search without a Hessian: (R, C) -> codes int8 in +-31 and scales fp16 (R)."""
    weight, scales = weight.float(), int6_row_scales(weight, coarseness)
    codes = (weight / scales[..., None]).round().clamp(-INT6_MAX, INT6_MAX)
    return best_candidate(weight, codes, scales)

def quantize_int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(R, C) -> codes int8 in +-127 and scales fp16 (R). Each row is clipped at a quantile; the fp32 scale rounds."""
    clip = row_quantiles(weight, (INT8_CLIP_QUANTILE,)).T
    scale = (clip / INT8_MAX).clamp_min(1 / INT8_MAX)
    codes = (weight.float().clamp(-clip, clip) / scale).round().clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scale.squeeze(1).half()

@dataclass(frozen=True)
class HessianFactor:
    """Upper Cholesky factor (C, C) of the damped inverse Hessian, columns in `order`; `dead` (C) bool have no input."""
    upper: Tensor
    order: Tensor
    dead: Tensor
    damping: float

def factor_hessian(hessian: Tensor) -> HessianFactor | None:
    """Factor of a (C, C) fp32 Hessian, damped, if need be more; None when that does not help or no input was seen."""
    hessian = hessian.float().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    if bool(dead.all()):
        return None
    diagonal[dead] = 1.0
    mean, before = diagonal.mean(), diagonal.clone()
    for damping in GPTQ_DAMPING:
        diagonal.copy_(before + damping * mean)
        order = diagonal.argsort(descending=True)
        with contextlib.suppress(torch.linalg.LinAlgError):
            lower = torch.linalg.cholesky(hessian[order][:, order])
            upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            if bool(upper.isfinite().all()):
                return HessianFactor(upper, order, dead, damping)
    return None

def gptq_codes(weight: Tensor, scales: Tensor, upper: Tensor) -> Tensor:
    """Rounds (K, N, C) column by column, each error spread over later columns (GPTQ, Frantar et al. 2023).

    `scales` (K, N) fp32, `upper` (K, C, C); returns integer codes as fp32. All in full fp32, TF32 off."""
    weight = weight.clone()  # the codes take the place of what is done
    for start in range(0, weight.size(2), GPTQ_BLOCK):
        end = start + GPTQ_BLOCK
        block, within = weight[:, :, start:end].clone(), upper[:, start:end, start:end]
        errors = torch.empty_like(block)
        for j in range(block.size(2)):
            weight[:, :, start + j] = q = (block[:, :, j] / scales).round_().clamp_(-INT6_MAX, INT6_MAX)
            errors[:, :, j] = error = (block[:, :, j] - q * scales) / within[:, j, j, None]
            block[:, :, j + 1:] -= error[..., None] * within[:, j, None, j + 1:]
        weight[:, :, end:] -= errors @ upper[:, start:end, end:]
    return weight

def quantize_int6_gptq(weights: list[Tensor], factors: list[HessianFactor],
                       coarseness: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """GPTQ of all matrices of one shape (R, C) at once, the five clip candidates as further rows."""
    scales = torch.stack([int6_row_scales(w, coarseness) for w in weights])  # (K, 5, R), with dead columns
    ordered = torch.stack([w.float().masked_fill(f.dead, 0.0)[:, f.order] for w, f in zip(weights, factors)])
    upper = torch.stack([f.upper for f in factors])
    codes = gptq_codes(ordered.repeat(1, scales.size(1), 1), scales.flatten(1), upper).unflatten(1, scales.shape[1:])
    return [best_candidate(w.float(), c[..., f.order.argsort()], s)
            for w, f, c, s in zip(weights, factors, codes, scales)]

@dataclass
class Quantized:
    """`tensors` and `meta` of an artifact; which matrices GPTQ did, needed more damping for, or could not do."""
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    gptq: list[str]
    damped: list[str]
    fallback: list[str]

@torch.no_grad()
def quantize_state(state: Mapping[str, Tensor], hessians: dict[str, Tensor], hp: Hyperparameters,
                   coarseness: float = 1.0, world: World = World()) -> Quantized:
    """Every tensor of a state dict in its storage class, in state-dict order; results are on the CPU."""
    meta: dict[str, Any] = {name: storage_class(name, t, hp) for name, t in state.items()}
    int6 = [name for name, kind in meta.items() if kind == "int6"]
    mine = sorted(int6, key=lambda name: state[name].shape)[world.rank::world.size]  # as many of every shape
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 off: GPTQ's error feedback needs all 24 bits
    factors = {n: f for n in mine if n in hessians and (f := factor_hessian(hessians[n])) is not None}
    done = {n: quantize_int6_rows(state[n], coarseness) for n in mine if n not in factors}
    for shape in {state[n].shape for n in factors}:
        alike = [n for n in factors if state[n].shape == shape]
        done |= zip(alike, quantize_int6_gptq([state[n] for n in alike], [factors[n] for n in alike], coarseness))
    torch.set_float32_matmul_precision(precision)
    rows = world.gather([factors[n].damping if n in factors else 0.0 for n in int6])
    damping = {name: max(column) for name, *column in zip(int6, *rows) if any(column)}  # of what GPTQ did
    tensors: dict[str, Tensor] = {}
    for name, t in state.items():
        kind = meta[name]
        if kind.startswith("passthrough"):
            tensors[name] = t.half() if kind == "passthrough" else t.float()
            continue
        meta[name] = {"type": kind}
        if kind == "int8":
            parts = quantize_int8_rows(t)
        else:  # the sum with the other ranks' zeros hands every result to all ranks
            empty = t.new_zeros(t.shape, dtype=torch.int8), t.new_zeros(t.size(0), dtype=torch.float16)
            parts = [world.sum(part) for part in done.get(name, empty)]
            meta[name] |= {"method": "gptq" if name in damping else "clip_search"} if hp.gptq_enabled else {}
        tensors[f"{name}.q"], tensors[f"{name}.scale"] = parts
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    damped = [name for name, value in damping.items() if value > GPTQ_DAMPING[0]]
    return Quantized(tensors, meta, list(damping), damped, [name for name in hessians if name not in damping])

class HessianCollector:
    """Sums X^T X of the inputs of every linear that GPTQ will do; c_q, c_k and c_v share their block's input."""
    def __init__(self, model: GPT) -> None:
        self.sums: dict[str, Tensor] = {}  # by the module whose input it is
        self.sources = {f"{name}.weight": re.sub(r"\.c_[qkv]$", "", name) for name, module in model.named_modules()
                        if name.startswith("blocks.") and isinstance(module, Linear)
                        and storage_class(f"{name}.weight", module.weight, model.hp) == "int6"}
        self._hooks = []
        for source in dict.fromkeys(self.sources.values()):
            owner = re.sub(r"(\.mlp)\.(fc|proj)$", r"\1", source)  # the fused MLP does not call its parts
            self._hooks.append(model.get_submodule(owner).register_forward_pre_hook(partial(self._add, source)))

    def _add(self, source: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = leaky_square(module.fc(inputs[0])) if source.endswith(".mlp.proj") else inputs[0]
        x = x.flatten(0, -2).float()
        if source not in self.sums:
            self.sums[source] = x.new_zeros(x.size(1), x.size(1))
        self.sums[source].addmm_(x.T, x)

    def finish(self, batches: int, world: World) -> dict[str, Tensor]:
        """Mean over all ranks' batches by weight name; removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        unseen = {*self.sources.values()} - {*self.sums}
        assert not unseen, f"no activation reached {unseen} during calibration"
        batches = sum(row[0] for row in world.gather([batches]))
        for total in self.sums.values():
            world.sum(total).div_(batches)
        return {weight: self.sums[source] for weight, source in self.sources.items()}

@torch.no_grad()
def collect_hessians(trainer: Trainer, data: Prefetcher) -> dict[str, Tensor]:
    """Hessians of the uncompiled model over the first calibration batches of a new stream, inside the cap.

    A batch goes through the model in as many parts as in training. The clock runs. Stops early, saying so, when one
    more batch as slow as the slowest would pass the cap."""
    hp, model, clock, log, world = trainer.hp, trainer.model, trainer.clock, trainer.log, trainer.world
    collector, began, slowest = HessianCollector(model), clock.seconds, 0.0
    for batches in range(1, hp.gptq_calibration_batches + 1):
        start = clock.seconds
        for ids in data.next()[0].chunk(trainer.parts):
            model.hidden(ids)
        synchronize(world.device)
        slowest = max(slowest, clock.seconds - start)
        if batches < hp.gptq_calibration_batches and 0 < hp.max_wallclock_seconds < clock.seconds + slowest:
            log(f"WARNING: only {batches} of {hp.gptq_calibration_batches} calibration batches fit into the cap; raise "
                "GPTQ_RESERVE_SECONDS or lower GPTQ_CALIBRATION_BATCHES")
            break
    hessians = collector.finish(batches, world)
    log(f"GPTQ:collected {len(hessians)} Hessians in {clock.seconds - began:.1f}s")
    if world.size > 1:
        log(f"GPTQ: Hessians are means over {world.size} ranks; the published script takes those of rank 0")
    return hessians

# ---- Artifact --------------------------------------------------------------------------------------------------------

SHUFFLE_MAGIC = b"BSHF\x02"  # 2 is the stride: bytes that far apart are put side by side
XZ_MAGIC = b"\xfd7zXZ\x00"
LARGEST_UNPACKED = 2**30  # bytes; a few kilobytes can unpack to many gigabytes
BYTES_PER_WEIGHT = {"int6": 0.42, "int8": 0.88, "passthrough": 1.8, "passthrough_ctrl": 3.6}  # in published runs

# Least ratio of packed bytes to `content_bytes` (0.983 to 1.009 seen at full size); lzma's comes from the first try.
PACKED_RATIO = {"brotli": 0.983, "lzma": 0.0}
COARSEST_SCALES = 16.0  # almost all codes are 0 then: what is too large still is not in the int6 matrices
PREDICTED_FROM_BYTES = 8e6  # smaller artifacts pack in seconds and at another ratio

def content_bytes(quantized: Quantized) -> float:
    """Bytes that an ideal coder without context needs for all codes, and those of all other tensors."""
    codes, others = [], 0
    for name, t in quantized.tensors.items():
        if name.endswith(".q"):
            codes.append((t.flatten().int() + 128).bincount(minlength=256).double())
        else:
            others += t.nbytes
    return others + sum(float(n.sum() * torch.special.entr(n / n.sum()).sum()) for n in codes) / math.log(256)

def byte_shuffle(data: bytes) -> bytes:
    """Magic, then bytes 0, 2, 4, ..., then 1, 3, 5, ...: fp16 high bytes compress better side by side."""
    return data if len(data) < 2 else SHUFFLE_MAGIC + data[::2] + data[1::2]

def byte_unshuffle(data: bytes) -> bytes:
    """Inverse of `byte_shuffle`; data without its magic comes back as it is."""
    if not data.startswith(SHUFFLE_MAGIC):
        return data
    body = np.frombuffer(data, np.uint8, offset=len(SHUFFLE_MAGIC))
    out = np.empty_like(body)
    out[::2], out[1::2] = np.split(body, [(len(body) + 1) // 2])
    return out.tobytes()

def import_brotli() -> Any:
    """The module, which only its users need. Raises SetupError."""
    try:
        import brotli
    except ImportError as error:
        raise SetupError(f"{error}; pip install brotli, or set COMPRESSOR=lzma") from None
    return brotli

def compress(data: bytes, compressor: str) -> bytes:
    return lzma.compress(data, preset=6) if compressor == "lzma" else import_brotli().compress(data, quality=11)

def decompress(data: bytes, limit: int = LARGEST_UNPACKED) -> bytes:
    """Inverse of `compress`; the format is read from the data. Raises ValueError or the codec's own errors."""
    if data.startswith(XZ_MAGIC):
        codec = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        raw = codec.decompress(data, limit + 1)
        whole = codec.eof and not codec.unused_data
    else:
        codec = import_brotli().Decompressor()
        raw = codec.process(data, output_buffer_limit=limit + 1)
        whole = codec.is_finished()
    if len(raw) > limit or not whole:
        raise ValueError(f"it is cut off, or it goes on after its end or after {limit} bytes")
    return raw

# What torch.save writes for tensors of int8, fp16, bf16 and fp32 on any device, all strided.
ARTIFACT_NAMES = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict",
                  *(f"torch {kind}Storage" for kind in ("Char", "Half", "BFloat16", "Float"))}
SEAL = "__artifact__"  # an entry of meta that scripts which look tensors up by name pass over

def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of all names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode() + t.contiguous().flatten().numpy().tobytes())
    return digest.hexdigest()

def forward_settings(hp: Hyperparameters) -> dict[str, str]:
    """Settings that no shape in the artifact tells, and with other values of which it would score otherwise."""
    names = "rope_dims", "rope_base", "logit_softcap", "train_seq_len", "ve_layers", "xsa_last_n", "ln_scale"
    return {name: "".join(str(getattr(hp, name)).split()) for name in names}

def pack_artifact(quantized: Quantized, compressor: str, settings: Mapping[str, str] | None = None) -> bytes:
    seal = {"format": 1, "sha256": fingerprint(quantized.tensors), "settings": dict(settings or {})}
    buffer = io.BytesIO()
    torch.save({"w": quantized.tensors, "m": quantized.meta | {SEAL: seal}}, buffer)
    return compress(byte_shuffle(buffer.getvalue()), compressor)

def check_pickle(archive: zipfile.ZipFile) -> None:
    """Raises ValueError for a name that no artifact needs: bytearray(2**40) is a few bytes that ask for a terabyte."""
    for name in archive.namelist():
        if name.lower().endswith("data.pkl"):  # as PyTorch looks it up: in any case
            found = {str(arg) for op, arg, _ in pickletools.genops(archive.read(name)) if "GLOBAL" in op.name}
            if others := sorted(found - ARTIFACT_NAMES):
                raise ValueError(f"its pickle names {others[:3]}, which no artifact needs")

def unpack_artifact(data: bytes, limit: int = LARGEST_UNPACKED,
                    settings: Mapping[str, str] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of an artifact, of at most `limit` bytes. No other object is loaded. Raises ArtifactError, also
    when it was trained with other values of these `settings`."""
    try:
        raw = io.BytesIO(byte_unshuffle(decompress(data, limit)))
        archive = zipfile.ZipFile(raw)
        if sum(item.file_size for item in archive.infolist()) > limit:
            raise ValueError(f"its files have over {limit} bytes")
        if broken := archive.testzip():  # brotli has no checksum; torch.load ignores the zip's
            raise ValueError(f"checksum of {broken} does not match")
        check_pickle(archive)
        raw.seek(0)
        content = torch.load(raw, map_location="cpu", weights_only=True)
        tensors, meta = dict(content["w"]), dict(content["m"])
        if sum(t.nbytes for t in tensors.values()) > limit:
            raise ValueError(f"its tensors have over {limit} bytes")  # a stride of 0 needs no memory before
        if not all(isinstance(name, str) for name in (*tensors, *meta)):
            raise TypeError("all names must be text")
        seal = dict(meta.pop(SEAL, {}))  # others' artifacts have none
        if seal and (seal["format"] != 1 or seal["sha256"] != fingerprint(tensors)):
            raise ValueError(f"format {seal['format']} is not 1, or the tensors are not those that were written")
        said = seal.get("settings", {})
        trained_with = {name: str(said[name]) for name in settings or () if name in said}
    except SetupError:  # no brotli
        raise
    except Exception as error:  # noqa: BLE001 - a damaged stream, zip or pickle fails in many ways that mean the same
        raise ArtifactError(f"it is no artifact, or damaged ({type(error).__name__}: {first_line(error)})") from None
    if others := [f"{n.upper()}={ascii(v)[1:-1]:.40}" for n, v in trained_with.items() if settings[n] != v]:
        raise ArtifactError(f"it was trained with {' '.join(others)}; set that")
    return tensors, meta

def dequantize(tensors: dict[str, Tensor], meta: dict[str, Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the names, shapes and dtypes of `like`. Raises ArtifactError when they belong to another model."""
    remedy = "set the variables that it was trained with"
    if names := sorted(like.keys() ^ meta.keys()):
        raise ArtifactError(f"it is of another model, {names[:3]} are not in both; {remedy}")
    state = {}
    for name, target in like.items():
        whole, shape = isinstance(meta[name], str), target.shape
        parts = {name: shape} if whole else {f"{name}.q": shape, f"{name}.scale": shape[:1]}
        for part, needed in parts.items():
            if (found := tensors[part].shape if part in tensors else None) != needed:
                raise ArtifactError(f"{part} has shape {found}, this model needs {needed}; {remedy}")
        value, *scale = (tensors[part].float() for part in parts)
        state[name] = (value * scale[0][:, None] if scale else value).to(target.dtype)
        if not bool(state[name].isfinite().all()):
            raise ArtifactError(f"{name} is not finite: the artifact is damaged")
    return state

# ---- Run: from settings to a scored artifact -------------------------------------------------------------------------

SUMMARY_FORMATS = {
    "val_bpb": ".8f", "val_loss": ".8f", "pre_quant_val_bpb": ".8f", "int6_val_bpb": ".8f", "train_seconds": ".1f",
    "hessian_seconds": ".1f", "train_data_last_read_seconds": ".1f", "eval_seconds": ".1f", "total_seconds": ".1f",
    "steps": "d", "tokens": "d", "tokens_per_second": ".0f", "peak_memory_mib": "d", "code_bytes": "d",
    "model_bytes": "d", "total_bytes": "d", "headroom_bytes": "d", "int6_scale_factor": ".4f", "parameters": "d"}

class Run:
    """One run on one rank: checks first, then train, write, re-read and score, then the summary."""
    def __init__(self, hp: Hyperparameters, environ: Mapping[str, str]) -> None:
        self.began, self.hp, self.source = time.perf_counter(), hp, Path(__file__).read_bytes()
        self.run_id, self.output = hp.run_id or os.urandom(16).hex(), Path(hp.output_dir)
        self.logs, self.artifact = self.output / "logs", self.output / "final_model.int6.ptz"
        if hp.resume and (self.logs / f"{self.run_id}.txt").exists():  # each part of a run has a log of its own
            parts = len(list(self.logs.glob(f"{self.run_id}.*.txt")))
            self.run_id += f".{parts + 2}"
        self.results: dict[str, Any] = {}
        self.trainer: Trainer | None = None
        self.failure: RunError | None = None
        self.plan = plan_batches(hp, read_ranks(environ)[1])
        compress(b"", hp.compressor)  # raises when its module is missing
        self.val = load_validation(hp, byte_tables(load_tokenizer(hp), hp.transform))
        self.train_paths = [] if hp.eval_only else check_train_shards(hp)
        if hp.eval_only and not Path(hp.eval_only).is_file():
            raise SetupError(f"EVAL_ONLY={hp.eval_only}: no such file")
        self.world = join_world(hp, environ)
        device = self.world.device
        torch.set_float32_matmul_precision("high")  # TF32 for fp32 products
        if hp.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        dtype, dtype_reason = choose_dtype(hp.precision, device)
        compiled, why = choose_compile(hp.compile, device)
        self.compile = partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda function: function
        attend, attention = choose_attention(hp, device, dtype)
        ops, kernels = choose_operations(hp, attend, device, dtype)
        self.model = build_model(hp, ops, device, dtype)
        parameter_groups(self.model)  # raises when a parameter has no optimizer
        self.world.broadcast_weights(self.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.evaluator = Evaluator(hp, self.plan, self.world, self.val, self.compile(self.model))
        self.log = self.open_log()
        self.log_head(f"{str(dtype).removeprefix('torch.')} ({dtype_reason})\nattention: {attention}\n"
                      f"kernels: {kernels}\ncompile: {int(compiled)} ({why})")
        for name in sorted({*IGNORED_SETTINGS} & {*environ}):
            self.log(f"WARNING: {name} is set, but nothing reads it; the published script ignores it too")

    def open_log(self) -> RunLog:
        """Rank 0 proves that it can write where it must and opens the log; a failure reaches every rank."""
        log, problem = RunLog(None, self.run_id), None
        need = 5 * sum(t.numel() * t.element_size() for t in self.model.state_dict().values()) // 4
        try:
            if self.world.is_main:
                self.logs.mkdir(parents=True, exist_ok=True)
                write_file(self.output / ".writable", b"")
                (self.output / ".writable").unlink()
                if (free := shutil.disk_usage(self.output).free) < need:
                    raise OSError(f"{free} bytes are free, the model files need {need}")
                self.lock = (self.logs / ".lock").open("w")  # it is released when the process ends, however
                try:
                    if fcntl:
                        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise OSError("another run writes to it") from None
                if self.hp.checkpoint_every_seconds and not self.hp.resume and self.hp.snapshots.exists():
                    raise OSError(f"{self.hp.snapshots} exists and is kept")
                log = RunLog(self.logs, self.run_id)
        except OSError as error:
            problem = f"cannot write RUN_ID={self.run_id} to OUTPUT_DIR={self.output}: {error}; choose another"
        if problem := self.world.broadcast_object(problem):
            raise SetupError(problem)
        return log

    def log_head(self, choices: str) -> None:
        """Settings, source, versions and GPUs (the file alone is enough to repeat the run), then what was chosen."""
        hp, plan, world, rule = self.hp, self.plan, self.world, "=" * 100
        values = asdict(hp) | {
            "run_id": self.run_id, "rank": world.rank, "world_size": world.size,
            "grad_accum_steps": plan.grad_accum_steps, "logfile": self.logs / f"{self.run_id}.txt",
            "datasets_dir": hp.dataset_dir, "train_files": hp.dataset_dir / "fineweb_train_*.bin",
            "val_files": hp.dataset_dir / "fineweb_val_*.bin", "tokenizer_path": hp.tokenizer_path,
            "model_path": self.output / "final_model.pt", "quantized_model_path": self.artifact}
        texts = {name: format_setting(value) for name, value in sorted(values.items())}
        lines = [rule, "Hyperparameters:", *(f"  {name}: {text}" for name, text in texts.items()),
                 self.source.decode("utf-8"), rule, f"Running Python {sys.version}",
                 f"Running PyTorch {torch.__version__}", gpu_report(), rule]
        self.log("\n".join(lines), console=False)
        self.log.record("settings", **texts)
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
        estimate = len(self.source) + sum(
            t.numel() * BYTES_PER_WEIGHT[storage_class(name, t, hp)] for name, t in self.model.state_dict().items())
        self.log(f"""machine: {world.size} x {device}, PyTorch {torch.__version__}, {choices}
train_shards: {len(self.train_paths)}
val_tokens: {self.val.targets}
val_bytes: {self.val.target_bytes} ({self.val.note})
batch: {hp.train_batch_tokens} tokens = {world.size} ranks x {plan.grad_accum_steps} micro-batches x \
{plan.micro_sequences} sequences of {hp.train_seq_len}
tokenizer: {hp.tokenizer_path.stat().st_size} bytes (the rules do not count it)
model_params:{self.parameters}
artifact estimate: {estimate / 1e6:.1f} MB of {SIZE_CAP_BYTES / 1e6:.1f} (weight decay decides)
sha256 of the script: {hashlib.sha256(self.source).hexdigest()}""")

    def perform(self) -> None:
        """Trains, unless EVAL_ONLY names an artifact, scores and sums up. Raises SetupError when memory ends."""
        try:
            if not self.hp.eval_only:
                self.train()
            self.score()
        except torch.OutOfMemoryError as error:
            remedy = f"VAL_BATCH_TOKENS under {self.hp.val_batch_tokens}"
            if self.hp.eval_only or "steps" in self.results:  # there is an artifact
                remedy = f"score it with EVAL_ONLY={self.hp.eval_only or self.artifact} and {remedy}"
            else:
                parts = self.trainer.parts if self.trainer else 1
                tokens = self.plan.micro_sequences * self.hp.train_seq_len // parts
                remedy = f"set MICRO_BATCH_TOKENS under {tokens} or {remedy}"
            raise SetupError(f"{first_line(error)}; {remedy}") from None
        self.summarize()

    def train(self) -> None:
        """Training, Hessians, quantisation; ends with the artifact on disk, before anything of it is evaluated."""
        hp, cap, hessians = self.hp, self.hp.max_wallclock_seconds, {}
        self.trainer = trainer = Trainer(self.model, self.evaluator, self.train_paths, self.log,
                                         self.compile(newton_schulz))
        if hp.train_cap_seconds and hp.gptq_enabled:
            self.log(f"gptq:reserving {hp.gptq_reserve_seconds:g}s, effective={1000 * hp.train_cap_seconds:.0f}ms")
        trainer.warm_up()
        self.log(f"startup: {time.perf_counter() - self.began:.1f}s to the first step, with compile and warm-up")
        self.average = trainer.fit()
        trainer.release()
        steps, tokens, seconds = trainer.steps_done, trainer.steps_done * hp.train_batch_tokens, trainer.clock.seconds
        self.raw = {name: t.clone() for name, t in self.model.state_dict().items()}
        self.average.copy_to_model()
        self.write_checkpoint()
        if hp.gptq_enabled:
            with trainer.on_the_clock() as data:
                hessians = collect_hessians(trainer, data)
        self.write_artifact(hessians)
        last, spent = map(max, zip(*self.world.gather([trainer.last_read_seconds, trainer.clock.seconds])))
        self.results |= {"train_seconds": spent, "hessian_seconds": trainer.clock.seconds - seconds,
                         "steps": steps, "tokens": tokens, "tokens_per_second": tokens / seconds,
                         "train_data_last_read_seconds": last}
        self.log(f"training data last read at {last:.1f}s of the clock, {f'cap {cap:.1f}s' if cap > 0 else 'no cap'}")
        late = spent if hp.gptq_enabled else last  # without Hessians only the last step may end after the cap
        if 0 < cap < late:
            self.failure = ClockError(f"training data in use at {late:.1f}s, past the cap of {cap}s; raise "
                                      "GPTQ_RESERVE_SECONDS")

    def write_checkpoint(self) -> None:
        """Rank 0's averaged weights, unquantised; a disk too full for them must not cost the artifact."""
        buffer = io.BytesIO()
        if self.world.is_main:
            torch.save({name: t.cpu() for name, t in self.model.state_dict().items()}, buffer)
            try:
                write_file(self.output / "final_model.pt", buffer.getvalue())
                self.log(f"Serialized model: {len(buffer.getvalue())} bytes")
            except OSError as error:
                self.log(f"WARNING: final_model.pt was not written ({error})")
        self.log(f"Code size: {len(self.source)} bytes")

    def write_artifact(self, hessians: dict[str, Tensor]) -> None:
        """All ranks quantise, rank 0 writes."""
        quantized, data = self.quantize_to_fit(hessians)
        if self.hp.gptq_enabled:
            done, left = len(quantized.gptq), len(quantized.fallback)
            self.log(f"GPTQ quantization: {done} layers with full GPTQ, {left} fallback to clip-search")
        for what, names in (("needed more damping", quantized.damped), ("got plain row search", quantized.fallback)):
            if names:
                self.log(f"WARNING: {len(names)} Hessians did not factor and {what}: {', '.join(names)}")
        if not self.world.is_main:
            return
        write_file(self.artifact, data)
        with contextlib.suppress(OSError):  # the next run replaces the artifact; under this name the file stays
            os.link(self.artifact, self.logs / f"{self.run_id}.int6.ptz")
        if self.hp.resume or self.hp.checkpoint_every_seconds:  # the run is safe; its snapshots would start a new one
            shutil.rmtree(self.hp.snapshots, ignore_errors=True)
        label, size = f"int6+{self.hp.compressor}", len(data)
        self.log(f"sha256 of the artifact: {hashlib.sha256(data).hexdigest()}\nSerialized model {label}: {size} bytes\n"
                 f"Total submission size {label}: {size + len(self.source)} bytes")

    def quantize_to_fit(self, hessians: dict[str, Tensor]) -> tuple[Quantized, bytes]:
        """Quantises and packs, with coarser int6 scales if TARGET_TOTAL_BYTES would be passed; each run alike.

        A try of brotli takes over a minute, so the size is predicted from the codes' entropy, with the usual ratio at
        first."""
        scales, target, state = 1.0, self.hp.target_total_bytes, self.model.state_dict()
        int6 = sum(t.numel() for name, t in state.items() if storage_class(name, t, self.hp) == "int6")
        ratio, limit, aim = PACKED_RATIO[self.hp.compressor], max(target, PREDICTED_FROM_BYTES), 0.994 * target
        for tries_left in reversed(range(6)):
            began = time.perf_counter()
            quantized = quantize_state(state, hessians, self.hp, scales, self.world)
            predicted = self.world.broadcast_object(ratio * content_bytes(quantized) + len(self.source))
            if target and int6 and predicted > limit:
                wanted = (aim - len(self.source)) / ratio
                quantized, scales = self.coarsen(quantized, hessians, scales, wanted, int6)
                self.log(f"WARNING: {predicted:.0f} bytes are over TARGET_TOTAL_BYTES={target}; scales x {scales:.4f}")
            if not all(bool(t.isfinite().all()) for t in quantized.tensors.values()):
                raise DivergedError("weights not finite or too large for fp16; lower MATRIX_LR or TIED_EMBED_LR")
            packing = time.perf_counter()
            settings = forward_settings(self.hp)
            data = pack_artifact(quantized, self.hp.compressor, settings) if self.world.is_main else b""
            self.log(f"quantization: {packing - began:.1f}s compression: {time.perf_counter() - packing:.1f}s")
            self.results["int6_scale_factor"] = scales
            size = self.world.broadcast_object(len(data))
            total = size + len(self.source)
            if not 0 < target < total:
                break
            if not int6 or not tries_left or scales == COARSEST_SCALES:
                self.log(f"WARNING: {total} is over TARGET_TOTAL_BYTES={target} still")
                break
            ratio, limit, aim = size / content_bytes(quantized), target, 0.995 * target
        return quantized, data

    def coarsen(self, quantized: Quantized, hessians: dict[str, Tensor], scales: float, wanted: float,
                int6: int) -> tuple[Quantized, float]:
        """Scales at which `content_bytes` is about `wanted`: twice the scale is one bit less for each int6 code."""
        for _ in range(4):
            excess = content_bytes(quantized) - wanted
            scales = min(COARSEST_SCALES, self.world.broadcast_object(scales * 2 ** (8 * excess / int6)))
            quantized = quantize_state(self.model.state_dict(), hessians, self.hp, scales, self.world)
        return quantized, scales

    def score(self) -> None:
        """Scores raw and averaged weights when there was training, then the artifact re-read from disk."""
        if not self.hp.eval_only:
            self.model.load_state_dict(self.raw)
            log_validation(self.log, self.hp, self.results["steps"], self.evaluator.full())
            self.average.copy_to_model()
            self.report("pre-quantization post-ema", "pre_quant", self.evaluator.full())
        began = time.perf_counter()
        self.load_artifact(Path(self.hp.eval_only or self.artifact))
        final = self.report("final_int6_roundtrip", "int6", self.evaluator.full())
        if self.hp.sliding_window_enabled:
            final = self.report("final_int6_sliding_window", "sliding", self.evaluator.sliding())
        seconds = time.perf_counter() - began
        self.results |= asdict(final) | {"eval_seconds": seconds}  # of all evaluations of the artifact
        if seconds > 0.8 * EVAL_CAP_SECONDS:
            self.log(f"WARNING: evaluation took {seconds:.0f}s of the allowed {EVAL_CAP_SECONDS}s")

    def report(self, label: str, key: str, score: Score) -> Score:
        self.log(f"{label} val_loss:{score.val_loss:.8f} val_bpb:{score.val_bpb:.8f} "
                 f"eval_time:{1000 * score.eval_seconds:.0f}ms")
        self.log.record("evaluation", name=key, **asdict(score))
        self.results[f"{key}_val_bpb"] = score.val_bpb
        return score

    def load_artifact(self, path: Path) -> None:
        """Reads the file on rank 0, hands the bytes to all ranks (other nodes have no such file) and loads them."""
        data = self.world.broadcast_object(path.read_bytes() if self.world.is_main else None)
        try:
            state = self.model.state_dict()
            limit = 8 * sum(t.numel() for t in state.values()) + 2**22  # twice what fp32 weights need
            tensors, meta = unpack_artifact(data, limit, forward_settings(self.hp))
            self.model.load_state_dict(dequantize(tensors, meta, state))
        except ArtifactError as error:
            raise ArtifactError(f"{path} cannot be scored: {error}") from None
        total = len(self.source) + len(data)
        headroom = SIZE_CAP_BYTES - total
        self.results |= {"code_bytes": len(self.source), "model_bytes": len(data), "total_bytes": total,
                         "headroom_bytes": headroom}
        if headroom < 0 and not self.failure:
            self.failure = OversizeError(f"{-headroom} bytes over the cap of {SIZE_CAP_BYTES}; raise MUON_WD, EMBED_WD")

    def summarize(self) -> None:
        """The block of `key: value` lines at column 0 that tools read."""
        self.results |= {"parameters": self.parameters, "peak_memory_mib": peak_memory_mib(self.world.device)[0],
                         "total_seconds": time.perf_counter() - self.began}
        block = [f"{key}: {self.results[key]:{spec}}" for key, spec in SUMMARY_FORMATS.items() if key in self.results]
        self.log("\n".join(["---", *block, f"valid: {f'no: {self.failure}' if self.failure else 'yes'}"]))
        self.log.record("summary", **self.results, valid=self.failure is None)

def gpu_report() -> str:
    if shutil.which("nvidia-smi") is None:
        return f"no nvidia-smi; {platform.platform()}, {os.cpu_count()} CPU cores"
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout or done.stderr

def settings_help() -> str:
    """Every setting with its default, meaning and choices, for --help."""
    text, hints = "settings (environment variables; switches are 0 or 1):\n", get_type_hints(Hyperparameters)
    for item in fields(Hyperparameters):
        choices = f" [{'|'.join(choices)}]" if (choices := get_args(hints[item.name])) else ""
        text += f"  {item.name.upper()}={format_setting(item.default)}\n      {item.metadata['help']}{choices}\n"
    return text

def main() -> int:
    """Runs the command line; the exit code, or, with several ranks, the end of the process."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"{settings_help()}\n{EXIT_CODES}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print-config", action="store_true", help="print the effective settings and stop")
    args, code = parser.parse_args(), 0
    try:
        hp = Hyperparameters.from_env(os.environ)
        if args.print_config:
            print("\n".join(f"{name}: {format_setting(value)}" for name, value in asdict(hp).items()))
        else:
            run = Run(hp, os.environ)
            run.perform()
            if run.failure:
                raise run.failure
    except (RunError, OSError) as error:  # what the user or the machine caused: one line, no traceback
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(2)  # if rank 0 fails too, torchrun ends this process meanwhile and the message comes once
        print(f"error: {error}", file=sys.stderr)
        code = getattr(error, "exit_code", SetupError.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = 130
    except Exception as error:  # noqa: BLE001 - whatever it was, the other ranks must not wait for this one
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # another rank is gone: torchrun must see it
            time.sleep(2)  # first, so that it names that one and ends the others without their tracebacks
        print(f"error: rank {os.environ.get('RANK', '0')} failed\n{traceback.format_exc()}", file=sys.stderr)
        code = 1
    if dist.is_initialized():
        # After a failure a clean end could wait for other ranks; after success gloo's threads were seen to abort it.
        if code == 0:
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code

if __name__ == "__main__":
    sys.exit(main())
