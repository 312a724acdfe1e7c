"""`fit`: where an artifact's bytes are, what would change them, and an artifact that fits a target with least error."""
from __future__ import annotations

import argparse
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from golf.cli import add_command, check_output, number, print_json, print_table, shown, write_file
from golf.logs import read_log
from golf.plots import saved
from golf.trial import recipe

INT6 = 31  # largest code
GROUPS = {"attention q": r"\.attn\.c_q", "attention k": r"\.attn\.c_k", "attention v": r"\.attn\.c_v",
          "attention proj": r"\.attn\.proj", "mlp fc": r"\.mlp\.fc", "mlp proj": r"\.mlp\.proj",
          "embeddings": r"tok_emb|embed\.weight|lm_head", "other": ""}
# The remedies, in their fixed order: codes clipped at so many deviations, then so many levels on each side of zero.
CLIP_SIGMAS = (4.0, 3.5, 3.0, 2.5)
FEWER_LEVELS = (29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7)
MORE_LEVELS = (36, 42, 48, 55, 63, 79, 100, 127)
TRIES = 7  # each compresses the whole artifact
GPTQ_SHARE = 0.5  # GPTQ's loss as a share of plain rounding's; its squared error is larger, but no Hessian is at hand
WD_EXPONENT = 0.5  # decoupled decay against updates of one size: RMS goes with decay ** -0.5

Coded = tuple[Any, Any]  # fp32 codes (R, C) and scales (R, 1)

# -- matrices ----------------------------------------------------------------------------------------------------------

def entropy_bytes(codes: Any) -> float:
    """Order-0 entropy of integer codes in bytes: what a perfect coder without context would need."""
    counts = (codes.flatten().int() + 128).bincount(minlength=256).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log2()).sum() * codes.numel() / 8)

@dataclass
class Option:
    """One way to store a matrix: `size` is an estimate in bytes, `error` the summed squared error."""

    label: str
    size: float
    error: float
    make: Callable[[], Coded]

@dataclass
class Matrix:
    """A quantised matrix: fp32 weight, codes and scale as stored now, real compressed bytes of the codes alone."""

    name: str
    meta: dict[str, str]
    weight: Any
    codes: Any
    scale: Any
    compressed: int = 0
    options: list[Option] = field(default_factory=list)

    @cached_property
    def rms(self) -> float:
        return float(self.weight.square().mean().sqrt())

    @property
    def ratio(self) -> float:
        return self.compressed / self.weight.numel()

    @property
    def group(self) -> str:
        return next(group for group, pattern in GROUPS.items() if re.search(pattern, self.name))

    def clipped(self, sigmas: float) -> Coded:
        limit = max(1, math.ceil(sigmas * float(self.codes.square().mean().sqrt())))
        return self.codes.clamp(-limit, limit), self.scale

    def with_levels(self, levels: int) -> Coded:
        """Codes in +-levels over the range of the present int6 codes, with the recipe's floor of one over levels."""
        scale = (self.scale * INT6 / levels).clamp_min(1 / levels).half().float()
        return (self.weight / scale).round().clamp(-levels, levels), scale

    def row_bytes(self, factor: float) -> float:
        """Entropy of the recipe's row search on weights that are larger by a factor."""
        return max(entropy_bytes(recipe().quantize_int6_rows(self.weight * factor)[0]), 1.0)

    def error(self, codes: Any, scale: Any) -> float:
        return float((self.weight - codes * scale).square().sum())

    def estimate(self, codes: Any) -> float:
        """Compressed bytes of other codes: their entropy times what the compressor made of the present ones."""
        return entropy_bytes(codes) * self.compressed / max(entropy_bytes(self.codes), 1.0)

    def add_options(self, grow: bool) -> None:
        """What can be done with an int6 matrix, in the fixed order of the remedies; the first is to leave it."""
        plain = present = self.error(self.codes, self.scale)
        if self.meta.get("method") == "gptq":
            present = GPTQ_SHARE * self.error(*self.with_levels(INT6))
        self.options = [Option("as it is", self.compressed, present, lambda: (self.codes, self.scale))]
        for sigmas in CLIP_SIGMAS:
            coded = self.clipped(sigmas)
            error = present + max(0.0, self.error(*coded) - plain)
            self.options.append(Option(f"clip {sigmas:g} sigma", self.estimate(coded[0]), error,
                                       partial(self.clipped, sigmas)))
        for levels in (*FEWER_LEVELS, *(MORE_LEVELS if grow else ())):
            coded = self.with_levels(levels)
            self.options.append(Option(f"{levels} levels", self.estimate(coded[0]), self.error(*coded),
                                       partial(self.with_levels, levels)))

