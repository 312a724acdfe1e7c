"""Five minutes on one GPU: windowed attention, gated value embeddings, Muon with variance reduction. No quantisation.

    DATA_DIR=./data python train_gpt.py      # one H100 or H200: 300 s of training, then the whole validation split
    python train_gpt.py --help               # every setting, its default and meaning

Settings are environment variables. The score is val_bpb of the trained model as it is. Read from top to bottom:
settings, machine, data, attention, model, optimizer, training, evaluation, run. Importing it does nothing.

Exit codes: 0 fine, 1 unexpected error, 2 settings, data or machine, 3 loss not finite or huge, 130 interrupted.
"""
from __future__ import annotations

import argparse
import difflib
import gc
import math
import os
import resource
import subprocess
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


# ---- Errors and settings ---------------------------------------------------------------------------------------------
class RunError(Exception):
    exit_code = 1  # a subclass has its own; main prints one line and no traceback

class SetupError(RunError, ValueError):
    exit_code = 2  # found before the first step

class DivergedError(RunError):
    exit_code = 3

UNTIMED_STEPS = 11  # compile and warm-up: these steps train and count as steps, but not as seconds
GATE_CHANNELS = 32  # first channels of a block's input that gate its value embedding

def setting(default: Any, meaning: str, low: float = 0, high: float = 1e30) -> Any:
    """A field with its help text and, for a number, the least and the largest value."""
    return field(default=default, metadata={"help": meaning, "low": low, "high": high})

