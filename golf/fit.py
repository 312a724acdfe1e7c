"""`fit`: where an artifact's bytes are, what would change them, and an artifact that fits a target with least error."""
from __future__ import annotations

import argparse
import io
import lzma
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .console import add_command, print_json, print_table, write_file
from .logs import read_log
from .trial import check_output

SMALL = 65_536  # tensors of at most so many elements stay fp16
INT6, INT8 = 31, 127  # largest codes
CLIP_QUANTILES = (0.9990, 0.9995, 0.9999, 0.99999, 1.0)
CONTROL = ("attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weight", "skip_gates", "ve_layer_scales",
           "ve_shared.scale")
GROUPS = {"attention q": r"\.attn\.c_q", "attention k": r"\.attn\.c_k", "attention v": r"\.attn\.c_v",
          "attention proj": r"\.attn\.proj", "mlp fc": r"\.mlp\.fc", "mlp proj": r"\.mlp\.proj",
          "embeddings": r"tok_emb|embed\.weight|lm_head"}
# The remedies, in their fixed order: codes clipped at so many deviations, then so many levels on each side of zero.
CLIP_SIGMAS = (4.0, 3.5, 3.0, 2.5)
FEWER_LEVELS = (29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7)
MORE_LEVELS = (36, 42, 48, 55, 63, 79, 100, 127)
GPTQ_SHARE = 0.5  # GPTQ's loss as a share of row search's, when no Hessian tells; its plain squared error is larger
WD_EXPONENT = 0.5  # decoupled decay against updates of one size: RMS goes with decay ** -0.5


# -- artifact format ---------------------------------------------------------------------------------------------------

def shuffle(data: bytes) -> bytes:
    return b"BSHF\x02" + data[::2] + data[1::2] if len(data) > 1 else data


def unshuffle(data: bytes) -> bytes:
    if data[:5] != b"BSHF\x02":
        return data
    body = data[5:]
    out, half = bytearray(len(body)), (len(body) + 1) // 2
    out[::2], out[1::2] = body[:half], body[half:]
    return bytes(out)


def compress(data: bytes, compressor: str) -> bytes:
    if compressor == "lzma":
        return lzma.compress(data, preset=6)
    import brotli

    return brotli.compress(data, quality=11)


def decompress(data: bytes) -> bytes:
    if data.startswith(b"\xfd7zXZ\x00"):
        return lzma.decompress(data)
    import brotli

    return brotli.decompress(data)


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(weights as they are used, stored tensors, meta) of a checkpoint or an artifact; a checkpoint has no last two."""
    import torch

    if not path.is_file():
        raise ValueError(f"{path}: no such file; give final_model.pt or final_model.int6.ptz")
    data = path.read_bytes()
    try:
        if data.startswith(b"PK"):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), {}, {}
        content = torch.load(io.BytesIO(unshuffle(decompress(data))), map_location="cpu", weights_only=True)
        tensors, meta = content["w"], content["m"]
        return {name: stored_value(name, tensors, meta) for name in meta}, tensors, meta
    except Exception as error:  # noqa: BLE001 - a damaged zip, pickle or stream fails in many ways, which mean the same
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ValueError(f"{path} is neither a state dict nor an artifact of w and m ({reason}); "
                         "give final_model.pt or the .ptz") from None


def stored_value(name: str, tensors: dict[str, Any], meta: dict[str, Any]) -> Any:
    if isinstance(meta[name], str):
        return tensors[name]
    codes, scale = tensors[f"{name}.q"].float(), tensors[f"{name}.scale"].float()
    return codes * scale.view(-1, *[1] * (codes.ndim - 1))


def storage_class(name: str, tensor: Any) -> str:
    """The recipe's rule for a tensor of a checkpoint: passthrough, passthrough_ctrl, int6 or int8."""
    if not tensor.is_floating_point() or tensor.numel() <= SMALL:
        return "passthrough"
    if any(part in name for part in CONTROL):
        return "passthrough_ctrl"
    return "int6" if ".attn." in name or ".mlp." in name or name == "ve_shared.proj.weight" else "int8"


