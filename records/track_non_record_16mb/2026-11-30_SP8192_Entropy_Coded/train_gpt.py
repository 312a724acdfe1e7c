"""The 16 MB language-model challenge in one file: train, quantise, write, re-read, score.

    python train_gpt.py                                                    # the lab's run: one GPU, five minutes
    PRESET=8xh100 torchrun --standalone --nproc_per_node=8 train_gpt.py    # the real one: 8 GPUs, ten minutes
    EVAL_ONLY=final_model.int6.ptz python train_gpt.py                     # score an artifact that exists
    python train_gpt.py --help                                             # every setting, its default and meaning

Settings are environment variables. This file plus the compressed weights must fit in 16,000,000 bytes.
Exit codes: 0 fine, 1 unexpected error, 2 settings, data or machine, 3 loss not finite, 4 over the size cap, 5 training
data used after the cap, 6 artifact unreadable, 130 interrupted. (torchrun exits 1 and lists them.)
"""
from __future__ import annotations

import argparse
import contextlib
import difflib
import faulthandler
import fcntl
import hashlib
import io
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import traceback
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the plain functions are used, and the log says so
    triton = None

# ---- Errors and limits -----------------------------------------------------------------------------------------------

SIZE_CAP_BYTES, EVAL_CAP_SECONDS = 16_000_000, 600  # decimal megabytes, code plus compressed weights

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
    return str(error).partition("\n")[0]

# ---- Settings --------------------------------------------------------------------------------------------------------

def setting(default: Any, meaning: str, **bounds: float) -> Any:
    """A field with its meaning and bounds: least (allowed itself), above and below (not allowed themselves), most."""
    return field(default=default, metadata={"meaning": meaning, "bounds": bounds})

IGNORED_SETTINGS = (  # of the root script and of published run commands: a warning, no error
    "EMBEDDING_DIM TIE_EMBEDDINGS EMBED_LR HEAD_LR XSA_LAST_N ATTENTION_GATE MUON_ROW_NORM POLAR_EXPRESS PRECISION "
    "MUON_BACKEND_STEPS MUON_BETA2 EMA_DECAY GPTQ_ENABLED VAL_LOSS_EVERY ROPE_TRAIN_SEQ_LEN DETERMINISTIC COMPRESSOR "
    "VE_ENABLED SKIP_GATES_ENABLED LN_SCALE CONTROL_TENSOR_NAME_PATTERNS").split()
REFUSED_SETTINGS = "TRANSFORM", "RESUME", "CHECKPOINT_EVERY_SECONDS"  # of the root script; a warning is not enough

# What pays with ten times the tokens of the lab's run, as published; other settings are the lab's (ABLATION.md).
PRESETS = {"lab": {}, "8xh100": {
    "max_wallclock_seconds": 600.0, "train_batch_tokens": 786_432, "context_ramp": 0.0,
    "muon_momentum_warmup_steps": 1500, "loop_start": 0.35, "gptq_reserve_seconds": 5.0}}