@dataclass(frozen=True)
class Hyperparameters:
    """Every setting of a run, read from the environment (upper-case names) by `from_env`."""
    data_dir: str = setting("./data/", "folder with datasets/ and tokenizers/")
    vocab_size: int = setting(8192, "tokenizer size; names the dataset folder fineweb10B_sp{V}", 1, 65536)
    run_id: str = setting("", "name of the log file (empty: a random one)")
    output_dir: str = setting(".", "where logs/ is written")
    seed: int = setting(42, "decides the initial weights only, never the data order", 0, 2**63 - 1)
    train_log_every: int = setting(100, "steps between log lines (0: never)")
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto: cuda, else cpu")
    precision: Literal["auto", "bf16", "fp32"] = setting("auto", "activations; auto: bf16 on GPUs that have it")
    attention: Literal["auto", "fa3", "flex", "sdpa"] = setting("auto", "attention kernel; a name forces it")
    compile: Literal["auto", "0", "1"] = setting("auto", "torch.compile; auto: on with CUDA and Triton")
    max_wallclock_seconds: float = setting(300.0, "training budget (0: none, ITERATIONS decides)")
    iterations: int = setting(20000, "steps at most; the first 11 are outside the clock", UNTIMED_STEPS + 1)
    warmup_ratio: float = setting(0.0, "first share of the run, in which the rates rise", 0, 1)
    warmdown_ratio: float = setting(0.5, "last share of the run, in which the rates fall", 0, 1)
    final_lr_frac: float = setting(0.0, "factor of the rates at the end")
    train_batch_tokens: int = setting(524_288, "tokens of one optimizer step", 1)
    micro_batch_tokens: int = setting(262_144, "tokens of one forward and backward; fewer need less memory", 1)
    train_seq_len: int = setting(2048, "context of training and evaluation", 2)
    depth: int = setting(8, "blocks", 1)
    aspect_ratio: int = setting(64, "width per block; the width is rounded up to whole heads", 1)
    head_dim: int = setting(128, "size of a head", 2)
    window_pattern: str = setting("SSSL", "windows, repeated over the blocks: S half the context, L all; the last is L")
    embedding_lr: float = setting(0.6, "AdamW's rate of token and value tables, times (width / 768) ** -0.5")
    unembedding_lr: float = setting(0.004, "AdamW's rate of the output head, times (width / 768) ** -0.5")
    matrix_lr: float = setting(0.04, "Muon's rate")
    scalar_lr: float = setting(0.5, "AdamW's rate of the x0 scalars; the residual scalars have a hundredth of it")
    weight_decay: float = setting(0.2, "Muon's cautious decay at the start; it falls to 0")

    @property
    def model_dim(self) -> int:
        return -(-self.depth * self.aspect_ratio // self.head_dim) * self.head_dim

    @property
    def windows(self) -> list[int]:
        """Earlier positions that each block sees besides its own."""
        pattern = (self.window_pattern * self.depth)[:self.depth - 1] + "L"
        return [self.train_seq_len // (2 if letter == "S" else 1) for letter in pattern]

    @property
    def value_layers(self) -> range:
        """Blocks with a value embedding: every second one, the last always."""
        return range((self.depth - 1) % 2, self.depth, 2)

    @property
    def dataset_dir(self) -> Path:
        return Path(self.data_dir) / "datasets" / f"fineweb10B_sp{self.vocab_size}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Hyperparameters:
        """Settings from environment variables, misspelt ones included: SetupError names every problem at once."""
        hints, known, values, problems = get_type_hints(cls), {f.name.upper(): f for f in fields(cls)}, {}, []
        if (ranks := environ.get("WORLD_SIZE", "1")) != "1":
            problems.append(f"WORLD_SIZE={ranks}: this recipe trains on one GPU; start it once, with python")
        for name in sorted(environ):
            if item := known.get(name):
                try:
                    values[item.name] = parse_setting(environ[name], hints[item.name], item.metadata)
                except ValueError as error:
                    problems.append(f"{name}={environ[name]!r} {error}")
            elif near := difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.87):
                problems.append(f"{name} is no setting; did you mean {near[0]}? (rename it, or unset it)")
        hp = cls(**values)
        if problems := problems or setting_problems(hp):
            raise SetupError("settings: " + "; ".join(problems))
        return hp

def parse_setting(raw: str, kind: Any, bounds: Mapping[str, Any]) -> Any:
    """One environment value as int, float, str or one of a Literal's choices. Raises ValueError with the rule."""
    if kind is str or raw in get_args(kind):
        return raw
    if get_origin(kind) is Literal:
        raise ValueError(f"must be one of {', '.join(get_args(kind))}")
    try:
        value = kind(raw)
    except ValueError:
        value = math.nan
    if not bounds["low"] <= value <= bounds["high"]:
        raise ValueError(f"must be a {'whole ' * (kind is int)}number from {bounds['low']} to {bounds['high']}")
    return value

def setting_problems(hp: Hyperparameters) -> list[str]:
    """Every broken rule between settings, as messages with value, rule and remedy."""
    batch, micro, length = hp.train_batch_tokens, hp.micro_batch_tokens, hp.train_seq_len
    fits = [n * length for n in range(1, batch // length + 1) if batch % (n * length) == 0]
    checks = [
        (fits, f"TRAIN_BATCH_TOKENS={batch} must be a multiple of TRAIN_SEQ_LEN={length}"),
        (not fits or micro in fits, f"MICRO_BATCH_TOKENS={micro} must cut TRAIN_BATCH_TOKENS={batch} evenly into "
         f"sequences of TRAIN_SEQ_LEN={length}; set it to one of {fits}"),
        (hp.head_dim % 2 == 0, f"HEAD_DIM={hp.head_dim} must be even: its halves are rotated"),
        (hp.model_dim >= GATE_CHANNELS, f"DEPTH={hp.depth} x ASPECT_RATIO={hp.aspect_ratio} is below {GATE_CHANNELS}"),
        ({"S", "L"} >= set(hp.window_pattern) > set(), f"WINDOW_PATTERN={hp.window_pattern!r} must be letters S and L"),
        (hp.warmup_ratio + hp.warmdown_ratio <= 1, f"WARMUP_RATIO={hp.warmup_ratio} + WARMDOWN_RATIO is above 1"),
        ("/" not in hp.run_id, f"RUN_ID={hp.run_id!r} must be a file's name, without folders"),
    ]
    return [message for holds, message in checks if not holds]

# ---- Machine and log -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    device: torch.device
    dtype: torch.dtype  # of the activations
    compiled: bool

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if self.compiled else function

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_mib(self) -> int:
        """Peak MiB allocated on the GPU, or resident in the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) >> 20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)

def choose_machine(hp: Hyperparameters) -> Machine:
    """What the settings ask for, else the best that is there. Raises SetupError."""
    if hp.device == "cuda" and not torch.cuda.is_available():
        raise SetupError(f"DEVICE=cuda was asked for, but this PyTorch {torch.__version__} finds no GPU; unset DEVICE")
    on_gpu = hp.device != "cpu" and torch.cuda.is_available()
    bf16 = hp.precision == "bf16" or (hp.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported(False))
    compiled = hp.compile == "1" or (hp.compile == "auto" and on_gpu and find_spec("triton") is not None)
    return Machine(torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if bf16 else torch.float32, compiled)

def open_log(hp: Hyperparameters) -> Callable[..., None]:
    """Writes to logs/<run_id>.txt and, unless told otherwise, to the console. Raises SetupError and OSError."""
    path = Path(hp.output_dir) / "logs" / f"{hp.run_id}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise SetupError(f"RUN_ID={hp.run_id}: {path} exists and is kept; choose another RUN_ID")
    file = path.open("x", encoding="utf-8", buffering=1)
    def log(text: str, console: bool = True) -> None:
        file.write(text + "\n")
        if console:
            print(text, flush=True)
    return log

# ---- Data: tokenizer bytes, shards, validation tokens, training windows ----------------------------------------------
SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_INTS = 20240520, 1, 256
SPACE_MARKER = "\u2581"  # SentencePiece's visible space; an escape, since encoding accidents have faked scores

class ByteTables:
    """UTF-8 bytes of each token: `base_bytes` int16, `has_leading_space` and `is_boundary` bool, all (vocab,)."""
    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.piece_to_id(SPACE_MARKER) == tokenizer.unk_id():
            raise SetupError("the tokenizer has no piece for a lone space (U+2581): each would count as three bytes; "
                             "train it on text with spaces")
        ids = range(tokenizer.vocab_size())
        special = [tokenizer.is_control(i) or tokenizer.is_unknown(i) or tokenizer.is_unused(i) for i in ids]
        pieces = ["" if special[i] else "0" if tokenizer.is_byte(i) else tokenizer.id_to_piece(i) for i in ids]
        self.is_boundary = np.array(special)
        self.has_leading_space = np.array([piece.startswith(SPACE_MARKER) for piece in pieces])
        self.base_bytes = np.array([len(p.removeprefix(SPACE_MARKER).encode("utf-8")) for p in pieces], np.int16)

    def count(self, tokens: np.ndarray) -> int:
        """Bytes of tokens[1:], each after its predecessor: a piece's space counts unless a boundary comes before."""
        spaces = self.has_leading_space[tokens[1:]] & ~self.is_boundary[tokens[:-1]]
        return int(self.base_bytes[tokens[1:]].sum(dtype=np.int64) + spaces.sum(dtype=np.int64))

def load_byte_tables(hp: Hyperparameters) -> ByteTables:
    """Tables of this run's tokenizer. Raises SetupError when it is missing or of another size."""
    import sentencepiece
    path = Path(hp.data_dir) / "tokenizers" / f"fineweb_{hp.vocab_size}_bpe.model"
    if not path.is_file():
        raise SetupError(f"no tokenizer at {path}; {how_to_fetch(hp)}")
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except RuntimeError as error:
        raise SetupError(f"{path} is no SentencePiece model ({error}); delete it and fetch it again") from None
    if tokenizer.vocab_size() != hp.vocab_size:
        raise SetupError(f"VOCAB_SIZE={hp.vocab_size}, but {path} has {tokenizer.vocab_size()} pieces: set it so")
    return ByteTables(tokenizer)

def how_to_fetch(hp: Hyperparameters) -> str:
    return f"`python data/cached_challenge_fineweb.py --variant sp{hp.vocab_size}`, or set DATA_DIR and VOCAB_SIZE"

def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard as a read-only uint16 memory map, header and file size checked. Raises SetupError."""
    header = np.fromfile(path, dtype="<i4", count=SHARD_HEADER_INTS)
    if len(header) < SHARD_HEADER_INTS or header[0] != SHARD_MAGIC or header[1] != SHARD_VERSION:
        raise SetupError(f"{path} is no token shard: its header must be {SHARD_MAGIC}, {SHARD_VERSION}; fetch it again")
    expected, found = SHARD_HEADER_INTS * 4 + 2 * int(header[2]), path.stat().st_size
    if expected != found:
        raise SetupError(f"{path} announces {header[2]} tokens, so {expected} bytes, but has {found}; fetch it again")
    return np.memmap(path, "<u2", "r", SHARD_HEADER_INTS * 4) if header[2] else np.zeros(0, "<u2")

def check_token_ids(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise SetupError(f"{path} holds token {int(tokens.max())}, but VOCAB_SIZE={vocab_size}: shard and tokenizer do "
                         "not belong together; fetch both for one variant")

def open_split(hp: Hyperparameters, split: str) -> dict[Path, np.ndarray]:
    """All shards of a split, in order of their names. Raises SetupError when there are none."""
    shards = {path: open_shard(path) for path in sorted(hp.dataset_dir.glob(f"fineweb_{split}_*.bin"))}
    if not shards:
        raise SetupError(f"no {split} shards in {hp.dataset_dir}; {how_to_fetch(hp)}")
    return shards

def load_validation(hp: Hyperparameters) -> tuple[np.ndarray, int, str]:
    """All validation tokens (uint16), cut to whole sequences plus one, the bytes of their targets, and a note."""
    tables, tokens = load_byte_tables(hp), np.concatenate(list(open_split(hp, "val").values()))
    check_token_ids(tokens, hp.vocab_size, hp.dataset_dir)
    used = (len(tokens) - 1) // hp.train_seq_len * hp.train_seq_len + 1
    if used < 2:
        raise SetupError(f"{len(tokens)} validation tokens in {hp.dataset_dir} are fewer than one sequence of "
                         f"TRAIN_SEQ_LEN={hp.train_seq_len} plus one; fetch the whole split")
    return tokens[:used], tables.count(tokens[:used]), f"normalised text; {len(tokens) - used} tail tokens not scored"

class TrainData:
    """Every window of seq_len + 1 tokens once an epoch, in an order that depends on the epoch alone, read ahead."""
    def __init__(self, hp: Hyperparameters, device: torch.device) -> None:
        self.hp, self.device, self.epoch, shards = hp, device, 0, open_split(hp, "train")
        for path, tokens in shards.items():
            check_token_ids(tokens[:65_536], hp.vocab_size, path)  # the rest as it is read
        self.shards, length = list(shards.values()), hp.train_seq_len
        starts = [np.arange(0, len(tokens) - length, length) for tokens in self.shards]
        self.windows = np.concatenate([np.stack([np.full_like(s, i), s], 1) for i, s in enumerate(starts)])
        self.batch, self.order = hp.micro_batch_tokens // length, self.windows[:0]
        if len(self.windows) < self.batch:
            raise SetupError(f"{len(self.windows)} train windows of TRAIN_SEQ_LEN={length} in {hp.dataset_dir} do not "
                             f"fill one MICRO_BATCH_TOKENS={hp.micro_batch_tokens}; fetch more shards")
        self.reader = ThreadPoolExecutor(1)
        self.pending = deque(self.reader.submit(self.read) for _ in range(4))  # 2 steps ahead

    def read(self) -> list[Tensor]:
        """Inputs and targets of the next batch, int64 (batch, seq_len), in memory that nothing writes to again."""
        if len(self.order) < self.batch:
            self.epoch += 1
            self.order = np.concatenate([self.order, np.random.default_rng(self.epoch).permutation(self.windows)])
        taken, self.order = self.order[:self.batch], self.order[self.batch:]
        rows = np.stack([self.shards[i][at:at + self.hp.train_seq_len + 1] for i, at in taken]).astype(np.int64)
        check_token_ids(rows, self.hp.vocab_size, self.hp.dataset_dir)
        parts = [torch.from_numpy(part).contiguous() for part in (rows[:, :-1], rows[:, 1:])]
        return [part.pin_memory() for part in parts] if self.device.type == "cuda" else parts

    def next(self) -> list[Tensor]:
        """The next batch on the device; waits for the reader when it must, and raises what it raised."""
        parts = self.pending.popleft().result()
        self.pending.append(self.reader.submit(self.read))
        return [part.to(self.device, non_blocking=True) for part in parts]

# ---- Attention: causal, over a window of earlier positions; one entry point, chosen by a probe -----------------------
AttentionFunction = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # q, k, v (B, T, H, D), window -> as q

def sees(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Whether a position sees another: itself and `window` positions before it, nothing after it."""
    return (key <= query) & (query - key <= window)

def math_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The definition, written out: what every kernel must equal."""
    position = torch.arange(q.size(1), device=q.device)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~sees(position[:, None], position, window), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

def fa3_attention(hp: Hyperparameters, device: torch.device) -> AttentionFunction:
    """FlashAttention-3. Raises ImportError when the package is not there."""
    from flash_attn_interface import flash_attn_func
    def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        out = flash_attn_func(q, k, v, causal=True, window_size=(window, 0))
        return out[0] if isinstance(out, tuple) else out  # some versions also return the log-sum-exp
    return attend

def masked_attention(hp: Hyperparameters, make_mask: Callable[[int], Any], kernel: Callable[..., Tensor],
                     argument: str) -> AttentionFunction:
    """A kernel that takes a mask, in layout (B, H, T, D), for windows; PyTorch's causal one for the whole context."""
    masks = {window: make_mask(window) for window in set(hp.windows) if window < hp.train_seq_len}
    def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if window in masks:
            return kernel(q, k, v, **{argument: masks[window]}).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return attend

def flex_attention(hp: Hyperparameters, device: torch.device) -> AttentionFunction:
    """FlexAttention over block masks made once; only inside a compiled graph is it fast and thrifty."""
    from torch.nn.attention import flex_attention as flex
    def make_mask(window: int) -> Any:
        shape = (None, None, hp.train_seq_len, hp.train_seq_len)
        return flex.create_block_mask(lambda b, h, query, key: sees(query, key, window), *shape, device=device)
    return masked_attention(hp, make_mask, flex.flex_attention, "block_mask")

def sdpa_attention(hp: Hyperparameters, device: torch.device) -> AttentionFunction:
    """PyTorch's scaled_dot_product_attention with boolean masks (T, T): works everywhere, slow for windows."""
    position = torch.arange(hp.train_seq_len, device=device)
    return masked_attention(hp, lambda window: sees(position[:, None], position, window),
                            F.scaled_dot_product_attention, "attn_mask")

KERNELS = {"fa3": fa3_attention, "flex": flex_attention, "sdpa": sdpa_attention}

def try_attention(name: str, hp: Hyperparameters, machine: Machine) -> AttentionFunction:
    """Prepares one kernel and probes forward and backward for every window: some builds import and fail at launch."""
    if name == "flex" and not (machine.device.type == "cuda" and machine.compiled):
        raise RuntimeError("needs CUDA and torch.compile")
    attend = KERNELS[name](hp, machine.device)
    shape, generator = (3, 1, hp.train_seq_len, hp.model_dim // hp.head_dim, hp.head_dim), torch.Generator()
    for window in set(hp.windows):
        results = []
        for function, dtype in ((machine.compile(attend), machine.dtype), (math_attention, torch.float32)):
            qkv = torch.randn(shape, generator=generator.manual_seed(0)).to(machine.device, dtype).requires_grad_()
            out = function(*qkv, window)
            (gradient,) = torch.autograd.grad(out.float().square().sum(), qkv)
            results.append(torch.cat([x.detach().float().flatten() for x in (out, gradient)]))
        error = float((results[0] - results[1]).norm() / results[1].norm())
        if not error < 3e-2:  # bf16 rounding is under 1e-2
            raise RuntimeError(f"its result for window {window} is off by {error:.1e}")
    return attend

def choose_attention(hp: Hyperparameters, machine: Machine) -> tuple[AttentionFunction, str]:
    """FlashAttention-3, else FlexAttention, else SDPA with masks, and why; ATTENTION forces one."""
    refused = []
    for name in KERNELS if hp.attention == "auto" else [hp.attention]:
        try:
            function = try_attention(name, hp, machine)
        except Exception as error:  # noqa: BLE001 - whatever a kernel or its compiler raises is the logged reason
            refused.append(f"{name}: {(str(error) or repr(error)).splitlines()[0]}")
            continue
        reason = "; ".join(refused) if hp.attention == "auto" else f"ATTENTION={name}"
        return function, f"{name} ({reason or 'first choice'})"
    raise SetupError(f"ATTENTION={hp.attention} cannot be used here: {'; '.join(refused)}; unset ATTENTION")

# ---- Model -----------------------------------------------------------------------------------------------------------
MLP_MULT, LOGIT_SOFTCAP, ROPE_BASE = 4, 15.0, 10000.0

def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each fp32 (length, 1, head_dim / 2)."""
    frequencies = ROPE_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)[:, None, :]
    return angles.cos(), angles.sin()

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head's halves (a, b) by minus the angle; x (B, T, H, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)

class Linear(nn.Linear):
    """Without bias; the fp32 master weight is cast to the activation's dtype at every use."""
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

class Block(nn.Module):
    def __init__(self, hp: Hyperparameters, layer: int, attend: AttentionFunction) -> None:
        super().__init__()
        self.head_dim, self.window, self.attend, width = hp.head_dim, hp.windows[layer], attend, hp.model_dim
        self.c_q, self.c_k, self.c_v, self.c_proj = (Linear(width, width, bias=False) for _ in range(4))
        self.ve_gate = Linear(GATE_CHANNELS, width // hp.head_dim, bias=False) if layer in hp.value_layers else None
        self.mlp_fc = Linear(width, MLP_MULT * width, bias=False)
        self.mlp_proj = Linear(MLP_MULT * width, width, bias=False)

    def attention(self, x: Tensor, value: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.c_q, self.c_k, self.c_v))
        if self.ve_gate is not None:  # one gate a head and token, 1 at the start
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :GATE_CHANNELS]))
            v = v + gate.unsqueeze(-1) * value.unflatten(-1, (-1, self.head_dim))
        q, k = rms_norm(rotate(q, cos, sin)), rms_norm(rotate(k, cos, sin))
        return self.c_proj(self.attend(q, k, v, self.window).flatten(2))

    def forward(self, x: Tensor, value: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(rms_norm(x), value, cos, sin)
        return x + self.mlp_proj(F.relu(self.mlp_fc(rms_norm(x))).square())

class GPT(nn.Module):
    """Before each block the stream is mixed with the normed embedding x0: resid_lambdas[i] * x + x0_lambdas[i] * x0."""
    def __init__(self, hp: Hyperparameters, attend: AttentionFunction) -> None:
        super().__init__()
        self.hp = hp
        self.wte = nn.Embedding(hp.vocab_size, hp.model_dim)
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(hp.vocab_size, hp.model_dim) for i in hp.value_layers})
        self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.empty(hp.depth)) for _ in range(2))
        self.blocks = nn.ModuleList(Block(hp, layer, attend) for layer in range(hp.depth))
        self.lm_head = Linear(hp.model_dim, hp.vocab_size, bias=False)
        for name, table in zip(("cos", "sin"), rope_tables(hp.train_seq_len, hp.head_dim)):
            self.register_buffer(name, table, persistent=False)

    def logits(self, ids: Tensor) -> Tensor:
        """Token ids (B, T) -> soft-capped logits, fp32 (B, T, vocab_size)."""
        x = x0 = rms_norm(self.wte(ids))
        for layer, block in enumerate(self.blocks):
            x = self.resid_lambdas[layer] * x + self.x0_lambdas[layer] * x0
            value = self.value_embeds[str(layer)](ids) if layer in self.hp.value_layers else None
            x = block(x, value, self.cos, self.sin)
        return LOGIT_SOFTCAP * torch.tanh(self.lm_head(rms_norm(x)).float() / LOGIT_SOFTCAP)

    def forward(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """fp32 nats of the targets (B, T): their mean, or (B * T,) with reduction none; target -1 counts 0."""
        logits = self.logits(ids).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)