# -- quantisation ------------------------------------------------------------------------------------------------------

def row_quantiles(weight: Any, quantiles: tuple[float, ...]) -> Any:
    """(len(quantiles), rows) clips of |weight|; in parts, since torch.quantile takes 16 million values at most."""
    import torch

    wanted = torch.tensor(quantiles, device=weight.device)
    return torch.cat([torch.quantile(part.abs(), wanted, dim=1) for part in weight.split(4096)], dim=1)


def quantize(weight: Any, clip: Any, levels: int) -> tuple[Any, Any]:
    """Codes (fp32) in +-levels and fp32 scales that fp16 holds; the recipe's floor of one over levels on the scale."""
    scale = (clip / levels).clamp_min(1 / levels).half().float()[:, None]
    return (weight / scale).round().clamp_(-levels, levels), scale


def clip_codes(codes: Any, sigmas: float) -> Any:
    limit = max(1, math.ceil(sigmas * float(codes.square().mean().sqrt())))
    return codes.clamp(-limit, limit)


def entropy_bytes(codes: Any) -> float:
    """Order-0 entropy of integer codes in bytes: what a perfect coder without context would need."""
    counts = (codes.flatten().int() + 128).bincount(minlength=256).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log2()).sum() * codes.numel() / 8)


@dataclass
class Option:
    """One way to store a matrix: `size` is an estimate in bytes, `error` the summed squared (weighted) error."""

    label: str
    size: float
    error: float
    make: Callable[[], tuple[Any, Any]]


@dataclass
class Matrix:
    """A quantised matrix: fp32 weight, codes and scale as stored now, real compressed bytes of the codes alone."""

    name: str
    kind: str
    weight: Any
    codes: Any
    scale: Any
    hessian: Any = None
    method: str = "clip_search"
    compressed: int = 0
    clip: Any = None
    row_error: float = 0.0  # of the row search with all levels
    options: list[Option] = field(default_factory=list)

    @property
    def rms(self) -> float:
        return float(self.weight.square().mean().sqrt())

    def error(self, codes: Any, scale: Any) -> float:
        """Summed squared error, or the trace of E H E^T with a Hessian."""
        e = self.weight - codes * scale
        return float((e.square() if self.hessian is None else (e @ self.hessian) * e).sum())

    def estimate(self, codes: Any) -> float:
        """Compressed bytes of other codes: their entropy times what the compressor made of the present ones."""
        return entropy_bytes(codes) * self.compressed / max(entropy_bytes(self.codes), 1.0)


def make_matrix(name: str, weight: Any, kind: str, stored: tuple[Any, Any] | None, hessian: Any) -> Matrix:
    """Codes as stored; for a checkpoint those of the recipe's row search (least mean squared error of five clips)."""
    if kind == "int8":
        clip = row_quantiles(weight, (0.9999984,))[0]
        scale = (clip / INT8).clamp_min(1 / INT8)[:, None]  # codes come from it before fp16 rounds it
        codes = (weight.clamp(-clip[:, None], clip[:, None]) / scale).round()
        return Matrix(name, kind, weight, *(stored or (codes, scale.half().float())), clip=clip)
    clips = row_quantiles(weight, CLIP_QUANTILES)
    tried = [quantize(weight, clip, INT6) for clip in clips]
    best = min(range(len(tried)), key=lambda i: float((weight - tried[i][0] * tried[i][1]).square().sum()))
    matrix = Matrix(name, kind, weight, *(stored or tried[best]), hessian, clip=clips[best])
    matrix.row_error = matrix.error(*tried[best])
    return matrix