# -- the whole model ---------------------------------------------------------------------------------------------------

@dataclass
class Model:
    """An artifact's tensors and meta, its matrices, and the compressed bytes that are not matrix codes."""

    tensors: dict[str, Any]
    meta: dict[str, Any]
    matrices: dict[str, Matrix]
    compressor: str
    other_bytes: float = 0.0

    @property
    def total(self) -> float:
        return self.other_bytes + sum(m.compressed for m in self.matrices.values())

    @property
    def int6(self) -> list[Matrix]:
        return [m for m in self.matrices.values() if m.meta["type"] == "int6"]

    def pack(self, coded: dict[str, Coded], changed: Iterable[str] = ()) -> bytes:
        """The artifact file with other codes and scales. `changed` holds matrices that are no longer GPTQ's."""
        tensors, meta = dict(self.tensors), dict(self.meta)
        for name, (codes, scale) in coded.items():
            tensors[f"{name}.q"] = codes.char().cpu().contiguous()
            tensors[f"{name}.scale"] = scale.flatten().half().cpu()
        meta |= {name: {**meta[name], "method": "clip_search"} for name in changed}
        return recipe().pack_artifact(recipe().Quantized(tensors, meta, [], [], []), self.compressor)

def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Stored tensors, meta, and the weights that they stand for: a checkpoint's own, coded as the recipe does it."""
    import torch

    if not path.is_file():
        raise ValueError(f"{path}: no such file; give final_model.pt or final_model.int6.ptz")
    tg = recipe()
    try:
        if zipfile.is_zipfile(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            done = tg.quantize_state(state, {}, tg.Hyperparameters())
            return done.tensors, done.meta, state
        tensors, meta = tg.unpack_artifact(path.read_bytes())
        return tensors, meta, {name: tensors[f"{name}.q"].float() * tensors[f"{name}.scale"].float()[:, None]
                               if isinstance(kind, dict) else tensors[name] for name, kind in meta.items()}
    except Exception as error:  # noqa: BLE001 - a damaged zip, pickle or stream fails in many ways, which mean the same
        raise ValueError(f"{path} is neither a state dict nor an artifact of w and m ({error!r:.200}); "
                         "give final_model.pt or the .ptz") from None

def load_model(path: Path, weights: Path | None, compressor: str, jobs: int) -> Model:
    """Reads, codes what is not coded yet, and compresses every matrix by itself for its real size."""
    import torch

    tensors, meta, exact = read_weights(path)
    if weights:
        exact = read_weights(weights)[2]
    if set(exact) != set(meta):
        raise ValueError(f"{weights} and {path} hold different tensors: {sorted(set(exact) ^ set(meta))[:3]}; "
                         "give both of one run")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrices = {}
    for name in (name for name, kind in meta.items() if isinstance(kind, dict)):
        codes, scale, weight = (t.to(device).float() for t in (tensors[f"{name}.q"], tensors[f"{name}.scale"],
                                                                exact[name]))
        matrices[name] = Matrix(name, meta[name], weight, codes, scale[:, None])
    model, tg = Model(tensors, meta, matrices, compressor), recipe()
    with ThreadPoolExecutor(jobs) as pool:  # both compressors let go of the interpreter
        stored = (tg.byte_shuffle(tensors[f"{name}.q"].char().numpy().tobytes()) for name in matrices)
        sizes = pool.map(lambda data: len(tg.compress(data, compressor)), stored)
        for matrix, size in zip(matrices.values(), sizes):
            matrix.compressed = size
    if zipfile.is_zipfile(path):  # the rest is an artifact with all codes zero
        model.other_bytes = len(model.pack({name: (m.codes * 0, m.scale) for name, m in matrices.items()}))
    else:
        model.other_bytes = path.stat().st_size - model.total
    return model

# -- plan --------------------------------------------------------------------------------------------------------------

def choose(matrices: list[Matrix], budget: float, may_grow: bool) -> list[Option] | None:
    """An option for each matrix so that sizes fit `budget` with the least summed error; None when nothing fits.

    One price of a byte for all matrices, found by bisection; then what is left of the budget buys errors back. That
    is within 0.1 % of the optimum; scipy's milp finds it, but its solver writes to stdout, which belongs to --json.
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
    gains = [((plan[i].error - o.error) / max(o.size - plan[i].size, 1e-9), i, o)
             for i, m in enumerate(matrices) for o in m.options if o.error < plan[i].error]
    for _, i, option in sorted(gains, key=lambda gain: gain[:2], reverse=True):
        if option.error < plan[i].error and size(plan) - plan[i].size + option.size <= budget:
            plan[i] = option
    return plan

def fit_artifact(model: Model, target: int, grow: bool) -> tuple[bytes, dict[str, str], float] | None:
    """(file, what was done to which matrix, summed error) of at most `target` bytes; None when that cannot be.

    Sizes are estimates until the whole is compressed; each miss corrects the estimate for the next try, with a margin
    that grows, since a compressor can make a file of fewer bits larger (small models: by up to 3 %).
    """
    best, correction = None, 0.0
    fixed = model.total - sum(m.compressed for m in model.int6)
    for attempt in range(TRIES):
        plan = choose(model.int6, target - fixed - correction, grow)
        if plan is None:
            break
        done = {m.name: o.label for m, o in zip(model.int6, plan) if o is not m.options[0]}
        data = model.pack({m.name: o.make() for m, o in zip(model.int6, plan)}, done)
        error = sum(o.error for o in plan)
        if len(data) <= target and (best is None or error < best[2]):
            best = data, done, error
        if best and (attempt >= 2 or not done or target - len(best[0]) < target / 1000):
            break
        correction += len(data) - (fixed + correction + sum(o.size for o in plan)) + target / 50_000 * 3 ** attempt
    return best

# -- report ------------------------------------------------------------------------------------------------------------

def group_table(model: Model) -> list[dict[str, Any]]:
    """Weights, stored bytes and compressed bytes of each tensor group."""
    rest = [model.tensors[name] for name, kind in model.meta.items() if not isinstance(kind, dict)]
    parts = [(m.group, m.weight.numel(), m.weight.numel(), m.compressed) for m in model.matrices.values()]
    parts += [("other", t.numel(), t.numel() * t.element_size(), 0) for t in rest]
    parts.append(("other", 0, 0, model.other_bytes))
    table = []
    for group in GROUPS:
        columns = list(zip(*(part[1:] for part in parts if part[0] == group)))
        if columns:
            table.append({"group": group, "tensors": sum(n > 0 for n in columns[0]), "weights": sum(columns[0]),
                          "raw_bytes": sum(columns[1]), "compressed_bytes": sum(columns[2])})
    return table

def size_line(model: Model) -> dict[str, Any] | None:
    """Line of compressed / raw bytes over RMS for the int6 matrices; None when fewer than three RMS differ."""
    from scipy.stats import linregress

    if len({m.rms for m in model.int6}) < 3:
        return None
    line = linregress([m.rms for m in model.int6], [m.ratio for m in model.int6])
    return {"slope": float(line.slope), "intercept": float(line.intercept), "r2": float(line.rvalue ** 2),
            "matrices": len(model.int6)}

def predictions(model: Model, wd: float) -> list[dict[str, Any]]:
    """Total bytes when all int6 matrices are clipped, coarser or finer, or trained with another weight decay."""
    changes: dict[str, Callable[[Matrix], Coded]] = {"as it is": lambda m: (m.codes, m.scale)}
    changes |= {f"clip at {k:g} sigma": methodcaller("clipped", k) for k in CLIP_SIGMAS}
    changes |= {f"{bits} bits": methodcaller("with_levels", 2 ** (bits - 1) - 1) for bits in (4, 5, 7, 8)}
    rows = []
    for change, coded in changes.items():
        pairs = [(m, *coded(m)) for m in model.int6]
        size = model.total + sum(m.estimate(codes) - m.compressed for m, codes, _ in pairs)
        rows.append({"change": change, "bytes": round(size), "error": sum(m.error(*new) for m, *new in pairs)})
    now = {m.name: m.row_bytes(1.0) for m in model.int6 if wd > 0}
    for factor in (0.7, 0.85, 1.2, 1.5) if wd > 0 else ():
        growth = sum(m.compressed * (m.row_bytes(factor ** -WD_EXPONENT) / now[m.name] - 1) for m in model.int6)
        rows.append({"change": f"weight decay {wd * factor:.4g} instead of {wd:g}",
                     "bytes": round(model.total + growth), "error": None})
    return rows

def draw(model: Model, line: dict[str, Any], path: Path) -> None:
    """A dot for each int6 matrix, RMS against compressed / raw bytes, and the fitted line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for group in GROUPS:
        if points := [(m.rms, m.ratio) for m in model.int6 if m.group == group]:
            axes.scatter(*zip(*points), s=18, label=group)
    ends = [min(m.rms for m in model.int6), max(m.rms for m in model.int6)]
    axes.plot(ends, [line["intercept"] + line["slope"] * x for x in ends], "k--", lw=1, label=f"R2 = {line['r2']:.4f}")
    axes.set(xlabel="RMS of the matrix", ylabel="compressed bytes per weight", title="Size of a matrix follows its RMS")
    axes.legend(fontsize=8)
    write_file(path, saved(figure, dpi=120, format="png"))

# -- command -----------------------------------------------------------------------------------------------------------

def run(args: argparse.Namespace) -> int:
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
    model = load_model(args.checkpoint, args.weights, args.compressor, args.jobs)
    line = size_line(model)
    report = {"artifact_bytes": round(model.total), "code_bytes": code or 0, "groups": group_table(model), "line": line,
              "matrices": [{"name": m.name, "type": m.meta["type"], "rms": m.rms, "ratio": m.ratio}
                           for m in model.matrices.values()], "predictions": predictions(model, wd or 0.0)}
    if args.plot and line:
        draw(model, line, args.plot)
    if args.target_bytes:
        report["fitted"] = write_fitted(args, model, args.target_bytes - (code or 0))
    print_json(report) if args.json else print_report(report, args)
    return int("fitted" in report and report["fitted"] is None)

def write_fitted(args: argparse.Namespace, model: Model, target: int) -> dict[str, Any] | None:
    for matrix in model.int6:
        matrix.add_options(args.grow)
    result = fit_artifact(model, target, args.grow)
    if result is None:
        return None
    data, done, error = result
    if args.output:
        write_file(args.output, data)
    before = sum(m.options[0].error for m in model.int6)
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
             shown(p["error"], ".6g")] for p in report["predictions"]]
    print_table("predicted artifact", ["change of all int6 matrices", "bytes", "difference", "squared error"], rows)
    if fitted := report.get("fitted"):
        done = list(fitted["changed"].values())
        print_table(f"\nfitted: {fitted['bytes']:,} of {fitted['target']:,} bytes, squared error {fitted['error']:.6g} "
                    f"(before {fitted['error_before']:.6g})", ["remedy", "matrices"],
                    [[remedy, done.count(remedy)] for remedy in sorted(set(done))])
    elif "fitted" in report:
        print(f"no artifact of {args.target_bytes} bytes can be made by coarser codes: train a smaller model, or with "
              "more weight decay")

def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "fit", run, "show where an artifact's bytes are and make it fit a target")
    parser.add_argument("checkpoint", type=Path, help="final_model.pt, or an artifact, whose codes stay where they can")
    parser.add_argument("--weights", type=Path, help="the artifact's final_model.pt: exact errors, better codes")
    parser.add_argument("--log", type=Path, help="log of the run: code bytes and weight decay")
    parser.add_argument("--code-bytes", type=number(int, 0), help="bytes of the script (default: the log's, or 0)")
    parser.add_argument("--muon-wd", type=float, help="weight decay of the run (default: the log's)")
    parser.add_argument("--target-bytes", type=number(int, 1), help="bytes that artifact and code may have together")
    parser.add_argument("-o", "--output", type=Path, help="where to write the artifact that fits")
    parser.add_argument("--grow", action="store_true", help="spend what is left of the target on finer codes")
    parser.add_argument("--plot", type=Path, help="PNG of compressed / raw size against RMS")
    parser.add_argument("--compressor", choices=["brotli", "lzma"], default="brotli")
    parser.add_argument("--jobs", type=number(int, 1), default=os.cpu_count(),
                        help="threads that compress (default: all cores)")
    parser.add_argument("--force", action="store_true", help="replace existing outputs")