@torch.no_grad()
def init_weights(model: GPT) -> None:
    """Initialises every parameter in the order of the state dict; fails on one it does not know."""
    bound = math.sqrt(3 / model.hp.model_dim)  # uniform with standard deviation 1 / sqrt(width)
    constants = {"resid_lambdas": 1.0, "x0_lambdas": 0.1, "c_proj": 0.0, "mlp_proj": 0.0, "ve_gate": 0.0}
    for name, p in model.named_parameters():
        part = name.removesuffix(".weight").split(".")[-1]
        if part in constants:
            p.fill_(constants[part])
        elif part in ("wte", "lm_head"):
            p.normal_(0.0, {"wte": 1.0, "lm_head": 0.001}[part])
        else:
            assert part in ("c_q", "c_k", "c_v", "mlp_fc") or "value_embeds" in name, f"no initialisation for {name}"
            p.uniform_(-bound, bound)

def build_model(hp: Hyperparameters, attend: AttentionFunction, machine: Machine) -> GPT:
    """A freshly initialised model; tables and rotary angles in the activations' dtype, all other parameters fp32."""
    torch.manual_seed(hp.seed)
    model = GPT(hp, attend)
    init_weights(model)
    for table in (model.wte, *model.value_embeds.values()):
        table.to(machine.dtype)
    model.cos, model.sin = model.cos.to(machine.dtype), model.sin.to(machine.dtype)
    return model.to(machine.device)