def add_options(matrix: Matrix, grow: bool) -> None:
    """What can be done with an int6 matrix, in the fixed order of the remedies; the first is to leave it."""
    m = matrix
    plain = m.error(m.codes, m.scale)
    present = GPTQ_SHARE * m.row_error if m.method == "gptq" and m.hessian is None else plain
    m.options = [Option("as it is", m.compressed, present, lambda: (m.codes, m.scale))]
    for sigmas in CLIP_SIGMAS:
        add_option(m, f"clip {sigmas:g} sigma", lambda k=sigmas: (clip_codes(m.codes, k), m.scale))
        m.options[-1].error = present + max(0.0, m.options[-1].error - plain)
    for levels in (*FEWER_LEVELS, *(MORE_LEVELS if grow else ())):
        add_option(m, f"{levels} levels", lambda levels=levels: quantize(m.weight, m.clip, levels))


def add_option(matrix: Matrix, label: str, make: Callable[[], tuple[Any, Any]]) -> None:
    codes, scale = make()
    matrix.options.append(Option(label, matrix.estimate(codes), matrix.error(codes, scale), make))


# -- the whole model ---------------------------------------------------------------------------------------------------

@dataclass
class Model:
    """Everything that goes into an artifact, and the bytes that are not matrix codes."""

    order: dict[str, Any]  # tensors as they are used, in state-dict order
    kinds: dict[str, str]
    matrices: dict[str, Matrix]
    passthrough: dict[str, Any]
    compressor: str
    other_bytes: float = 0.0

    @property
    def total(self) -> float:
        return self.other_bytes + sum(m.compressed for m in self.matrices.values())


def load_model(path: Path, weights: Path | None, hessians: Path | None, compressor: str, jobs: int) -> Model:
    """Reads, codes what is not coded yet, and compresses every matrix by itself for its real size."""
    import torch

    used, tensors, meta = read_weights(path)
    exact = read_weights(weights)[0] if weights else used
    if set(exact) != set(used):
        raise ValueError(f"{weights} and {path} hold different tensors: {sorted(set(exact) ^ set(used))[:3]}; "
                         "give both of one run")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    extra = torch.load(hessians, map_location=device, weights_only=True) if hessians else {}
    kinds = {n: (meta[n] if isinstance(meta[n], str) else meta[n]["type"]) if meta else storage_class(n, t)
             for n, t in used.items()}
    matrices = {}
    for name in [n for n, kind in kinds.items() if kind in ("int6", "int8")]:
        stored = (tensors[f"{name}.q"].to(device).float(), tensors[f"{name}.scale"].to(device).float()[:, None]) \
            if meta else None
        matrices[name] = make_matrix(name, exact[name].to(device).float(), kinds[name], stored, extra.get(name))
        matrices[name].method = meta[name].get("method", "clip_search") if meta else "clip_search"
    passthrough = {n: tensors[n] if meta else t.half() if kinds[n] == "passthrough" and t.is_floating_point() else t
                   for n, t in used.items() if n not in matrices}
    model = Model(used, kinds, matrices, passthrough, compressor)
    with ThreadPoolExecutor(jobs) as pool:  # both compressors let go of the interpreter
        sizes = pool.map(lambda m: len(compress(shuffle(code_bytes(m.codes)), compressor)), matrices.values())
        for matrix, size in zip(matrices.values(), sizes):
            matrix.compressed = size
    model.other_bytes = path.stat().st_size - model.total if meta else rest_bytes(model)
    return model


def code_bytes(codes: Any) -> bytes:
    import torch

    return codes.to(torch.int8).cpu().numpy().tobytes()


def rest_bytes(model: Model) -> int:
    """Compressed bytes of everything but matrix codes: the whole artifact with all codes zero."""
    return len(pack(model, {n: (m.codes * 0, m.scale) for n, m in model.matrices.items()}, {}))