@dataclass(frozen=True)
class Hyperparameters:
    """Every setting of a run: the defaults, over them PRESET's, over them the environment's (upper-case names)."""
    # data and output
    data_dir: str = setting("./data/", "folder with datasets/ and tokenizers/; its spelling decides the data order")
    vocab_size: int = setting(8192, "tokenizer size; names the dataset folder fineweb10B_sp{V}", above=0, most=65536)
    run_id: str = setting("", "name of the log files (empty: a random one)")
    output_dir: str = setting(".", "where logs/, final_model.pt and final_model.int6.ptz are written")
    eval_only: str = setting("", "path of an artifact to score instead of training")
    seed: int = setting(1337, "decides the initial weights only, never the data order", least=0, most=2**63 - 1)
    preset: Literal["lab", "8xh100"] = setting("lab", "which settings are the defaults: PRESETS names the other ones")
    # machine
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto: cuda, else cpu")
    attention: Literal["auto", "fa3", "cudnn", "flash", "math"] = setting("auto", "attention kernel; a name forces it")
    kernels: Literal["auto", "0", "1"] = setting("auto", "fused Triton kernels; auto: on Hopper GPUs in bf16; 0: plain")
    compile: Literal["auto", "0", "1"] = setting("auto", "torch.compile; auto: on with CUDA and Triton")
    # length of the run
    iterations: int = setting(20000, "steps at most", above=0)
    max_wallclock_seconds: float = setting(300.0, "cap on training plus Hessian seconds (0 or less: none)")
    stall_seconds: float = setting(60.0, "longest step; then every rank prints its stack and ends (0: any)", least=0)
    warmup_steps: int = setting(20, "steps before the clock starts, whose effect is undone", least=0)
    warmdown_frac: float = setting(0.75, "last share of the run in which the rate falls linearly", most=1)
    min_lr: float = setting(0.1, "floor of the rate as a factor of the base rate", least=0)
    # batches
    train_batch_tokens: int = setting(98_304, "tokens of one optimizer step over all ranks", above=0)
    context_ramp: float = setting(0.6, "first share of the run, with sequences cut in parts", least=0, most=1)
    context_parts: int = setting(2, "parts of a sequence in the context ramp", above=0)
    micro_batch_tokens: int = setting(0, "tokens of one rank's forward (0: up to 98,304, in equal parts)", least=0)
    train_seq_len: int = setting(2048, "training context", above=0)
    eval_seq_len: int = setting(2048, "evaluation context", above=0)
    val_batch_tokens: int = setting(524_288, "tokens of one validation batch over all ranks and parts", above=0)
    # evaluation and logs
    train_log_every: int = setting(100, "steps between log lines (0: never)", least=0)
    sliding_window_enabled: Literal["1", "0"] = setting("1", "score the artifact with overlapping windows, officially")
    eval_stride: int = setting(64, "positions between sliding windows", above=0)
    # model
    num_layers: int = setting(11, "blocks; the first half feeds skips to the second", above=0)
    model_dim: int = setting(512, "width", above=0)
    num_heads: int = setting(4, "query heads", above=0)
    num_kv_heads: int = setting(2, "key and value heads", above=0)
    mlp_mult: float = setting(4.0, "MLP width over model width", above=0)
    logit_softcap: float = setting(30.0, "logits are cap * tanh(z / cap)", above=0)
    rope_base: float = setting(10000.0, "rotary base at the training length", above=0)
    rope_dims: int = setting(16, "rotated dimensions of a head", least=4)
    ve_dim: int = setting(128, "width of the value embedding", above=0)
    ve_layers: str = setting("9,10", "blocks that add the value embedding (empty: none)")
    qk_gain_init: float = setting(5.0, "initial gain on normed queries")
    loop_layers: str = setting("3-5", "first and last block of the loop")
    loop_repeats: int = setting(2, "further passes through the loop", above=0)
    loop_start: float = setting(1.0, "share of the run after which the loop is on (1: never)", least=0, most=1)
    parallel_from: int = setting(8, "first block whose attention and MLP read a lane each (0: none)", least=0)
    tied_embed_init_std: float = setting(0.005, "initial deviation of the token table", above=0)
    # optimizers
    tied_embed_lr: float = setting(0.03, "rate of the tables", least=0, most=1e30)
    matrix_lr: float = setting(0.02, "Muon's rate", least=0, most=1e30)
    scalar_lr: float = setting(0.02, "rate of gains, gates and scales", least=0, most=1e30)
    muon_momentum: float = setting(0.97, "Muon's momentum after its warm-up", least=0, below=1)
    muon_momentum_warmup_start: float = setting(0.92, "Muon's momentum at step 0", least=0, below=1)
    muon_momentum_warmup_steps: int = setting(800, "steps until Muon's full momentum", least=0)
    beta1: float = setting(0.9, "AdamW", least=0, below=1)
    beta2: float = setting(0.95, "AdamW", least=0, below=1)
    adam_eps: float = setting(1e-8, "AdamW", above=0)
    grad_clip_norm: float = setting(0.3, "largest 2-norm of the whole gradient (0: no clipping)", least=0)
    adam_wd: float = setting(0.02, "decay of gains, gates and scales", least=0)
    muon_wd: float = setting(0.085, "decay of Muon's matrices: the dial of the artifact's size", least=0)
    embed_wd: float = setting(0.085, "decay of the tables", least=0)
    ema_steps_fraction: float = setting(0.06, "horizon of the averaged weights, of all expected steps", above=0, most=1)
    # quantisation and artifact
    quant_step_factor: float = setting(1.0, "on all steps of codes; with a target the search begins there", above=0)
    gptq_calibration_batches: int = setting(20, "micro-batches for the Hessians", above=0)
    gptq_reserve_seconds: float = setting(4.0, "part of the cap kept for the Hessians", least=0)
    target_total_bytes: int = setting(15_995_000, "code plus artifact end just under it (0: steps stay)", least=0)

    # derived
    head_dim = property(lambda hp: hp.model_dim // hp.num_heads)
    ve_layer_list = property(lambda hp: [int(n) for n in re.findall(r"\d+", hp.ve_layers)])
    loop_bounds = property(lambda hp: [int(n) for n in hp.loop_layers.split("-")])
    loop_fits = property(lambda hp: hp.loop_bounds[-1] < hp.num_layers)
    loops = property(lambda hp: hp.loop_start < 1 and hp.loop_fits)
    parallel_layers = property(lambda hp: range(hp.parallel_from or hp.num_layers, hp.num_layers))
    ramp_seq_len = property(lambda hp: hp.train_seq_len // hp.context_parts)
    dataset_dir = property(lambda hp: Path(hp.data_dir, f"datasets/fineweb10B_sp{hp.vocab_size}"))
    tokenizer_path = property(lambda hp: Path(hp.data_dir, f"tokenizers/fineweb_{hp.vocab_size}_bpe.model"))
    fetch = property(lambda hp: f"run data/cached_challenge_fineweb.py --variant sp{hp.vocab_size} or set DATA_DIR")
    train_cap_seconds = property(lambda hp: max(0.0, hp.max_wallclock_seconds - hp.gptq_reserve_seconds))  # 0: no cap
    unused = property(lambda hp: [  # in words: the default depth has them, a shallow model has not
        f"{name} is set, but the model has only {hp.num_layers} blocks" for name, set_but_unused in (
            (f"LOOP_LAYERS={hp.loop_layers}", hp.loop_start < 1 and not hp.loop_fits),
            (f"PARALLEL_FROM={hp.parallel_from}", hp.parallel_from and not hp.parallel_layers)) if set_but_unused])

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
        hp, known = cls(**PRESETS.get(values.get("preset"), {}) | values), [*map(str.upper, hints), *IGNORED_SETTINGS]
        misspelt = [f"{name} is no setting; did you mean {near[0]}? (rename or unset it)" for name in sorted(environ)
                    if name not in [*known, *REFUSED_SETTINGS] and (near := close_settings(name.upper(), known))]
        misspelt += [f"{name}={environ[name]!r} is not possible with this script; unset it, or use the root script"
                     for name in REFUSED_SETTINGS if environ.get(name, "").strip("0.")]
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
    """One environment value as int, float, str or one of a Literal's choices. Raises ValueError."""
    if choices := get_args(kind):
        if raw not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return raw
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

def conflicts(hp: Hyperparameters) -> list[str]:
    """Every broken rule between settings, as a message with values, rule and remedy."""
    layers, fits = hp.ve_layer_list, [n for n in range(1, hp.model_dim + 1) if hp.model_dim % (2 * n) == 0]
    rules = [
        ("NUM_HEADS", hp.num_heads in fits, f"must cut MODEL_DIM={hp.model_dim} into heads of even size: {fits}"),
        ("NUM_KV_HEADS", hp.num_heads % hp.num_kv_heads == 0, f"must divide NUM_HEADS={hp.num_heads}"),
        ("ROPE_DIMS", hp.rope_dims % 2 == 0 and hp.rope_dims <= hp.head_dim,
         f"must be an even number from 4 to the head size {hp.head_dim}"),
        ("MLP_MULT", hp.mlp_mult * hp.model_dim >= 1, f"times MODEL_DIM={hp.model_dim} must be at least 1"),
        ("VE_LAYERS", re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*|", hp.ve_layers) and len({*layers}) == len(layers)
         and max(layers, default=0) < hp.num_layers, f"must be different numbers below NUM_LAYERS={hp.num_layers}"),
        ("LOOP_LAYERS", re.fullmatch(r"\d+-\d+", hp.loop_layers) and hp.loop_bounds[0] <= hp.loop_bounds[1]
         and (not hp.loops or not hp.parallel_layers or hp.loop_bounds[1] < hp.parallel_from),
         f"must be FIRST-LAST, before PARALLEL_FROM={hp.parallel_from}"),
        ("PARALLEL_FROM", not hp.parallel_layers or hp.parallel_from >= hp.num_layers // 2,
         f"must be 0 or in the second half of NUM_LAYERS={hp.num_layers}, from {hp.num_layers // 2} on"),
        ("CONTEXT_PARTS", hp.train_seq_len % hp.context_parts == 0, f"must divide TRAIN_SEQ_LEN={hp.train_seq_len}"),
        ("EVAL_STRIDE", hp.eval_stride <= hp.eval_seq_len, f"must be at most EVAL_SEQ_LEN={hp.eval_seq_len}"),
        ("MAX_WALLCLOCK_SECONDS", hp.max_wallclock_seconds <= 0 or hp.train_cap_seconds > 0,
         f"must be over GPTQ_RESERVE_SECONDS={hp.gptq_reserve_seconds}, or 0 for no cap"),
        ("WARMUP_STEPS", hp.warmup_steps > 1 or hp.train_cap_seconds <= 0, "must be at least 2 under a cap"),
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
    per_rank, rest = divmod(hp.train_batch_tokens, unit := world_size * hp.train_seq_len)
    if rest:
        raise SetupError(f"TRAIN_BATCH_TOKENS={hp.train_batch_tokens} must be a multiple of {unit}, ranks x sequence")
    divisors = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    largest = max([n for n in divisors if n * hp.train_seq_len <= 98_304], default=1)
    micro = hp.micro_batch_tokens / hp.train_seq_len or largest
    fits = [n * hp.train_seq_len for n in divisors]
    if not hp.micro_batch_tokens and 4 * fits[divisors.index(largest)] < min(fits[-1], 98_304):
        raise SetupError(f"TRAIN_BATCH_TOKENS={hp.train_batch_tokens} makes small micro-batches; change it or set "
                         f"MICRO_BATCH_TOKENS to one of {fits}")
    if micro not in divisors:
        raise SetupError(f"MICRO_BATCH_TOKENS={hp.micro_batch_tokens} must be one of {fits}, to cut a rank's batch")
    accum = per_rank // int(micro)
    eval_sequences = max(1, hp.val_batch_tokens // (world_size * accum) // hp.eval_seq_len)
    return BatchPlan(accum, int(micro), int(micro) * world_size, eval_sequences)

# ---- Machine: ranks, device, clock, log ------------------------------------------------------------------------------

@dataclass(frozen=True)
class World:
    """Place of this process among all ranks, and every collective the file uses; with one rank each is the identity."""
    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: Any = None  # group and stream for small messages, which must not wait for queued GPU work
    control_stream: Any = None
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
        return lambda: float((done.synchronize(), host)[1])

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

def choose_device(wanted: str, local_rank: int) -> torch.device:
    """cuda, else cpu; a name forces one. Raises SetupError when it is not there."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise SetupError(f"LOCAL_RANK={local_rank}, but {count} GPUs are visible; use --nproc_per_node={count}"
                         if count else f"DEVICE=cuda, but PyTorch {torch.__version__} finds none; unset DEVICE")
    return torch.device("cuda", local_rank)

def choose_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "the GPU has bf16"
    return torch.float32, "WARNING: no bf16 on this GPU: slower" if device.type == "cuda" else device.type
def choose_compile(wanted: str, device: torch.device) -> tuple[bool, str]:
    if wanted != "auto" or device.type != "cuda":
        return wanted == "1", f"COMPILE={wanted} on {device.type}"
    return triton is not None, "CUDA and Triton" if triton else "WARNING: slow eager mode, no Triton"

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
        # Half an hour: the longest wait is for rank 0's compression, measured 47 to 117 s a try, 6 tries at most.
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=30), device_id=gpu)
    control = dist.new_group() if size > 1 else None
    return World(rank, size, device, control, torch.cuda.Stream(gpu) if gpu else None)

def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

def peak_memory_mib(device: torch.device) -> tuple[int, int]:
    """Peak MiB (allocated, reserved) on the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20, torch.cuda.max_memory_reserved(device) >> 20
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,) * 2

class Stopwatch:
    """The training clock: it counts only between start() and stop(), and only it is held against the cap."""
    def __init__(self) -> None:
        self._total, self._since = 0.0, None
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
                print(line, flush=True)
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

SHARD_MAGIC, SHARD_HEADER_INTS, BOS_ID = [20240520, 1], 256, 1
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
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(hp.tokenizer_path))
    except (OSError, RuntimeError) as error:
        raise SetupError(f"no tokenizer at {hp.tokenizer_path} ({error}); {hp.fetch}") from None
    if (size := tokenizer.vocab_size()) != hp.vocab_size:
        raise SetupError(f"VOCAB_SIZE={hp.vocab_size} must be {size}, the pieces of {hp.tokenizer_path}")
    return tokenizer

def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard as a read-only uint16 memory map, header and file size checked. Raises SetupError."""
    header, size = np.fromfile(path, "<i4", SHARD_HEADER_INTS).tolist(), path.stat().st_size
    count = header[2] if len(header) == SHARD_HEADER_INTS else 0
    expected = SHARD_HEADER_INTS * 4 + 2 * count
    if header[:2] != SHARD_MAGIC or size != expected:
        raise SetupError(f"{path} must begin with {SHARD_MAGIC} and have {expected} bytes, not {size}; fetch it again")
    return np.memmap(path, "<u2", "r")[2 * SHARD_HEADER_INTS:]

def check_token_ids(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    if tokens.max(initial=0) >= vocab_size:
        raise SetupError(f"{path} holds token {tokens.max()}, but VOCAB_SIZE={vocab_size}; fetch both again")

def find_shards(hp: Hyperparameters, split: str) -> list[Path]:
    """Shards in order, with headers, sizes and the first ids of each checked. Raises SetupError."""
    if not (paths := sorted(hp.dataset_dir.glob(f"fineweb_{split}_*.bin"))):
        raise SetupError(f"no {split} shards in {hp.dataset_dir}; {hp.fetch}")
    for path in paths:
        check_token_ids(open_shard(path)[:65_536], hp.vocab_size, path)
    return paths

@dataclass(frozen=True)
class ValidationSet:
    """Tokens (uint16) to score and the bytes that their targets stand for."""
    tokens: np.ndarray
    target_bytes: int
    note: str  # what the number of bytes stands for
    targets = property(lambda self: len(self.tokens) - 1)

def load_validation(hp: Hyperparameters, tables: ByteTables) -> ValidationSet:
    """All validation shards, joined and cut to whole sequences plus one token. Raises SetupError."""
    tokens = np.concatenate([open_shard(path) for path in find_shards(hp, "val")])
    manifest = Path(hp.data_dir, "manifest.json")
    check_token_ids(tokens, hp.vocab_size, hp.dataset_dir)
    if len(tokens) <= hp.eval_seq_len:
        raise SetupError(f"{len(tokens)} val tokens must exceed EVAL_SEQ_LEN={hp.eval_seq_len}; fetch more")
    rest = (len(tokens) - 1) % hp.eval_seq_len
    used = tokens[:len(tokens) - rest]
    whole = {"docs_val": int((tokens == BOS_ID).sum()), "tokens_val": len(tokens),
             "bytes_val_normalised": tables.count(tokens)}
    if (target_bytes := tables.count(used)) < 1:
        raise SetupError(f"the val tokens stand for {target_bytes} bytes; fetch shards and tokenizer again")
    try:
        datasets = json.loads(manifest.read_text("utf-8"))["datasets"] if manifest.is_file() else []
        entry = next((dict(d) for d in datasets if d["name"] == hp.dataset_dir.name), {})
        note = f"normalised text; {rest} tail tokens not scored; {check_manifest(hp, entry, whole)}{tables.note}"
    except SetupError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SetupError(f"{manifest} is damaged ({error!r}); fetch it again or remove it") from None
    return ValidationSet(used, target_bytes, note)

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

class CoprimeLoader:
    """The recipe's data order, alike on all ranks and in each new loader: each draw mixes windows of many shards."""
    def __init__(self, paths: list[Path], seq_len: int, draw_windows: int, rank: int = 0, world_size: int = 1,
                 vocab_size: int = 65536) -> None:
        self.paths, self.seq_len, self.draw_windows, self.vocab_size = paths, seq_len, draw_windows, vocab_size
        self.rank, self.world_size, self.draws = rank, world_size, 0
        self.lengths = [len(open_shard(path)) for path in paths]
        self.walks: dict[int, Iterator[int]] = {}  # by shard
        self.blocks_left = {i: (n - 1) // seq_len for i, n in enumerate(self.lengths) if n > seq_len}
        if not self.blocks_left:
            raise SetupError(f"no train shard has more than TRAIN_SEQ_LEN={seq_len} tokens; fetch more or lower it")
        # FNV-style 64-bit fold over the bytes of all paths: the data order depends on names alone
        seed = reduce(lambda fold, byte: (fold ^ byte) * 1099511628211 % 2**64, "".join(map(str, paths)).encode(), 0)
        self.rng = np.random.Generator(np.random.PCG64(seed))

    def next_windows(self) -> list[tuple[int, int]]:
        """(shard, first token) of all ranks' windows of the next draw."""
        progress = min(self.draws / 1800, 1.0)  # over these draws, more even weights and a wider mix
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

    def _walk(self, tokens: int) -> tuple[int, Iterator[int]]:
        """A walk over a shard of more than seq_len tokens: how many blocks, and their first tokens, each once."""
        phase = int(self.rng.integers(min(self.seq_len, tokens - self.seq_len)))
        blocks = (tokens - 1 - phase) // self.seq_len
        start, stride = int(self.rng.integers(blocks)), 0  # (a choice among one number takes nothing from `rng`)
        while math.gcd(stride, blocks) != 1:  # coprime: all blocks come
            stride = int(self.rng.integers(1, blocks))
        return blocks, (phase + self.seq_len * ((start + i * stride) % blocks) for i in range(blocks))

    def _take(self, shard: int, count: int) -> list[tuple[int, int]]:
        windows = []
        for _ in range(count):
            if shard not in self.walks or not self.blocks_left[shard]:
                self.blocks_left[shard], self.walks[shard] = self._walk(self.lengths[shard])
            self.blocks_left[shard] -= 1
            windows.append((shard, next(self.walks[shard])))
        return [windows[k] for k in self.rng.permutation(count)]

class Prefetcher:
    """Reads a loader ahead in a thread. Each batch has its own pinned memory, so none is overwritten in flight."""
    def __init__(self, loader: CoprimeLoader, device: torch.device, clock: Stopwatch) -> None:
        self.loader, self.device, self.clock, self.last_read_seconds = loader, device, clock, 0.0
        self._thread = ThreadPoolExecutor(1)
        self._ahead = deque(self._thread.submit(self._read) for _ in range(3))  # batches read ahead
    def _read(self) -> list[Tensor]:
        batch = [torch.from_numpy(np.ascontiguousarray(part)) for part in self.loader.next_batch()]
        self.last_read_seconds = self.clock.seconds
        return [part.pin_memory() for part in batch] if self.device.type == "cuda" else batch
    def next(self) -> list[Tensor]:
        """Inputs and targets on the device, int64 (sequences, seq_len); waits for the reader or raises its error."""
        batch = self._ahead.popleft().result()
        self._ahead.append(self._thread.submit(self._read))
        return [part.to(self.device, non_blocking=True) for part in batch]
    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

# ---- Attention: one entry point, chosen by a probe -------------------------------------------------------------------

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal; q (B, T, H, D), k and v (B, T, KV, D) -> as q

def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's kernel, the one that `choose_attention` left on."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)

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

def choose_attention(hp: Hyperparameters, device: torch.device, dtype: torch.dtype) -> tuple[AttentionFunction, str]:
    """FlashAttention-3, else cuDNN on Hopper or newer, else flash, else math, and why; ATTENTION forces one.
    Each is tried forward and backward: builds exist that import and fail at the first launch. Raises SetupError."""
    forced, refused, kv_shape = hp.attention != "auto", [], (2, 96, hp.num_kv_heads, hp.head_dim)
    inputs = random_inputs(device, dtype, (2, 96, hp.num_heads, hp.head_dim), kv_shape, kv_shape)
    for name in [hp.attention] if forced else ["fa3", *["cudnn"] * is_hopper(device), "flash", "math"]:
        try:
            for backend in ("cudnn", "flash", "math", "mem_efficient"):
                getattr(torch.backends.cuda, f"enable_{backend}_sdp")(backend == name)
            function = fa3_attention if name == "fa3" else sdpa_attention
            if not (error := largest_error(function, math_attention, inputs)) < 3e-2:  # bf16 rounding is under 1e-2
                raise RuntimeError(f"its result is off by {error:.1e}")
            reason = f"ATTENTION={name}" if forced else "; ".join(refused) or "first choice"
            return function, f"{name} ({reason})"
        except (ImportError, RuntimeError, AttributeError, TypeError) as error:
            refused.append(f"{name}: {first_line(error)}")
    raise SetupError(f"ATTENTION={hp.attention} cannot be used here: {'; '.join(refused)}; unset ATTENTION")

# ---- Operations: plain PyTorch, and the Triton kernels that must equal it --------------------------------------------

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
    dims = hp.rope_dims
    base = hp.rope_base * max(1.0, length / hp.train_seq_len) ** (dims / (dims - 2))
    frequencies = base ** -(torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dims of each head as halves (a, b); x (B, T, H, D)."""
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
    With `dx_ptr` q, k and v hold their gradients, and the tile goes back to the gradients of x and gain."""
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
    """XSA: drops from each head's output (B, T, H, D) its part along the value (B, T, KV, D) at the same position."""
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
    an fp32), so that the backward needs no second tensor. backward: out = product times the slope at `hidden`."""
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
    needs = {"CUDA and Triton": triton is not None and device.type == "cuda", "Hopper or newer": is_hopper(device),
             "bf16": dtype == torch.bfloat16, f"widths in eights, not {widths}": not any(w % 8 for w in widths)}
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
    def __init__(self, hp: Hyperparameters, ops: Operations) -> None:
        super().__init__()
        self.kv_heads, self.ops = hp.num_kv_heads, ops
        dim, kv_dim = hp.model_dim, hp.num_kv_heads * hp.head_dim
        self.q_gain = nn.Parameter(torch.full((hp.num_heads,), hp.qk_gain_init))
        self.c_q, self.c_k, self.c_v = Linear(dim, dim), Linear(dim, kv_dim), Linear(dim, kv_dim)
        self.proj = Linear(dim, dim)
        self.gate = nn.Parameter(torch.zeros(hp.num_heads, min(12, dim)))  # as many channels as published

    def forward(self, x: Tensor, rope: Rope, value: Tensor | None, gain: Tensor, first: int) -> Tensor:
        """x (B, T, model_dim) -> the same from position `first` on."""
        weights = torch.cat([self.c_q.weight, self.c_k.weight, self.c_v.weight])
        qkv = F.linear(x, weights.to(x.dtype))  # one product: x is read once, its gradient needs no sum
        q, k, v = self.ops.split_qkv(qkv, value, self.q_gain, *rope, self.kv_heads)
        y = remove_own_value(self.ops.attend(q, k, v)[:, first:], v[:, first:])
        read = x[:, first:, :self.gate.size(1)]  # the gate starts at 1 (sparse gate, parameter-golf PR 1787)
        y = y * (2 * torch.sigmoid(F.linear(read, self.gate.to(x.dtype))))[..., None]
        return self.proj(y.flatten(2), gain)

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
        self.norm_scale = 1.0 / math.sqrt(layer + 1)
        self.attn_scale, self.mlp_scale = (nn.Parameter(torch.ones(hp.model_dim)) for _ in range(2))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, hp.model_dim))
        self.attn, self.mlp = SelfAttention(hp, ops), MLP(hp, ops)
    def attention_part(self, x: Tensor, rope: Rope, value: Tensor | None, first: int) -> Tensor:
        """x (B, T, model_dim) -> what attention adds, (B, T - first, model_dim)."""
        return self.attn(rms_norm(x) * self.norm_scale, rope, value, self.attn_scale, first)
    def mlp_part(self, x: Tensor) -> Tensor:
        return self.mlp(rms_norm(x) * self.norm_scale, self.mlp_scale)

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

def weighted_sum(terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of activations (B, T, C) by factors, (C) or scalars, each cast to its activation's dtype."""
    return sum(factor.to(term.dtype) * term for factor, term in terms)

class GPT(nn.Module):
    """U-Net transformer: the first half of the passes feeds gated skips to the second half, last output first.
    Some blocks may form a loop that can be switched on (depth recurrence, parameter-golf PRs 1204 and 1493), and from
    PARALLEL_FROM on attention and MLP read a lane each and write to both (parallel residuals, PRs 1204 and 1530)."""
    def __init__(self, hp: Hyperparameters, ops: Operations) -> None:
        super().__init__()
        self.hp, self.ops, self.looping = hp, ops, False
        self.rope: dict[int, Rope] = {}  # by length; in the graph they would be computed per element
        blocks, (first, last) = [*range(hp.num_layers)], hp.loop_bounds
        looped = blocks[:last + 1] + blocks[first:last + 1] * hp.loop_repeats + blocks[last + 1:]
        self.orders = {False: blocks, True: looped}  # in which blocks are passed, without and with the loop
        skips = len(self.orders[hp.loops]) // 2
        self.skip_weights = nn.Parameter(torch.ones(skips, hp.model_dim))
        self.skip_gates = nn.Parameter(torch.zeros(skips, hp.model_dim))
        lane_mix = torch.tensor([1.1, 1.0, 1.0]).repeat(len(hp.parallel_layers), 2, 1)  # of itself, attention, MLP
        self.lane_mix = nn.Parameter(lane_mix) if hp.parallel_layers else None
        self.tok_emb = nn.Embedding(hp.vocab_size, hp.model_dim)
        self.blocks = nn.ModuleList(Block(hp, layer, ops) for layer in range(hp.num_layers))
        self.ve_shared = ValueEmbedding(hp) if hp.ve_layer_list else None
        self.ve_layer_scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in hp.ve_layer_list)
        if hp.loops:  # in the state dict, so that weights and artifacts say how they were trained last
            self.register_buffer("loop_on", torch.zeros(1))
            self.register_load_state_dict_post_hook(lambda model, _: model.set_looping(bool(model.loop_on)))
            self.set_looping(hp.loop_start == 0)

    def set_looping(self, on: bool) -> None:
        """Blocks to pass through from now on: once each, or the loop as often as it is set."""
        self.looping = on
        if self.hp.loops:
            self.loop_on.fill_(on)

    def take_skip(self, keep: Tensor, x: Tensor, skips: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Terms of keep * lerp(weight * skip, x, sigmoid(gate)); without a skip, of keep * x.
        Folded factors need three sums over all tokens for their gradients, nested products would need four. Rows count
        from the innermost skip that there can be: with and without the loop the same blocks share one."""
        if not skips:
            return [(keep, x)]
        row = len(self.skip_weights) - len(skips)
        gate = torch.sigmoid(self.skip_gates[row])
        return [(keep * gate, x), (keep * (1 - gate) * self.skip_weights[row], skips.pop())]

    def pass_lanes(self, layer: int, lanes: tuple[Tensor, Tensor], x0: Tensor, rope: Rope, value: Tensor | None,
                   first: int) -> tuple[Tensor, Tensor]:
        """A block with two lanes (B, T, model_dim): attention reads the first, mixed with x0, the MLP the second."""
        block, factors = self.blocks[layer], self.lane_mix[layer - self.hp.parallel_from]
        read = weighted_sum([*zip(block.resid_mix, (lanes[0], x0))])
        lanes = tuple(lane[:, first:] for lane in lanes)
        added = block.attention_part(read, rope, value, first), block.mlp_part(lanes[1])
        return tuple(weighted_sum([*zip(row, (lane, *added))]) for row, lane in zip(factors, lanes))

    def hidden(self, ids: Tensor, first: int = 0) -> Tensor:
        """Token ids (B, T) -> normed output (B, T - first, model_dim): what comes before `first` is context only."""
        x = x0 = rms_norm(self.tok_emb(ids))
        rope = self.rope.get(ids.size(1)) or rope_tables(self.hp, ids.size(1), ids.device, x.dtype)
        shared = None if self.ve_shared is None else self.ve_shared(ids)
        values = {n: shared * scale.to(x.dtype) for n, scale in zip(self.hp.ve_layer_list, self.ve_layer_scales)}
        skips, lanes, order = [], None, self.orders[self.looping]
        for place, layer in enumerate(order):
            block, begin = self.blocks[layer], first if place == len(order) - 1 else 0
            incoming = skips if place >= len(order) // 2 else []
            if layer in self.hp.parallel_layers:
                one = torch.ones_like(block.attn_scale)
                inner, outer = lanes or (x, x)
                inner = weighted_sum(self.take_skip(one, inner, incoming))
                lanes = self.pass_lanes(layer, (inner, outer), x0, rope, values.get(layer), begin)
                continue
            keep, add = block.resid_mix
            x = weighted_sum([*self.take_skip(keep, x, incoming), (add, x0)])
            x = x[:, begin:] + block.attention_part(x, rope, values.get(layer), begin)
            x = x + block.mlp_part(x)
            if place < len(order) // 2:
                skips.append(x)
        return rms_norm(x if lanes is None else (lanes[0] + lanes[1]) / 2)

    def forward(self, ids: Tensor, targets: Tensor, first: int = 0, reduction: str = "mean") -> Tensor:
        """fp32 nats of the targets (B, T) from position `first` on: their mean, or each (reduction none)."""
        x, targets = self.hidden(ids, first), targets[:, first:]
        weight = self.tok_emb.weight.to(x.dtype)  # the head is the token table
        losses = self.ops.head_losses(x.flatten(0, 1), weight, targets.flatten(), self.hp.logit_softcap)
        return losses.mean() if reduction == "mean" else losses.view_as(targets)

@torch.no_grad()
def init_matrices(model: GPT) -> None:
    """Draws tables and matrices in the order of the state dict; small matrices keep PyTorch's default."""
    deviations = {"tok_emb": model.hp.tied_embed_init_std, "ve_shared.embed": 0.01}
    for name, module in model.named_modules():
        if name in deviations:
            module.weight.normal_(0.0, deviations[name])
        elif isinstance(module, Linear):
            small = min(module.weight.shape) < 64
            if name.endswith(("attn.proj", "mlp.proj")) or (small and name == "ve_shared.proj"):
                module.weight.zero_()
            elif not small:
                nn.init.orthogonal_(module.weight)

CONTROL_TENSORS = ("attn_scale mlp_scale resid_mix q_gain attn.gate skip_weight skip_gates lane_mix ve_layer_scales "
                   "ve_shared.scale").split()  # parts of names: they stay fp32, AdamW has them and they get no codes

def is_control(name: str) -> bool:
    return any(part in name for part in CONTROL_TENSORS)

def build_model(hp: Hyperparameters, ops: Operations, device: torch.device, dtype: torch.dtype) -> GPT:
    """A freshly initialised model; the same seed gives the same weights on any device and rank.
    bf16 rounds all parameters; linear weights, control tensors and vectors go back to fp32, tables stay bf16."""
    torch.manual_seed(hp.seed)
    model = GPT(hp, ops)
    init_matrices(model)
    linears = {id(module.weight) for module in model.modules() if isinstance(module, Linear)}
    for name, p in model.named_parameters():
        master = id(p) in linears or p.ndim < 2 or is_control(name)
        p.data = p.data.to(dtype).to(torch.float32 if master else dtype)
    lengths = {hp.train_seq_len, hp.ramp_seq_len, hp.eval_seq_len}
    model.rope = {length: rope_tables(hp, length, device, dtype) for length in lengths}
    return model.to(device)

# ---- Optimizers ------------------------------------------------------------------------------------------------------

# Quintics (a, b, c) of Polar Express (Amsel et al. 2025, arXiv:2505.16932) for 5 steps and a safety factor of 2 %.
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))

def newton_schulz(g: Tensor) -> Tensor:
    """Approximate orthogonal factor of each matrix of a batch (K, rows, cols), in bf16: singular values go to about 1.
    Rows have norm 1 before (MuonEq-R, parameter-golf PR 1285). The order bA + (cA)A is the published one; other orders
    differ by up to 2e-2 in bf16. A zero matrix stays zero."""
    x = (g / g.norm(dim=-1, keepdim=True).clamp_min(1e-7)).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x.mT if tall else x

class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised updates, for 2-D weights (Jordan et al. 2024), decay decoupled.
    Matrices of one shape form a group and are orthogonalised as one batch. Each rank does a contiguous share of a group
    and keeps the momentum of that share only; updates are gathered in bf16 while the next group is computed."""
    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, world: World,
                 orthogonalize: Callable[[Tensor], Tensor]) -> None:
        by_shape = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        super().__init__([{"params": group} for group in by_shape.values()],
                         {"lr": lr, "weight_decay": weight_decay, "momentum": 0.0})
        self.world, self.orthogonalize = world, orthogonalize

    @torch.no_grad()
    def step(self) -> None:
        started = []
        for group in self.param_groups:
            mine, momenta = self.share(group)
            g = torch.stack([p.grad for p in mine])
            g.add_(momenta.mul_(group["momentum"]).add_(g), alpha=group["momentum"])  # Nesterov
            rows, cols = mine[0].shape
            updates = self.orthogonalize(g) * max(1.0, rows / cols) ** 0.5
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
    """Names by optimizer group: embed, muon, scalar. Every parameter is in exactly one."""
    groups: dict[str, list[str]] = {"embed": [], "muon": [], "scalar": []}
    for name, p in model.named_parameters():
        table = name in ("tok_emb.weight", "ve_shared.embed.weight")
        assert table or is_control(name) or p.ndim == 2, f"{name} is in no optimizer group"
        groups["embed" if table else "scalar" if is_control(name) else "muon"].append(name)
    return groups

class Optimizers:
    """Muon for matrices, AdamW for tables and scalars; all rates follow one factor."""
    def __init__(self, model: GPT, world: World, orthogonalize: Callable[[Tensor], Tensor] = newton_schulz) -> None:
        hp, named = model.hp, dict(model.named_parameters())
        groups = {key: [named[name] for name in names] for key, names in parameter_groups(model).items()}
        rates = ("embed", hp.tied_embed_lr, hp.embed_wd), ("scalar", hp.scalar_lr, hp.adam_wd)
        self.adam = torch.optim.AdamW(
            [{"params": groups[key], "lr": lr, "weight_decay": decay} for key, lr, decay in rates],
            betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, fused=world.device.type == "cuda")
        self.muon = Muon(groups["muon"], hp.matrix_lr, hp.muon_wd, world, orthogonalize)
        self.groups = self.adam.param_groups + self.muon.param_groups
        for group in self.groups:
            group["base_lr"] = group["lr"]

    def step(self, lr_factor: float, momentum: float) -> None:
        for group in self.groups:  # AdamW has no use for a momentum
            group |= {"lr": group["base_lr"] * lr_factor, "momentum": momentum}
        self.muon.step()
        self.adam.step()

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

Score = dict[str, float]  # val_loss in nats a token, val_bpb, eval_seconds

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
        self._tokens = torch.from_numpy(val.tokens.astype(np.int32)).to(world.device)

    @torch.no_grad()
    def score(self, stride: int) -> Score:
        """Windows overlap by all but `stride`, which is EVAL_SEQ_LEN for none."""
        synchronize(self.world.device)
        began, world = time.perf_counter(), self.world
        windows = sliding_windows(self.val.targets, self.hp.eval_seq_len, stride)
        windows = windows[len(windows) * world.rank // world.size:len(windows) * (world.rank + 1) // world.size]
        batch = min(self.plan.eval_sequences, len(windows))  # always this shape: each shape would be compiled
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # losses, number of scored targets
        for first in np.unique(windows[:, 1]):  # alike windows form batches: logits start at `first`
            alike = windows[windows[:, 1] == first]
            for at in range(0, len(alike), batch):
                part = torch.from_numpy(alike[at:at + batch]).to(world.device)
                filled = F.pad(part, (0, 0, 0, batch - len(part)))  # rows of zeros score nothing
                sums += self._batch_sums(filled, int(first))
        loss_sum, scored = world.sum(sums).tolist()
        assert scored == self.val.targets, f"scored {scored:.0f} targets instead of {self.val.targets}"
        loss = loss_sum / scored
        return {"val_loss": loss, "val_bpb": loss / math.log(2) * scored / self.val.target_bytes,
                "eval_seconds": time.perf_counter() - began}

    def validate(self, log: RunLog, step: int) -> None:
        score = self.score(self.hp.eval_seq_len)
        log(f"{step}/{self.hp.iterations} val_loss: {score['val_loss']:.4f} val_bpb: {score['val_bpb']:.4f}")
        log.record("validation", step=step, **score)

    def _batch_sums(self, windows: Tensor, first: int) -> Tensor:
        """(2,) scored losses and their number of windows (B, 3) that start scoring at `first` or not at all."""
        start, begin, end = windows.T[:, :, None]
        column = torch.arange(self.hp.eval_seq_len + 1, device=windows.device)
        tokens = self._tokens[(start + column).clamp_max(self.val.targets)].long()
        losses = self.loss_function(tokens[:, :-1], tokens[:, 1:], first, "none")
        column = column[first:-1]
        scored = (column >= begin) & (column < end)
        return torch.stack([torch.where(scored, losses, 0).double().sum(), scored.sum()])

# ---- Codes -----------------------------------------------------------------------------------------------------------

STEPS_PER_OCTAVE = 256  # of scales: so fine that the artifact's size follows them without jumps
LARGEST_CODE = 127
# Steps of codes in root mean squares of their matrix, by part of name: where a byte more helps all alike. From the
# divergence that each kind costs when it alone is quantised (ABLATION.md); one step a matrix, since an entropy coder
# wants equal steps where all weights matter alike.
CODE_STEPS = {"tok_emb": 0.065, "ve_shared.embed": 0.61, "ve_shared.proj": 0.127, "attn.c_": 0.425, "attn.proj": 0.35,
              "mlp.fc": 0.475, "mlp.proj": 0.575, "": 0.4}
FINEST_STEP = 6 / LARGEST_CODE  # below it codes end within 6 root mean squares: clipping costs more than it gains
BF16_MAX_ELEMENTS = 16_384  # smaller tensors and control tensors stay bf16, as which the GPU reads them anyway

def is_coded(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is stored in codes; all others stay bf16."""
    return tensor.numel() > BF16_MAX_ELEMENTS and tensor.ndim == 2 and not is_control(name)

def code_steps(matrices: Mapping[str, Tensor], coarseness: float) -> Tensor:
    """The step of each matrix, int32 (matrices): n stands for the scale 2 ** (n / STEPS_PER_OCTAVE)."""
    relative = [next(step for part, step in CODE_STEPS.items() if part in name) for name in matrices]
    octaves = torch.tensor([math.log2(max(FINEST_STEP, step * coarseness)) for step in relative])
    rms = torch.stack([w.detach().float().square().mean() for w in matrices.values()]).sqrt().clamp(1e-15, 1e15)
    return (STEPS_PER_OCTAVE * (rms.log2() + octaves.to(rms.device, non_blocking=True))).round().to(torch.int32)

def step_scale(step: Tensor) -> Tensor:
    return torch.exp2(step.float() / STEPS_PER_OCTAVE)
def nearest_code(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)

# ---- Training --------------------------------------------------------------------------------------------------------

class Gradients:
    """The gradients of a step, in one flat buffer per dtype: one all-reduce, one norm, and addresses that stay."""
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        by_dtype = defaultdict(list)
        for p in sorted(parameters, key=lambda p: -p.numel()):  # the odd sizes last: the others stay aligned
            by_dtype[p.dtype].append(p)
        self.groups, self.flats = [*by_dtype.values()], []
        for group in self.groups:
            sizes = [p.numel() for p in group]
            self.flats.append(torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device))
            for p, piece in zip(group, self.flats[-1].split(sizes)):
                p.grad = piece.view_as(p)

    def add(self, loss: Tensor) -> None:
        found = iter(torch.autograd.grad(loss, [p for group in self.groups for p in group], materialize_grads=True))
        for group in self.groups:
            torch._foreach_add_([p.grad for p in group], [next(found) for _ in group])
    def average(self, world: World) -> None:
        """Mean over ranks: one all-reduce per dtype (137 MB in all)."""
        for flat in self.flats if world.size > 1 else ():
            world.sum(flat.div_(world.size))
    def clip(self, largest_norm: float) -> None:
        """Scales all so that the 2-norm of the whole is at most that."""
        norms = torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float32) for flat in self.flats])
        factor = (largest_norm / (norms.norm() + 1e-6)).clamp_max(1.0)
        for flat in self.flats:
            flat.mul_(factor)