def flops_per_token(model: GPT) -> int:
    """Training FLOPs: 6 per weight of a product, 12 per channel and visible position; no discount for causality."""
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    return 6 * weights + sum(12 * model.hp.model_dim * window for window in model.hp.windows)

# ---- Optimizer: AdamW for tables, head and scalars, Muon for the matrices of the blocks ------------------------------
# Quintic steps of Polar Express (Amsel et al. 2025, arXiv:2505.16932), for 5 steps and a safety factor of 2 %.
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
BETA1, X0_BETA1, BETA2, ADAM_EPS = 0.8, 0.96, 0.95, 1e-10

def polar_express(g: Tensor) -> Tensor:
    """Approximate orthogonal factors of matrices (K, rows, cols), in bf16: singular values go to about 1."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)  # the smaller of both Gram matrices
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = b * gram + c * (gram @ gram)
        x = a * x + (x @ polynomial if tall else polynomial @ x)
    return x

def reduce_variance(update: Tensor, variance: Tensor) -> Tensor:
    """NorMuon (Li et al. 2025, arXiv:2510.05491): evens out rows (columns of a wide matrix) by their running mean
    square, kept in `variance` (K, rows, 1) or (K, 1, cols); each matrix keeps its Frobenius norm."""
    mean_square = update.square().mean(dim=-1 if variance.size(-1) == 1 else -2, keepdim=True)
    variance.lerp_(mean_square, 1 - BETA2)
    scaled = update * variance.clamp_min(1e-10).rsqrt()
    norm, scaled_norm = (x.norm(dim=(-2, -1), keepdim=True) for x in (update, scaled))
    return scaled * (norm / scaled_norm.clamp_min(1e-10))

def muon_step(weights: Tensor, grads: Tensor, buffer: Tensor, variance: Tensor, momentum: Tensor, lr: Tensor,
              decay: Tensor) -> None:
    """Updates matrices (K, rows, cols), fp32, in place; decay acts only where it agrees with the update."""
    buffer.add_((1 - momentum) * (grads - buffer))
    update = reduce_variance(polar_express(grads + momentum * (buffer - grads)).float(), variance)
    weights.sub_(lr * update + lr * decay * weights * (update * weights >= 0))

def adamw_step(weight: Tensor, grad: Tensor, mean: Tensor, mean_square: Tensor, step: Tensor, lr: Tensor,
               beta1: float) -> None:
    """Updates a parameter and its moments in place, in fp32, rounded to their own dtype; no parameter here decays."""
    first = torch.lerp(mean.float(), grad.float(), 1 - beta1)
    second = torch.lerp(mean_square.float(), grad.float().square(), 1 - BETA2)
    mean.copy_(first)
    mean_square.copy_(second)
    weight.sub_(lr / (1 - beta1 ** step) * first / ((second / (1 - BETA2 ** step)).sqrt() + ADAM_EPS))

def parameter_groups(model: GPT) -> list[dict[str, Any]]:
    """Groups with kind (adamw or muon), params, lr and, for adamw, beta1. Every parameter is in one."""
    hp, by_shape = model.hp, defaultdict(list)
    def adamw(lr: float, *params: nn.Parameter, beta1: float = BETA1) -> dict[str, Any]:
        return {"kind": "adamw", "params": list(params), "lr": lr, "beta1": beta1}
    width_scale = (hp.model_dim / 768) ** -0.5
    groups = [adamw(hp.unembedding_lr * width_scale, model.lm_head.weight),
              adamw(hp.embedding_lr * width_scale, model.wte.weight, *model.value_embeds.parameters()),
              adamw(hp.scalar_lr * 0.01, model.resid_lambdas), adamw(hp.scalar_lr, model.x0_lambdas, beta1=X0_BETA1)]
    for p in model.blocks.parameters():
        by_shape[tuple(p.shape)].append(p)
    groups += [{"kind": "muon", "params": params, "lr": hp.matrix_lr * max(1.0, rows / cols) ** 0.5}
               for (rows, cols), params in by_shape.items()]
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(map(id, model.parameters())), "not a partition"
    return groups

class MuonAdamW:
    """State and bookkeeping; the mathematics is in the two step functions, compiled once a shape by `compile`."""
    def __init__(self, groups: list[dict[str, Any]], compile: Callable[..., Any] = lambda function: function) -> None:
        self.groups, self.steps = groups, 0
        self.muon_step, self.adamw_step = compile(muon_step), compile(adamw_step)
        for group in groups:
            params = group["params"]
            group["state"] = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
            if group["kind"] == "muon":
                buffer = torch.zeros_like(torch.stack(params))
                group["state"] = buffer, buffer.mean(-1 if buffer.size(-2) >= buffer.size(-1) else -2, keepdim=True)

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float, weight_decay: float) -> None:
        """One update. Numbers that change enter as 0-D tensors, so that a compiled function is not compiled again."""
        self.steps += 1
        for group in self.groups:
            params, lr = group["params"], torch.tensor(group["lr"] * lr_factor)
            if group["kind"] == "muon":
                weights, grads = torch.stack(params), torch.stack([p.grad for p in params])
                self.muon_step(weights, grads, *group["state"], torch.tensor(momentum), lr, torch.tensor(weight_decay))
                torch._foreach_copy_(params, list(weights.unbind(0)))
            else:
                step = torch.tensor(float(self.steps))
                for p, moments in zip(params, group["state"]):
                    self.adamw_step(p, p.grad, *moments, step, lr, group["beta1"])

def lr_factor(progress: float, hp: Hyperparameters) -> float:
    """Rises over WARMUP_RATIO of the run, is 1, and falls over the last WARMDOWN_RATIO to FINAL_LR_FRAC."""
    if progress < hp.warmup_ratio:
        return progress / hp.warmup_ratio
    left = min(1.0, (1 - progress) / hp.warmdown_ratio) if hp.warmdown_ratio else 1.0
    return left + (1 - left) * hp.final_lr_frac

def muon_momentum(step: int) -> float:
    return 0.85 + 0.10 * min(step / 300, 1.0)

# ---- Training and evaluation -----------------------------------------------------------------------------------------
MAX_LOSS, COLLECT_EVERY = 100, 5000  # nats beyond which a run is lost; steps between garbage collections
PEAK_FLOPS = 989.5e12  # dense bf16 of an H100 or H200, which MFU is a share of

class Trainer:
    """The loop. The clock holds whole steps, reading included; not the first ones, log lines or garbage collection."""
    def __init__(self, model: GPT, machine: Machine, data: TrainData, log: Callable[..., None]) -> None:
        self.model, self.hp, self.machine, self.data, self.log = model, model.hp, machine, data, log
        self.loss_function = machine.compile(model)
        self.optimizer = MuonAdamW(parameter_groups(model), machine.compile)
        self.steps, self.seconds, self.flops_per_token = 0, 0.0, flops_per_token(model)

    def rates(self) -> tuple[float, float]:
        """Tokens per second and percent of the peak FLOPs, over the steps that the clock holds."""
        timed = max(0, self.steps - UNTIMED_STEPS) * self.hp.train_batch_tokens
        rate = timed / self.seconds if timed else 0.0
        return rate, 100 * rate * self.flops_per_token / PEAK_FLOPS

    def step(self) -> float:
        """One optimizer step; the mean loss of its micro-batches, in nats. Schedules take the time before the step."""
        hp, budget = self.hp, self.hp.max_wallclock_seconds
        progress = min(self.seconds / budget, 1.0) if budget else self.steps / hp.iterations
        accumulation = hp.train_batch_tokens // hp.micro_batch_tokens
        total = torch.zeros((), device=self.machine.device)
        for _ in range(accumulation):
            loss = self.loss_function(*self.data.next()) / accumulation
            loss.backward()
            total += loss.detach()
        self.optimizer.step(lr_factor(progress, hp), muon_momentum(self.steps), hp.weight_decay * (1 - progress))
        self.model.zero_grad(set_to_none=True)
        return float(total)

    def fit(self) -> None:
        hp, budget = self.hp, self.hp.max_wallclock_seconds
        while self.steps < hp.iterations and not 0 < budget <= self.seconds:
            self.machine.synchronize()
            began = time.perf_counter()
            loss = self.step()
            self.machine.synchronize()
            self.seconds += time.perf_counter() - began if self.steps >= UNTIMED_STEPS else 0.0
            self.steps += 1
            if not loss <= MAX_LOSS:  # also NaN
                raise DivergedError(f"loss {loss} at step {self.steps} is over {MAX_LOSS} or not finite: lower rates")
            if hp.train_log_every and (self.steps <= 5 or self.steps % hp.train_log_every == 0):
                rate, mfu = self.rates()
                self.log(f"{self.steps}/{hp.iterations} train_loss: {loss:.4f} train_time: {self.seconds / 60:.1f}m "
                         f"tok/s: {rate:.0f} mfu: {mfu:.1f}% epoch: {self.data.epoch}")
            if self.steps % COLLECT_EVERY == 1:  # what exists now lives long: let no collection scan it during a step
                gc.collect()
                gc.freeze()
                gc.disable()

@torch.no_grad()
def evaluate(hp: Hyperparameters, device: torch.device, loss_function: Callable, tokens: np.ndarray) -> float:
    """Mean nats of tokens[1:], each scored once, in sequences of TRAIN_SEQ_LEN and batches of one shape."""
    rows = torch.from_numpy(tokens.astype(np.int64))
    batch = hp.micro_batch_tokens // hp.train_seq_len
    missing = -((len(tokens) - 1) // hp.train_seq_len) % batch  # rows of padding, which score nothing
    inputs = F.pad(rows[:-1].view(-1, hp.train_seq_len), (0, 0, 0, missing))
    targets = F.pad(rows[1:].view(-1, hp.train_seq_len), (0, 0, 0, missing), value=-1)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids, goals in zip(inputs.split(batch), targets.split(batch)):
        total += loss_function(ids.to(device), goals.to(device), "none").double().sum()
    return float(total) / (len(tokens) - 1)

# ---- Run: from settings to a score -----------------------------------------------------------------------------------
def log_head(hp: Hyperparameters, machine: Machine, log: Callable[..., None]) -> None:
    """Settings, source, versions and GPU, in the file only: it is enough to repeat the run."""
    values, on_gpu = asdict(hp) | {"world_size": 1}, machine.device.type == "cuda"
    gpu = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout if on_gpu else "no GPU"
    log("\n".join(["=" * 100, "Hyperparameters:", *(f"  {name}: {values[name]}" for name in sorted(values)),
                   Path(__file__).read_text(encoding="utf-8"), "=" * 100, f"Running Python {sys.version}",
                   f"Running PyTorch {torch.__version__}", gpu, "=" * 100]), console=False)

def execute(hp: Hyperparameters) -> None:
    """A whole run. Raises RunError for everything that a user can cause or must know."""
    began = time.perf_counter()
    tokens, target_bytes, note = load_validation(hp)  # before training: a missing split must not cost a run
    machine = choose_machine(hp)
    data = TrainData(hp, machine.device)
    torch.set_float32_matmul_precision("high")  # TF32 for fp32 products
    attend, attention = choose_attention(hp, machine)
    model = build_model(hp, attend, machine)
    parameters = sum(p.numel() for p in model.parameters())
    log = open_log(hp)
    log_head(hp, machine, log)
    gpu = torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else "cpu"
    log(f"machine: 1 x {gpu}, PyTorch {torch.__version__}, {str(machine.dtype).removeprefix('torch.')}\n"
        f"attention: {attention}\ncompile: {int(machine.compiled)}\ntrain_shards: {len(data.shards)}\n"
        f"val_tokens: {len(tokens) - 1}\nval_bytes: {target_bytes} ({note})\nmodel_params:{parameters}\n"
        f"width: {hp.model_dim}, windows: {hp.windows}")
    trainer = Trainer(model, machine, data, log)
    trainer.fit()
    (rate, mfu), seconds, steps = trainer.rates(), trainer.seconds, trainer.steps
    if steps < hp.iterations:
        log(f"stopping_early: wallclock_cap train_time: {1000 * seconds:.0f}ms step: {steps}/{hp.iterations}")
    eval_began = time.perf_counter()
    loss = evaluate(hp, machine.device, trainer.loss_function, tokens)
    bpb, now = loss / math.log(2) * (len(tokens) - 1) / target_bytes, time.perf_counter()
    log(f"final_model val_loss:{loss:.8f} val_bpb:{bpb:.8f} eval_time:{1000 * (now - eval_began):.0f}ms\n---\n"
        f"val_bpb: {bpb:.8f}\nval_loss: {loss:.8f}\ntrain_seconds: {seconds:.1f}\n"
        f"eval_seconds: {now - eval_began:.1f}\ntotal_seconds: {now - began:.1f}\nsteps: {steps}\n"
        f"tokens: {steps * hp.train_batch_tokens}\ntokens_per_second: {rate:.0f}\nmfu_percent: {mfu:.2f}\n"
        f"peak_memory_mib: {machine.peak_memory_mib()}\nparameters: {parameters}\n"
        f"num_params_M: {parameters / 1e6:.1f}\ndepth: {hp.depth}\nvalid: yes")

def main() -> int:
    settings = [f"  {f.name.upper()}={f.default}\n      {f.metadata['help']}" for f in fields(Hyperparameters)]
    argparse.ArgumentParser(description=__doc__, epilog="\n".join(["settings (environment variables):", *settings]),
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        hp = Hyperparameters.from_env(os.environ)
        execute(replace(hp, run_id=hp.run_id or str(uuid.uuid4())))
    except (RunError, OSError, torch.OutOfMemoryError) as error:  # what user or machine caused: one line
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, RunError) else SetupError.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0

if __name__ == "__main__":
    sys.exit(main())