def pack(model: Model, coded: dict[str, tuple[Any, Any]], changed: dict[str, str]) -> bytes:
    """The artifact file. `changed` holds the matrices whose codes are no longer those of `method`."""
    import torch

    tensors, meta = {}, {}
    for name in model.order:
        if name in coded:
            codes, scale = coded[name]
            tensors[f"{name}.q"] = codes.to(torch.int8).cpu().contiguous()
            tensors[f"{name}.scale"] = scale.flatten().half().cpu()
            method = "clip_search" if name in changed else model.matrices[name].method
            meta[name] = {"type": "int8"} if model.kinds[name] == "int8" else {"type": "int6", "method": method}
        else:
            tensors[name], meta[name] = model.passthrough[name].contiguous(), model.kinds[name]
    buffer = io.BytesIO()
    torch.save({"w": tensors, "m": meta}, buffer)
    return compress(shuffle(buffer.getvalue()), model.compressor)


# -- plan --------------------------------------------------------------------------------------------------------------

def choose(matrices: list[Matrix], budget: float, may_grow: bool) -> list[Option] | None:
    """An option for each matrix so that sizes fit `budget` with the least summed error; None when nothing fits.

    One price of a byte for all matrices, found by bisection; then what is left of the budget buys errors back.
    """
    def at_price(price: float) -> list[Option]:
        return [min(m.options, key=lambda o: o.error + price * o.size) for m in matrices]

    def size(plan: list[Option]) -> float:
        return sum(o.size for o in plan)

    plan = [m.options[0] for m in matrices]
    if size(plan) <= budget and not may_grow:
        return plan
    low, high = 1e-12, 1e12
    if size(at_price(high)) > budget:
        return None
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if size(at_price(middle)) <= budget else (middle, high)
    plan = at_price(high)
    upgrades = sorted(((plan[i].error - o.error) / max(o.size - plan[i].size, 1e-9), i, k)
                      for i, m in enumerate(matrices) for k, o in enumerate(m.options) if o.error < plan[i].error)
    for _, i, k in reversed(upgrades):
        option = matrices[i].options[k]
        if option.error < plan[i].error and size(plan) - plan[i].size + option.size <= budget:
            plan[i] = option
    return plan


def fit_artifact(model: Model, target: int, grow: bool, tries: int = 7) -> tuple[bytes, dict[str, str], float] | None:
    """(file, what was done to which matrix, summed error) of at most `target` bytes; None when that cannot be.

    Sizes are estimates until the whole is compressed; each miss corrects the estimate for the next try, with a margin
    that grows, since a compressor can make a file of fewer bits larger (small models: by up to 3 %).
    """
    matrices, best, correction = [m for m in model.matrices.values() if m.kind == "int6"], None, 0.0
    fixed = model.total - sum(m.compressed for m in matrices)
    for attempt in range(tries):
        plan = choose(matrices, target - fixed - correction, grow)
        if plan is None:
            break
        done = {m.name: o.label for m, o in zip(matrices, plan) if o is not m.options[0]}
        coded = {n: (m.codes, m.scale) for n, m in model.matrices.items()}
        coded |= {m.name: o.make() for m, o in zip(matrices, plan)}
        data, error = pack(model, coded, done), sum(o.error for o in plan)
        if len(data) <= target and (best is None or error < best[2]):
            best = data, done, error
        if best and (attempt >= 2 or not done or target - len(best[0]) < target / 1000):
            break
        correction += len(data) - (fixed + correction + sum(o.size for o in plan)) + target / 50_000 * 3 ** attempt
    return best


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")


# -- report ------------------------------------------------------------------------------------------------------------

def group_table(model: Model) -> list[dict[str, Any]]:
    """Weights, stored bytes and compressed bytes of each tensor group."""
    table = {name: {"group": name, "tensors": 0, "weights": 0, "raw_bytes": 0, "compressed_bytes": 0.0}
             for name in [*GROUPS, "other"]}
    for name, m in model.matrices.items():
        row = table[group_of(name)]
        row["tensors"] += 1
        row["weights"] += m.weight.numel()
        row["raw_bytes"] += m.weight.numel()
        row["compressed_bytes"] += m.compressed
    table["other"]["tensors"] += len(model.passthrough)
    table["other"]["weights"] += sum(t.numel() for t in model.passthrough.values())
    table["other"]["raw_bytes"] += sum(t.numel() * t.element_size() for t in model.passthrough.values())
    table["other"]["compressed_bytes"] += model.other_bytes
    return [row for row in table.values() if row["tensors"]]