class Trainer:
    """The loop: warm-up whose effect is undone, then steps until the cap or the last iteration."""
    def __init__(self, model: GPT, evaluator: Evaluator, train_paths: list[Path], log: RunLog,
                 orthogonalize: Callable[[Tensor], Tensor]) -> None:
        self.model, self.hp, self.train_paths, self.evaluator, self.log = model, model.hp, train_paths, evaluator, log
        self.plan, self.world, self.loss_function = evaluator.plan, evaluator.world, evaluator.loss_function
        self.clock, self.steps_done, self.last_read_seconds = Stopwatch(), 0, 0.0
        self.gradients = Gradients(model.parameters())
        self.optimizers = Optimizers(model, self.world, orthogonalize)
        size = (self.plan.micro_sequences, self.hp.train_seq_len)
        self.inputs, self.targets = (torch.zeros(size, dtype=torch.int64, device=self.world.device) for _ in range(2))
        self.loss = torch.zeros((), device=self.world.device)  # the mean over a step's micro-batches
        self.context = self.hp.train_seq_len  # tokens of a sequence at the moment
        self.graphs: dict[tuple[bool, int], Callable[[], None]] = {}  # by mode: whether the loop is on, and the context
        self.step_seconds: dict[tuple[bool, int], float] = {}
        self.graph_pool = None

    tokens_done = property(lambda self: self.steps_done * self.hp.train_batch_tokens)
    mode = property(lambda self: (self.model.looping, self.context))

    @contextlib.contextmanager
    def on_the_clock(self) -> Iterator[Prefetcher]:
        """A new reader while the clock runs; notes when it last read."""
        synchronize(self.world.device)
        self.clock.start()
        loader = CoprimeLoader(self.train_paths, self.hp.train_seq_len, self.plan.draw_windows, self.world.rank,
                               self.world.size, self.hp.vocab_size)
        with contextlib.closing(Prefetcher(loader, self.world.device, self.clock)) as data:
            yield data
        synchronize(self.world.device)
        self.clock.stop()
        self.last_read_seconds = data.last_read_seconds

    def step(self, data: Prefetcher, step: int, factor: float) -> Callable[[], float]:
        """Queues one optimizer step; the returned call waits for this rank's mean loss, not for the optimizers."""
        for total in (*self.gradients.flats, self.loss):
            total.zero_()
        for _ in range(self.plan.grad_accum_steps):
            for buffer, batch in zip((self.inputs, self.targets), data.next()):
                buffer.copy_(batch)
            self.graphs.get(self.mode, self.micro_batch)()
        mean_loss = self.world.fetch(self.loss)
        self.gradients.average(self.world)
        if self.hp.grad_clip_norm > 0:
            self.gradients.clip(self.hp.grad_clip_norm)
        self.optimizers.step(factor, muon_momentum(step, self.hp))
        return mean_loss

    def micro_batch(self) -> None:
        """Forward and backward of what is in `inputs` and `targets`; adds to the loss and the gradients."""
        ids, targets = (buffer.view(-1, self.context) for buffer in (self.inputs, self.targets))
        loss = self.loss_function(ids, targets) / self.plan.grad_accum_steps
        self.gradients.add(loss)
        self.loss += loss.detach()

    def record_graph(self) -> None:
        """On a GPU, makes one launch of the micro-batch's several hundred: the gaps between kernels shrink."""
        if self.world.device.type != "cuda":
            return
        torch.cuda.empty_cache()  # the graph has memory of its own, as much as the steps before it took
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.graph_pool, capture_error_mode="thread_local"):  # the reader pins memory
            self.micro_batch()
        self.graphs[self.mode] = graph.replay
        self.graph_pool = graph.pool()  # of the next graph too: they never run at once, and leave nothing in it

    def warm_up(self) -> None:
        """Compiles and settles all on real shapes, in each mode of the run, and notes how long a step takes; then puts
        weights, optimizers and clock back to their start."""
        before = {name: t.clone() for name, t in self.model.state_dict().items()}
        with self.on_the_clock() as data:
            turns = (0.0, self.hp.context_ramp, self.hp.loop_start)  # a mode may be too short for the plan's grid
            for mode in dict.fromkeys([*self.plans(), *(self.schedule(share) for share in turns if share < 1)]):
                looping, self.context = mode
                self.model.set_looping(looping)
                self._warm_up_mode(data)
        self.model.load_state_dict(before)
        for optimizer in (self.optimizers.adam, self.optimizers.muon):
            optimizer.state.clear()
        self.clock = Stopwatch()

    def _warm_up_mode(self, data: Prefetcher) -> None:
        steps, began, timed = self.hp.warmup_steps, math.nan, 1
        for step in range(1, steps + 1):
            self._agree(self.step(data, step - 1, 1.0), f"warm-up step {step}")
            if step == 1:
                self.record_graph()
            if step <= max(1, steps // 2) < steps:  # the second half is timed
                synchronize(self.world.device)
                began, timed = self.clock.seconds, steps - step
            if step <= 6 or step % 10 == 0 or step == steps:
                self.log(f"warmup_step: {step}/{steps} (loop {int(self.model.looping)}, context {self.context})")
        synchronize(self.world.device)
        taken = self.world.gather([self.clock.seconds - began])  # NaN after less than two steps
        self.step_seconds[self.mode] = max(taken)[0] / timed

    def schedule(self, progress: float) -> tuple[bool, int]:
        """The mode at this share of the run."""
        hp = self.hp
        context = hp.ramp_seq_len if progress < hp.context_ramp else hp.train_seq_len
        return hp.loops and progress >= hp.loop_start, context
    def plans(self) -> list[tuple[bool, int]]:
        return [self.schedule((i + 0.5) / 1000) for i in range(1000)]
    def expected_steps(self) -> float:
        """Steps until the cap, at the speeds of the warm-up, or ITERATIONS."""
        seconds = self.hp.train_cap_seconds
        fit = np.mean([seconds / self.step_seconds[mode] for mode in self.plans()]) if seconds else math.inf
        return min(self.hp.iterations, fit)
    def ema_decay(self) -> float:
        """That whose horizon is the set share of the expected steps; equal on all ranks."""
        steps = self.expected_steps()
        decay = 1 - 1 / max(1.0, self.hp.ema_steps_fraction * steps)
        self.log(f"ema: decay {decay:.5f} for {steps:.0f} expected steps")
        return decay

    def enter(self, progress: float, step: int) -> None:
        """Changes to the mode of this share of the run."""
        looping, context = self.schedule(progress)
        if looping != self.model.looping:
            self.model.set_looping(looping)
            self.log(f"looping: on from step {step}, at {progress:.1%} of the run")
        if context != self.context and step > 1:
            self.log(f"context: {context} tokens from step {step}, at {progress:.1%} of the run")
        self.context = context

    def fit(self) -> EMA:
        """Trains; returns the averaged weights. The clock holds everything but validation."""
        hp, cap, ema = self.hp, self.hp.train_cap_seconds, EMA(self.model, self.ema_decay())
        self.evaluator.validate(self.log, 0)
        seconds = 0.0
        with self.on_the_clock() as data:
            for step in range(hp.iterations):
                if hp.stall_seconds:
                    faulthandler.dump_traceback_later(hp.stall_seconds, exit=True)
                progress = seconds / cap if cap else step / hp.iterations
                self.enter(progress, step + 1)
                factor = lr_factor(progress, hp.warmdown_frac, hp.min_lr)
                loss, self.steps_done = self.step(data, step, factor), step + 1
                ema.update()
                seconds, mean_loss = self._agree(loss, f"step {step + 1}")
                if hp.train_log_every and (step < 5 or self.steps_done % hp.train_log_every == 0):
                    self._log_step(mean_loss, seconds, factor)
                faulthandler.cancel_dump_traceback_later()
                if cap and seconds >= cap:
                    break
        self._report_end(self.clock.seconds, ema.decay)
        return ema

    def _agree(self, loss: Callable[[], float], where: str) -> tuple[float, float]:
        """Waits for the loss; the slowest rank's seconds and the mean loss over ranks, equal on every rank."""
        value = loss()
        seconds, losses = zip(*self.world.gather([self.clock.seconds, value]))
        if broken := [rank for rank, loss_here in enumerate(losses) if not math.isfinite(loss_here)]:
            raise DivergedError(f"loss not finite at {where} on ranks {broken}; lower MATRIX_LR or TIED_EMBED_LR")
        return max(seconds), sum(losses) / len(losses)
    def _log_step(self, loss: float, seconds: float, factor: float) -> None:
        step, tokens, speed = self.steps_done, self.tokens_done, self.tokens_done / seconds
        minutes = f"{seconds / 60:.1f}m"
        self.log(f"{step}/{self.hp.iterations} train_loss: {loss:.4f} train_time: {minutes} tok/s: {speed:.0f}")
        self.log.record("step", step=step, train_loss=loss, train_seconds=seconds, tokens=tokens, lr_factor=factor,
                        tokens_per_second=speed)

    def _report_end(self, seconds: float, decay: float) -> None:
        step, hp = self.steps_done, self.hp
        if step < hp.iterations:
            self.log(f"stopping_early: wallclock_cap train_time: {1000 * seconds:.0f}ms step: {step}/{hp.iterations}")
        self.log("peak memory allocated: {} MiB reserved: {} MiB".format(*peak_memory_mib(self.world.device)))
        if decay ** step > 0.01:
            self.log(f"WARNING: the average holds {decay ** step:.0%} initial weights; lower EMA_STEPS_FRACTION")
        if hp.loops and not self.model.looping:
            self.log(f"WARNING: the run ended before LOOP_START={hp.loop_start}: the model has no loop")

# ---- Quantisation ----------------------------------------------------------------------------------------------------

GPTQ_BLOCK = 128
GPTQ_DAMPING = (0.01, 0.1, 1.0)  # times the mean diagonal; more only when the Hessian does not factor

@dataclass(frozen=True)
class HessianFactor:
    """Upper Cholesky factor (C, C) of the damped inverse Hessian, columns in `order`; `dead` (C) bool have no input."""
    upper: Tensor
    order: Tensor
    dead: Tensor
    full: bool = True  # false: an identity's, with which GPTQ is rounding to the nearest

def plain_rounding(columns: int, device: torch.device) -> HessianFactor:
    order = torch.arange(columns, device=device)
    return HessianFactor(torch.eye(columns, device=device), order, order < 0, full=False)

def factor_hessian(hessian: Tensor) -> HessianFactor:
    """Factor of a (C, C) fp32 Hessian, damped, if need be more; plain rounding when that does not help or no input was
    seen."""
    hessian = hessian.float().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    mean, before = diagonal.mean(), diagonal.clone()
    for damping in () if bool(dead.all()) else GPTQ_DAMPING:
        diagonal.copy_(before + damping * mean)
        order = diagonal.argsort(descending=True)
        with contextlib.suppress(torch.linalg.LinAlgError):
            lower = torch.linalg.cholesky(hessian[order][:, order])
            upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            if bool(upper.isfinite().all()):
                return HessianFactor(upper, order, dead)
    return plain_rounding(len(hessian), hessian.device)

def gptq_codes(weight: Tensor, scales: Tensor, upper: Tensor) -> Tensor:
    """Rounds (K, N, C) column by column, each error spread over later columns (GPTQ, Frantar et al. 2023).
    `scales` (K) fp32, `upper` (K, C, C); returns integer codes up to LARGEST_CODE as fp32. All in fp32, TF32 off."""
    weight, scales = weight.clone(), scales[:, None]  # the codes take the place of what is done
    for start in range(0, weight.size(2), GPTQ_BLOCK):
        end = start + GPTQ_BLOCK
        block, within = weight[:, :, start:end].clone(), upper[:, start:end, start:end]
        errors = torch.empty_like(block)
        for j in range(block.size(2)):
            weight[:, :, start + j] = q = nearest_code(block[:, :, j], scales)
            errors[:, :, j] = error = (block[:, :, j] - q * scales) / within[:, j, j, None]
            block[:, :, j + 1:] -= error[..., None] * within[:, j, None, j + 1:]
        weight[:, :, end:] -= errors @ upper[:, start:end, end:]
    return weight

class Quantizer:
    """Quantises a state dict as often as the byte budget asks for; each rank does its share of the matrices."""
    def __init__(self, state: Mapping[str, Tensor], hessians: Mapping[str, Tensor], hp: Hyperparameters,
                 world: World = World()) -> None:
        self.state, self.hp, self.world = state, hp, world
        self.matrices = [name for name, t in state.items() if is_coded(name, t)]
        self.weights = sum(state[name].numel() for name in self.matrices)
        mine = sorted(self.matrices, key=lambda name: state[name].shape)[world.rank::world.size]  # of every shape
        self._factors = {name: factor_hessian(hessians[name]) if name in hessians else
                         plain_rounding(state[name].size(1), state[name].device) for name in mine}
        rows = world.gather([n in self._factors and self._factors[n].full for n in self.matrices])
        self.gptq = [name for name, *full in zip(self.matrices, *rows) if any(full)]
        self.fallback = [name for name in hessians if name not in self.gptq]

    @torch.no_grad()
    def __call__(self, coarseness: float) -> dict[str, Tensor]:
        """CPU tensors in state-dict order: `name` bf16, or codes `name.q` int8 (R, C) and `name.step` int32 ()."""
        done, tensors = {}, {}
        for shape in {self.state[n].shape for n in self._factors}:
            alike = [n for n in self._factors if self.state[n].shape == shape]
            done |= zip(alike, self._quantize(alike, coarseness))
        for name, t in self.state.items():
            if name not in self.matrices:
                tensors[name] = t.bfloat16()
            else:  # the sum with the other ranks' zeros hands every result to all ranks
                empty = t.new_zeros(t.shape, dtype=torch.int8), t.new_zeros((), dtype=torch.int32)
                tensors[f"{name}.q"], tensors[f"{name}.step"] = map(self.world.sum, done.get(name, empty))
        return {name: t.cpu().contiguous() for name, t in tensors.items()}

    def _quantize(self, names: list[str], coarseness: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Codes and steps of matrices of one shape, all at once."""
        factors, weights = [self._factors[n] for n in names], [self.state[n].float() for n in names]
        steps = code_steps(dict(zip(names, weights)), coarseness)
        ordered = torch.stack([w.masked_fill(f.dead, 0.0)[:, f.order] for w, f in zip(weights, factors)])
        codes = gptq_codes(ordered, step_scale(steps), torch.stack([f.upper for f in factors])).to(torch.int8)
        return ((c[:, f.order.argsort()], s) for c, f, s in zip(codes, factors, steps))

class HessianCollector:
    """Sums X^T X of the inputs of every matrix that GPTQ will do; c_q, c_k and c_v share their block's input."""
    def __init__(self, model: GPT) -> None:
        self.sums: dict[str, Tensor] = {}  # by the module whose input it is
        self.sources = {f"{name}.weight": re.sub(r"\.c_[qkv]$", "", name) for name, module in model.named_modules()
                        if isinstance(module, Linear) and is_coded(f"{name}.weight", module.weight)}
        self._hooks = []
        for source in dict.fromkeys(self.sources.values()):
            owner = re.sub(r"(\.mlp)\.(fc|proj)$", r"\1", source)  # the fused MLP does not call its parts
            self._hooks.append(model.get_submodule(owner).register_forward_pre_hook(partial(self._hook, source)))
        if is_coded("tok_emb.weight", model.tok_emb.weight):
            self.sources["tok_emb.weight"] = "head"

    def _hook(self, source: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.add(source, leaky_square(module.fc(inputs[0])) if source.endswith(".mlp.proj") else inputs[0])
    def add(self, source: str, x: Tensor) -> None:
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
def collect_hessians(model: GPT, data: Prefetcher, clock: Stopwatch, log: RunLog, world: World) -> dict[str, Tensor]:
    """Hessians of the uncompiled model over the first calibration batches of a new stream, inside the cap.
    The clock runs. Stops early, saying so, when one more batch as slow as the slowest would pass the cap."""
    hp, collector, began, slowest = model.hp, HessianCollector(model), clock.seconds, 0.0
    for batches in range(1, hp.gptq_calibration_batches + 1):
        start = clock.seconds
        collector.add("head", model.hidden(data.next()[0]))
        synchronize(world.device)
        slowest = max(slowest, clock.seconds - start)
        if batches < hp.gptq_calibration_batches and 0 < hp.max_wallclock_seconds < clock.seconds + slowest:
            log(f"WARNING: only {batches} of {hp.gptq_calibration_batches} calibration batches fit into the cap; raise "
                "GPTQ_RESERVE_SECONDS or lower GPTQ_CALIBRATION_BATCHES")
            break
    hessians = collector.finish(batches, world)
    log(f"GPTQ:collected {len(hessians)} Hessians in {clock.seconds - began:.1f}s")
    return hessians

# ---- Artifact: an entropy coder that knows each row's and column's spread --------------------------------------------

MAGIC = b"EC16\x03"
LARGEST_HEAD = 2**20  # bytes; a few kilobytes can unpack to many gigabytes
LANES = 512  # coders side by side, so that numpy works on arrays
PRECISION = 14  # bits of a probability
LEVELS_PER_OCTAVE = 6  # of spreads: costs 3.5 bits a row or column, and under 0.1 % of the codes' bytes
CLASSES, MIDDLE_CLASS = 96, 48  # of codes by their spread in those levels; the middle is a mean of 1
BYTES_PER_WEIGHT = 0.42, 1.5  # of codes and of bf16, for the log's estimate

def frequencies(symbols: np.ndarray, tables: np.ndarray, count: int) -> np.ndarray:
    """How often each of `count` tables has each byte, as integers (count, 256) that sum to 2 ** PRECISION in each row,
    at least 1 for what occurs. Symbols and their tables are uint8 (n)."""
    counts = np.bincount(tables.astype(np.int32) * 256 + symbols, minlength=256 * count).reshape(count, 256)
    counts[counts.sum(1) == 0, 0] = 1
    shares = np.maximum((counts << PRECISION) // counts.sum(1, keepdims=True), counts > 0)
    shares[np.arange(count), shares.argmax(1)] += 2**PRECISION - shares.sum(1)
    return shares.astype(np.uint32)

def rans_encode(symbols: np.ndarray, tables: np.ndarray, freqs: np.ndarray) -> bytes:
    """Bytes uint8 (n) whose probabilities are row `tables` (n) of `freqs` (T, 256), as interleaved range ANS
    (Duda 2013, arXiv:1311.2540; Giesen 2014, arXiv:1402.3392): final states u32, then words u16, little-endian."""
    starts, flat_freqs = (freqs.cumsum(1, dtype=np.uint32) - freqs).ravel(), freqs.ravel().astype(np.uint64)
    lanes, words = lane_count(len(symbols)), []
    states = np.full(lanes, 1 << 16, np.uint64)
    for begin in reversed(range(0, len(symbols), lanes)):
        index = tables[begin:begin + lanes].astype(np.int32) * 256 + symbols[begin:begin + lanes]
        x, f = states[:len(index)], flat_freqs[index]
        full = x >= f << np.uint64(32 - PRECISION)
        words.append(x[full].astype("<u2"))  # the low 16 bits
        x[full] >>= np.uint64(16)
        quotient = x // f
        x += quotient * (np.uint64(2**PRECISION) - f) + starts[index]
    return states.astype("<u4").tobytes() + b"".join(part.tobytes() for part in reversed(words))

def rans_decode(data: bytes, tables: np.ndarray, freqs: np.ndarray) -> np.ndarray:
    """Inverse of `rans_encode`, integers only. Raises ValueError when the stream does not end where the symbols do."""
    starts, flat_freqs = (freqs.cumsum(1, dtype=np.uint32) - freqs).ravel(), freqs.ravel()
    lookup = np.repeat(np.tile(np.arange(256, dtype=np.uint8), len(freqs)), flat_freqs)
    lanes, position, out = lane_count(len(tables)), 0, np.empty(len(tables), np.uint8)
    states = np.frombuffer(data, "<u4", lanes).astype(np.uint32)
    words = np.frombuffer(data, "<u2", offset=4 * lanes).astype(np.uint32)
    for begin in range(0, len(tables), lanes):
        table = tables[begin:begin + lanes].astype(np.int32)
        x = states[:len(table)]
        slot = x & np.uint32(2**PRECISION - 1)
        out[begin:begin + lanes] = symbol = lookup[(table << PRECISION) + slot]
        index = table * 256 + symbol
        x[:] = flat_freqs[index] * (x >> np.uint32(PRECISION)) + slot - starts[index]
        low = np.flatnonzero(x < 1 << 16)
        x[low] = x[low] << np.uint32(16) | words[position:position + len(low)]  # too few are a ValueError
        position += len(low)
    if position != len(words) or (states != 1 << 16).any():
        raise ValueError("a stream does not end where it should")
    return out

def lane_count(symbols: int) -> int:
    return max(1, min(LANES, symbols >> 8))  # a lane costs two bytes

def spread_levels(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 (R, C) -> levels of their spread, a row's int8 (R) and what a column's adds to it int8 (C)."""
    size = np.abs(codes.astype(np.float32)) + 0.05  # above 0, so that it has a logarithm
    rows = np.round(LEVELS_PER_OCTAVE * np.log2(size.mean(1)))
    columns = np.round(LEVELS_PER_OCTAVE * np.log2((size / 2 ** (rows / LEVELS_PER_OCTAVE)[:, None]).mean(0)))
    return rows.astype(np.int8), columns.clip(-60, 60).astype(np.int8)  # less their centre they still fit a byte

def code_classes(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The class of every code of a tensor, uint8 (R * C)."""
    levels = rows.astype(np.int16)[:, None] + columns.astype(np.int16)
    return (levels + MIDDLE_CLASS).clip(0, CLASSES - 1).astype(np.uint8).ravel()
def join(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([*(part.view(np.uint8).ravel() for part in parts), np.empty(0, np.uint8)])

SIDE_TABLES = 4  # rows' spreads, columns' spreads, low and high bytes of bf16

def plan_side(entries: list[list[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """From [name, shape, ...] of each tensor the tables of the side stream, uint8 (n), and where its parts end."""
    kinds, lengths = [], []
    for _, shape, *coded in entries:
        kinds += (0, 1) if coded else (2, 3)
        lengths += shape if coded else [math.prod(shape)] * 2
    counts = np.array(lengths, np.int64)
    return np.repeat(np.array(kinds, np.uint8), counts), counts.cumsum()

def seal(body: bytes, tensors: Mapping[str, Tensor]) -> bytes:
    """sha256 of the bytes before it and of all names, types, shapes and values that they stand for."""
    digest = hashlib.sha256(body)
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
        digest.update(t.view(torch.int16 if t.dtype == torch.bfloat16 else t.dtype).numpy().tobytes())
    return digest.digest()

def forward_settings(hp: Hyperparameters) -> dict[str, str]:
    """Settings that no shape in the artifact tells, and with other values of which it would score otherwise."""
    names = "rope_dims rope_base logit_softcap train_seq_len ve_layers" + " loop_layers loop_repeats" * hp.loops
    return {name: str(getattr(hp, name)) for name in names.split()}

def pack_artifact(tensors: Mapping[str, Tensor], settings: Mapping[str, str] | None = None) -> bytes:
    """Magic; the head, zlib of two lines of JSON and both streams' tables; the side stream; the codes; the seal.
    Lengths are u32. The head has [name, shape] of each tensor and, of codes, the centres of what the side stream says
    of rows and columns, and the step; then the settings."""
    entries, side, codes, classes = [], [], [], []
    for key, t in tensors.items():
        if key.endswith(".q"):
            name, parts = key.removesuffix(".q"), spread_levels(t.numpy())
            centres = [int(np.sort(part)[len(part) // 2]) for part in parts]
            entries.append([name, [*t.shape], *centres, int(tensors[f"{name}.step"])])
            side += [(part.astype(np.int16) - centre).astype(np.uint8) for part, centre in zip(parts, centres)]
            codes.append(t.numpy())
            classes.append(code_classes(*parts))
        elif not key.endswith(".step"):
            entries.append([key, [*t.shape]])
            side += [*t.contiguous().view(torch.int16).numpy().reshape(-1, 1).view(np.uint8).T.copy()]
    streams = (join(side), plan_side(entries)[0], SIDE_TABLES), (join(codes), join(classes), CLASSES)
    freqs = [frequencies(*stream) for stream in streams]
    text = "".join(json.dumps(part, separators=(",", ":")) + "\n" for part in (entries, settings or {})).encode()
    head = zlib.compress(text + np.concatenate(freqs).astype("<u2").tobytes(), 9)
    side_data, code_data = (rans_encode(*stream[:2], table) for stream, table in zip(streams, freqs))
    body = b"".join([MAGIC, *(len(part).to_bytes(4, "little") + part for part in (head, side_data)), code_data])
    return body + seal(body, tensors)

def read_head(data: bytes, limit: int) -> tuple[list[list[Any]], dict[str, str], np.ndarray, bytes, bytes]:
    """Entries, checked and of tensors of at most `limit` bytes, settings, tables, side stream and codes; ValueError."""
    parts, position = [], len(MAGIC)
    for _ in range(2):
        end = position + 4 + int.from_bytes(data[position:position + 4], "little")
        parts.append(data[position + 4:end])
        position = end
    if not data.startswith(MAGIC) or position > len(data):
        raise ValueError("it does not start as one, or is cut off")
    codec = zlib.decompressobj()
    text, settings, tables = codec.decompress(parts[0], LARGEST_HEAD).split(b"\n", 2)
    entries, settings = json.loads(text), json.loads(settings)
    freqs = np.frombuffer(tables, "<u2").reshape(-1, 256).astype(np.uint32)
    for name, shape, *coded in entries:
        numbers = all(type(n) is int for n in (*shape, *coded)) and min(shape, default=0) >= 0
        if not (isinstance(name, str) and numbers and len(coded) in (0, 3)
                and (not coded or (len(shape) == 2 and 0 not in shape and max(map(abs, coded)) < 2**15))):
            raise ValueError(f"no tensor is {name!r} with {coded} and shape {shape}")
    if not isinstance(settings, dict):
        raise ValueError("its settings are no object")
    if not codec.eof or sum(2 * math.prod(shape) + sum(shape) for _, shape, *_ in entries) > limit:
        raise ValueError(f"its tensors have over {limit} bytes")
    if (freqs.sum(1) != 2**PRECISION).any():
        raise ValueError("its tables do not sum to one")
    return entries, settings, freqs, parts[1], data[position:]

def unpack_artifact(data: bytes, limit: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What was packed, tensors of at most `limit` bytes and settings, or ArtifactError. Nothing in it is run."""
    try:
        body = data[:-hashlib.sha256().digest_size]
        entries, settings, freqs, side_data, code_data = read_head(body, limit)
        if len(freqs) != SIDE_TABLES + CLASSES:
            raise ValueError("its tables are not those of its tensors")
        side_tables, ends = plan_side(entries)
        side = iter(np.split(rans_decode(side_data, side_tables, freqs[:SIDE_TABLES]), ends))
        tensors, matrices, classes = {}, [], []
        for name, shape, *coded in entries:
            parts = next(side), next(side)
            if coded:
                rows, columns = (part.view(np.int8).astype(np.int16) + centre for part, centre in zip(parts, coded))
                classes.append(code_classes(rows, columns))
                matrices.append(torch.empty(shape, dtype=torch.int8))
                tensors |= {f"{name}.q": matrices[-1], f"{name}.step": torch.tensor(coded[2], dtype=torch.int32)}
            else:
                values = np.stack(parts, axis=1).view("<i2").reshape(shape)
                tensors[name] = torch.from_numpy(values).view(torch.bfloat16)
        codes = torch.from_numpy(rans_decode(code_data, join(classes), freqs[SIDE_TABLES:]).view(np.int8))
        for t, part in zip(matrices, codes.split([t.numel() for t in matrices])):
            t.copy_(part.view_as(t))
        if body + seal(body, tensors) != data:
            raise ValueError("it is not what was written")
        return tensors, settings
    except Exception as error:  # noqa: BLE001 - damaged bytes fail in many ways that mean the same
        raise ArtifactError(f"it is no artifact, or damaged ({type(error).__name__}: {first_line(error)})") from None

def dequantize(tensors: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the names, shapes and dtypes of `like`. Raises ArtifactError when they belong to another model."""
    remedy = "set the variables that it was trained with"
    stored = {key.removesuffix(".q"): t for key, t in tensors.items() if not key.endswith(".step")}
    if names := sorted(like.keys() ^ stored.keys()):
        raise ArtifactError(f"it is of another model, {names[:3]} are not in both; {remedy}")
    state = {}
    for name, target in like.items():
        value, step = stored[name].float(), tensors.get(f"{name}.step")
        if value.shape != target.shape:
            raise ArtifactError(f"{name} has shape {[*value.shape]}, this model needs {[*target.shape]}; {remedy}")
        state[name] = (value if step is None else value * step_scale(step)).to(target.dtype)
        if not bool(state[name].isfinite().all()):
            raise ArtifactError(f"{name} is not finite: the artifact is damaged")
    return state

# ---- Run: from settings to a scored artifact -------------------------------------------------------------------------

SUMMARY_FORMATS = {
    "val_bpb": ".8f", "val_loss": ".8f", "pre_quant_val_bpb": ".8f", "int6_val_bpb": ".8f", "train_seconds": ".1f",
    "hessian_seconds": ".1f", "train_data_last_read_seconds": ".1f", "eval_seconds": ".1f", "total_seconds": ".1f",
    "steps": "d", "tokens": "d", "tokens_per_second": ".0f", "peak_memory_mib": "d", "code_bytes": "d",
    "model_bytes": "d", "total_bytes": "d", "headroom_bytes": "d", "step_factor": ".4f", "parameters": "d"}

BUDGET_MARGIN, BUDGET_PROBES, COARSEST = 10_000, 16, 6.0  # bytes, tries, octaves

class Run:
    """One run on one rank: checks first, then train, write, re-read and score, then the summary."""
    def __init__(self, hp: Hyperparameters, environ: Mapping[str, str]) -> None:
        self.began, self.hp, self.source = time.perf_counter(), hp, Path(__file__).read_bytes()
        self.run_id, self.output = hp.run_id or os.urandom(16).hex(), Path(hp.output_dir)
        self.logs, self.artifact = self.output / "logs", self.output / "final_model.int6.ptz"
        self.results, self.failure, self.written = {}, None, None
        self.plan = plan_batches(hp, read_ranks(environ)[1])
        self.val = load_validation(hp, byte_tables(load_tokenizer(hp)))
        self.train_paths = [] if hp.eval_only else find_shards(hp, "train")
        if hp.eval_only and not Path(hp.eval_only).is_file():
            raise SetupError(f"EVAL_ONLY={hp.eval_only}: no such file")
        self.world = join_world(hp, environ)
        device = self.world.device
        torch.set_float32_matmul_precision("high")  # TF32 for fp32 products
        dtype, dtype_reason = choose_dtype(device)
        compiled, why = choose_compile(hp.compile, device)
        self.compile = partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda function: function
        attend, attention = choose_attention(hp, device, dtype)
        ops, kernels = choose_operations(hp, attend, device, dtype)
        self.model = build_model(hp, ops, device, dtype)
        self.world.broadcast_weights(self.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.evaluator = Evaluator(hp, self.plan, self.world, self.val, self.compile(self.model))
        self.log = self.open_log()
        self.log_head(f"{str(dtype).removeprefix('torch.')} ({dtype_reason})\nattention: {attention}\n"
                      f"kernels: {kernels}\ncompile: {int(compiled)} ({why})")
        ignored = [f"{name} is set, but nothing reads it here" for name in IGNORED_SETTINGS if name in environ]
        for note in hp.unused + ignored:
            self.log(f"WARNING: {note}")

    def open_log(self) -> RunLog:
        """Rank 0 proves that it can write where it must and opens the log; a failure reaches every rank."""
        log, problem = RunLog(None, self.run_id), None
        need = 5 * sum(t.numel() * t.element_size() for t in self.model.state_dict().values()) // 4
        try:
            if self.world.is_main:
                self.logs.mkdir(parents=True, exist_ok=True)
                self.lock = (self.logs / ".lock").open("w")  # it is released when the process ends, however
                try:
                    fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise OSError("another run writes to it") from None
                write_file(probe := self.output / f".{self.run_id}.writable", bytes(need))  # what the model files need
                probe.unlink()
                log = RunLog(self.logs, self.run_id)
        except OSError as error:
            problem = f"cannot write RUN_ID={self.run_id} to OUTPUT_DIR={self.output}: {error}; choose another"
        if problem := self.world.broadcast_object(problem):
            raise SetupError(problem)
        return log

    def log_head(self, choices: str) -> None:
        """Settings, source, versions and GPUs (the file alone is enough to repeat the run), then what was chosen."""
        hp, plan, world, rule = self.hp, self.plan, self.world, "=" * 100
        values = asdict(hp) | {"run_id": self.run_id, "rank": world.rank, "world_size": world.size,
                               "grad_accum_steps": plan.grad_accum_steps, "datasets_dir": hp.dataset_dir}
        texts = {name: str(value) for name, value in sorted(values.items())}
        lines = [rule, "Hyperparameters:", *(f"  {name}: {text}" for name, text in texts.items()),
                 self.source.decode("utf-8"), rule, f"Running Python {sys.version}",
                 f"Running PyTorch {torch.__version__}", gpu_report(), rule]
        self.log("\n".join(lines), console=False)
        self.log.record("settings", **texts)
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
        estimate = len(self.source) + sum(
            t.numel() * BYTES_PER_WEIGHT[not is_coded(name, t)] for name, t in self.model.state_dict().items())
        self.log(f"""machine: {world.size} x {device}, PyTorch {torch.__version__}, {choices}
train_shards: {len(self.train_paths)}
val_tokens: {self.val.targets}
val_bytes: {self.val.target_bytes} ({self.val.note})
batch: {hp.train_batch_tokens} tokens = {world.size} ranks x {plan.grad_accum_steps} micro-batches x \
{plan.micro_sequences} sequences of {hp.train_seq_len}
model_params:{self.parameters}
artifact estimate: {estimate / 1e6:.1f} MB of {SIZE_CAP_BYTES / 1e6:.1f} (steps are scaled to fit)
sha256 of the script: {hashlib.sha256(self.source).hexdigest()}""")

    def train(self) -> None:
        """Training, Hessians, quantisation; ends with the artifact on disk, before anything of it is evaluated."""
        cap = self.hp.max_wallclock_seconds
        trainer = Trainer(self.model, self.evaluator, self.train_paths, self.log, self.compile(newton_schulz))
        try:
            trainer.warm_up()
            self.log(f"startup: {time.perf_counter() - self.began:.1f}s to the first step, with compile and warm-up")
            self.average = trainer.fit()
        except torch.OutOfMemoryError as error:
            raise SetupError(f"{first_line(error)}; lower MICRO_BATCH_TOKENS, now {trainer.inputs.numel()}, or "
                             f"VAL_BATCH_TOKENS={self.hp.val_batch_tokens}") from None
        steps, tokens, seconds = trainer.steps_done, trainer.tokens_done, trainer.clock.seconds
        self.raw = {name: t.clone() for name, t in self.model.state_dict().items()}
        self.average.copy_to_model()
        self.write_checkpoint()
        with trainer.on_the_clock() as data:
            hessians = collect_hessians(self.model, data, trainer.clock, self.log, self.world)
        self.write_artifact(hessians)
        last, spent = map(max, zip(*self.world.gather([trainer.last_read_seconds, trainer.clock.seconds])))
        self.results |= {"train_seconds": spent, "hessian_seconds": trainer.clock.seconds - seconds,
                         "steps": steps, "tokens": tokens, "tokens_per_second": tokens / seconds,
                         "train_data_last_read_seconds": last}
        self.log(f"training data last read at {last:.1f}s of the clock, {f'cap {cap:.1f}s' if cap > 0 else 'no cap'}")
        if 0 < cap < spent:
            self.failure = ClockError(f"Hessians ended at {spent:.1f}s, cap {cap}s; raise GPTQ_RESERVE_SECONDS")

    def write_checkpoint(self) -> None:
        """Rank 0's averaged weights, unquantised; a disk too full for them must not cost the artifact."""
        buffer = io.BytesIO()
        if self.world.is_main:
            torch.save({name: t.cpu() for name, t in self.model.state_dict().items()}, buffer)
            try:
                write_file(self.output / "final_model.pt", buffer.getvalue())
            except OSError as error:
                self.log(f"WARNING: final_model.pt was not written ({error})")

    def write_artifact(self, hessians: dict[str, Tensor]) -> None:
        """All ranks quantise, rank 0 writes."""
        torch.set_float32_matmul_precision("highest")  # no TF32: GPTQ's error feedback needs all 24 bits
        quantizer = Quantizer(self.model.state_dict(), hessians, self.hp, self.world)
        done, left = len(quantizer.gptq), len(quantizer.fallback)
        warning = f"; WARNING: Hessians did not factor: {', '.join(quantizer.fallback)}" * (left > 0)
        self.log(f"GPTQ quantization: {done} layers with full GPTQ, {left} fallback to rounding{warning}")
        if not all(bool(t.isfinite().all()) for t in quantizer.state.values()):
            raise DivergedError("weights not finite; lower MATRIX_LR or TIED_EMBED_LR")
        data = self.quantize_to_fit(quantizer)
        torch.set_float32_matmul_precision("high")
        if self.world.is_main:
            write_file(self.artifact, data)
            try:  # the next run replaces the artifact; under this name the file stays
                os.link(self.artifact, self.logs / f"{self.run_id}.int6.ptz")
            except OSError as error:
                self.log(f"WARNING: the artifact has no second name in logs/ ({error}); the next run replaces it")
        self.written = hashlib.sha256(data).hexdigest()
        self.log(f"sha256 of the artifact: {self.written}\nCode size: {len(self.source)} bytes\n"
                 f"Serialized model int8+rans: {len(data)} bytes\n"
                 f"Total submission size int8+rans: {len(data) + len(self.source)} bytes")

    def quantize_to_fit(self, quantizer: Quantizer) -> bytes:
        """Quantises and packs with all steps times a factor, found by secants inside a bracket, with which everything
        ends less than BUDGET_MARGIN under TARGET_TOTAL_BYTES; the same factor on every rank."""
        target, low, high, data = self.hp.target_total_bytes, -math.inf, COARSEST, {}
        octaves = math.log2(self.hp.quant_step_factor)
        finest = min(octaves, math.log2(FINEST_STEP / max(CODE_STEPS.values())))
        for _ in range(BUDGET_PROBES):
            began, factor = time.perf_counter(), 2**octaves
            tensors = quantizer(factor)
            packing = time.perf_counter()
            data[octaves] = pack_artifact(tensors, forward_settings(self.hp)) if self.world.is_main else b""
            total = self.world.broadcast_object(len(data[octaves])) + len(self.source)
            self.log(f"quantization: {packing - began:.1f}s compression: {time.perf_counter() - packing:.1f}s "
                     f"steps x {factor:.4f}: {total} bytes in all")
            fits = total <= target
            if not target or not quantizer.weights or (fits and (total > target - BUDGET_MARGIN or octaves == finest)):
                break
            low, high = (low, octaves) if fits else (octaves, high)
            # An octave coarser saves a bit a weight, once the codes spread over several.
            guess = max(finest, octaves + 8 * (total - target + BUDGET_MARGIN / 2) / quantizer.weights)
            octaves = guess if low < guess < high else (max(low, finest) + high) / 2
        else:
            octaves = high if high in data else max(data)  # the finest that fits, else the coarsest
            self.log(f"WARNING: no steps end within {BUDGET_MARGIN} bytes of TARGET_TOTAL_BYTES={target}; a factor of "
                     f"{2**octaves:.4f} makes {len(data[octaves]) + len(self.source)} bytes")
        self.results["step_factor"] = 2**octaves
        return data[octaves]

    def score(self) -> None:
        """Scores raw and averaged weights when there was training, then the artifact re-read from disk."""
        hp = self.hp
        if not hp.eval_only:
            self.model.load_state_dict(self.raw)
            self.evaluator.validate(self.log, self.results["steps"])
            self.average.copy_to_model()
            self.report("pre-quantization post-ema", "pre_quant", hp.eval_seq_len)
        began = time.perf_counter()
        self.load_artifact(Path(hp.eval_only or self.artifact))
        final = self.report("final_int6_roundtrip", "int6", hp.eval_seq_len)
        if hp.sliding_window_enabled == "1":
            final = self.report("final_int6_sliding_window", "sliding", hp.eval_stride)
        seconds = time.perf_counter() - began
        self.results |= final | {"eval_seconds": seconds}  # of all evaluations of the artifact
        if seconds > 0.8 * EVAL_CAP_SECONDS:
            self.log(f"WARNING: evaluation took {seconds:.0f}s of the allowed {EVAL_CAP_SECONDS}s")

    def report(self, label: str, key: str, stride: int) -> Score:
        score = self.evaluator.score(stride)
        loss, bpb, seconds = score.values()
        self.log(f"{label} val_loss:{loss:.8f} val_bpb:{bpb:.8f} eval_time:{1000 * seconds:.0f}ms")
        self.log.record("evaluation", name=key, **score)
        self.results[f"{key}_val_bpb"] = bpb
        return score

    def load_artifact(self, path: Path) -> None:
        """Reads the file on rank 0, hands the bytes to all ranks (other nodes have no such file) and loads them."""
        data = self.world.broadcast_object(path.read_bytes() if self.world.is_main else None)
        found = hashlib.sha256(data).hexdigest()
        if self.world.is_main and self.written not in (None, found):
            raise ArtifactError(f"{path} is not what this run wrote (sha256 {found}): something else replaced it")
        try:
            state = self.model.state_dict()
            limit = 8 * sum(t.numel() for t in state.values()) + 2**22  # twice what fp32 weights need
            tensors, settings = unpack_artifact(data, limit)
            self.model.load_state_dict(dequantize(tensors, state))
            ours = forward_settings(self.hp)
            if other := [f"{name.upper()}={value}" for name, value in settings.items() if ours.get(name) != value]:
                raise ArtifactError(f"it was trained with {' '.join(other[:9])}; set that")
        except ArtifactError as error:
            raise ArtifactError(f"{path} cannot be scored: {error}") from None
        total = len(self.source) + len(data)
        self.results |= {"code_bytes": len(self.source), "model_bytes": len(data), "total_bytes": total,
                         "headroom_bytes": SIZE_CAP_BYTES - total}
        if total > SIZE_CAP_BYTES and not self.failure:
            self.failure = OversizeError(f"{total} bytes are over the cap of {SIZE_CAP_BYTES}; set TARGET_TOTAL_BYTES")

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
    return subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=60).stdout

def main() -> int:
    """Runs the command line; the exit code, or, with several ranks, the end of the process."""
    table = "\n".join(f"{f.name.upper()}={f.default}  {f.metadata['meaning']}" for f in fields(Hyperparameters))
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=table, formatter_class=layout)
    parser.add_argument("--print-config", action="store_true", help="print the effective settings and stop")
    args, code = parser.parse_args(), 0
    try:
        hp = Hyperparameters.from_env(os.environ)
        if args.print_config:
            print("\n".join(f"{name}: {value}" for name, value in asdict(hp).items()))
        else:
            run = Run(hp, os.environ)
            if not hp.eval_only:
                run.train()
            run.score()
            run.summarize()
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