def size_line(model: Model) -> dict[str, Any] | None:
    """Line of compressed / raw bytes over RMS for the int6 matrices; None when fewer than three RMS differ."""
    from scipy.stats import linregress

    matrices = [m for m in model.matrices.values() if m.kind == "int6"]
    if len({m.rms for m in matrices}) < 3:
        return None
    line = linregress([m.rms for m in matrices], [m.compressed / m.weight.numel() for m in matrices])
    return {"slope": float(line.slope), "intercept": float(line.intercept), "r2": float(line.rvalue ** 2),
            "matrices": len(matrices)}


def predictions(model: Model, wd: float) -> list[dict[str, Any]]:
    """Total bytes when all int6 matrices are clipped, coarser or finer, or trained with another weight decay."""
    matrices = [m for m in model.matrices.values() if m.kind == "int6"]
    fixed = model.total - sum(m.compressed for m in matrices)
    rows = []

    def add(change: str, coded: Callable[[Matrix], tuple[Any, Any]], trained: bool = False) -> None:
        pairs = [(m, *coded(m)) for m in matrices]
        error = None if trained else sum(m.error(q, s) for m, q, s in pairs)
        rows.append({"change": change, "bytes": round(fixed + sum(m.estimate(q) for m, q, _ in pairs)), "error": error})

    add("as it is", lambda m: (m.codes, m.scale))
    for sigmas in CLIP_SIGMAS:
        add(f"clip at {sigmas:g} sigma", lambda m, k=sigmas: (clip_codes(m.codes, k), m.scale))
    for bits in (4, 5, 7, 8):
        add(f"{bits} bits", lambda m, levels=2 ** (bits - 1) - 1: quantize(m.weight, m.clip, levels))
    for factor in (0.7, 0.85, 1.2, 1.5) if wd > 0 else ():
        shrink = factor ** -WD_EXPONENT
        add(f"weight decay {wd * factor:.4g} instead of {wd:g}",
            lambda m, f=shrink: quantize(m.weight * f, m.clip * f, INT6), trained=True)
    return rows


def draw(model: Model, line: dict[str, Any], path: Path) -> None:
    """A dot for each int6 matrix, RMS against compressed / raw bytes, and the fitted line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    matrices = [m for m in model.matrices.values() if m.kind == "int6"]
    for group in [*GROUPS, "other"]:
        points = [(m.rms, m.compressed / m.weight.numel()) for m in matrices if group_of(m.name) == group]
        if points:
            axes.scatter(*zip(*points), s=18, label=group)
    ends = [min(m.rms for m in matrices), max(m.rms for m in matrices)]
    axes.plot(ends, [line["intercept"] + line["slope"] * x for x in ends], "k--", lw=1, label=f"R2 = {line['r2']:.4f}")
    axes.set(xlabel="RMS of the matrix", ylabel="compressed bytes per weight", title="Size of a matrix follows its RMS")
    axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    write_file(path, buffer.getvalue())


# -- command -----------------------------------------------------------------------------------------------------------

def fit_command(args: argparse.Namespace) -> int:
    """0 when reported (and, with -o, written); 1 when no artifact of the target's size can be made."""
    for path in filter(None, (args.output, args.plot)):
        check_output(path, args.force)
    if args.output and not args.target_bytes:
        raise ValueError("-o needs --target-bytes: the size that artifact and code together may have")
    wd, code = args.muon_wd, args.code_bytes
    if args.log:
        log = read_log(args.log)
        wd = wd or float(log.settings.get("muon_wd", 0))
        code = code if code is not None else log.code_bytes
    model = load_model(args.checkpoint, args.weights, args.hessians, args.compressor, args.jobs)
    line = size_line(model)
    report = {"artifact_bytes": round(model.total), "code_bytes": code or 0, "groups": group_table(model), "line": line,
              "matrices": [{"name": m.name, "type": m.kind, "rms": m.rms, "ratio": m.compressed / m.weight.numel()}
                           for m in model.matrices.values()], "predictions": predictions(model, wd or 0.0)}
    if args.plot and line:
        draw(model, line, args.plot)
    status = 0
    if args.target_bytes:
        report["fitted"] = write_fitted(args, model, args.target_bytes - (code or 0))
        status = int(report["fitted"] is None)
    print_json(report) if args.json else print_report(report, args)
    return status


def write_fitted(args: argparse.Namespace, model: Model, target: int) -> dict[str, Any] | None:
    for matrix in model.matrices.values():
        if matrix.kind == "int6":
            add_options(matrix, args.grow)
    result = fit_artifact(model, target, args.grow)
    if result is None:
        return None
    data, done, error = result
    if args.output:
        write_file(args.output, data)
    before = sum(m.options[0].error for m in model.matrices.values() if m.options)
    return {"bytes": len(data), "target": target, "changed": done, "error": error, "error_before": before,
            "out": str(args.output) if args.output else None}


def print_report(report: dict[str, Any], args: argparse.Namespace) -> None:
    rows = [[g["group"], g["tensors"], f"{g['weights']:,}", f"{g['compressed_bytes']:,.0f}",
             f"{g['compressed_bytes'] / max(g['raw_bytes'], 1):.3f}"] for g in report["groups"]]
    print_table(f"{args.checkpoint}: {report['artifact_bytes']:,} bytes",
                ["group", "tensors", "weights", "bytes", "compressed / raw"], rows)
    if line := report["line"]:
        print(f"\ncompressed / raw = {line['intercept']:.4f} + {line['slope']:.4f} RMS over {line['matrices']} int6 "
              f"matrices, R2 = {line['r2']:.4f}\n")
    rows = [[p["change"], f"{p['bytes']:,}", f"{p['bytes'] - report['predictions'][0]['bytes']:+,}",
             None if p["error"] is None else f"{p['error']:.6g}"] for p in report["predictions"]]
    print_table("predicted artifact", ["change of all int6 matrices", "bytes", "difference", "squared error"], rows)
    if "fitted" not in report:
        return
    if fitted := report["fitted"]:
        done = list(fitted["changed"].values())
        print_table(f"\nfitted: {fitted['bytes']:,} of {fitted['target']:,} bytes, squared error {fitted['error']:.6g} "
                    f"(before {fitted['error_before']:.6g})", ["remedy", "matrices"],
                    [[remedy, done.count(remedy)] for remedy in sorted(set(done))])
    else:
        print(f"no artifact of {args.target_bytes} bytes can be made by coarser codes: train a smaller model, or with "
              "more weight decay")


def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "fit", fit_command, "show where an artifact's bytes are and make it fit a target")
    parser.add_argument("checkpoint", type=Path, help="final_model.pt, or an artifact, whose codes stay where they can")
    parser.add_argument("--weights", type=Path, help="the artifact's final_model.pt: exact errors, better codes")
    parser.add_argument("--hessians", type=Path, help="torch.save of {weight name: matrix}, to weight the errors")
    parser.add_argument("--log", type=Path, help="log of the run: code bytes and weight decay")
    parser.add_argument("--code-bytes", type=int, help="bytes of the script (default: the log's, or 0)")
    parser.add_argument("--muon-wd", type=float, help="weight decay of the run (default: the log's)")
    parser.add_argument("--target-bytes", type=int, help="bytes that artifact and code may have together")
    parser.add_argument("-o", "--output", type=Path, help="where to write the artifact that fits")
    parser.add_argument("--grow", action="store_true", help="spend what is left of the target on finer codes")
    parser.add_argument("--plot", type=Path, help="PNG of compressed / raw size against RMS")
    parser.add_argument("--compressor", choices=["brotli", "lzma"], default="brotli")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="threads that compress (default: all cores)")
    parser.add_argument("--force", action="store_true", help="replace existing outputs")
