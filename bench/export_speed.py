"""Speed and memory of the exporter: worker processes against one, and one against plain SentencePiece.

    python bench/export_speed.py --docs docs_selected.jsonl.xz docs_extra_1.jsonl.xz \\
        --model 4096=fineweb_4096_bpe.model --out bench/results/export_speed.json

Speed is measured on the first --speed-mb of the documents as plain .jsonl, in rounds that alternate what is measured;
memory on all of them. Figures for other machines are extrapolated, and the result says from what.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXPORTER = Path(__file__).resolve().parents[1] / "data" / "download_hf_docs_and_tokenize.py"
TOKENS_WANTED = 10_000_000_000
SAMPLE_SECONDS = 0.5
PLAIN = """
import json, sys, time
import sentencepiece
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
tokenizer = sentencepiece.SentencePieceProcessor(model_file=sys.argv[2])
start = time.perf_counter(), time.process_time()
rows = tokenizer.encode(texts, num_threads=1)
print(json.dumps({"wall_s": time.perf_counter() - start[0], "cpu_s": time.process_time() - start[1],
                  "text_mb": sum(len(text.encode("utf-8")) for text in texts) / 1e6, "tokens": sum(map(len, rows))}))
"""


def write_docs(inputs: list[Path], target: Path, limit_bytes: float) -> dict:
    """The first documents of the inputs, up to limit_bytes, as one plain file; returns their number and bytes."""
    docs = size = 0
    with target.open("wb") as file:
        for path in inputs:
            with (lzma.open if path.suffix == ".xz" else open)(path, "rb") as lines:
                for line in lines:
                    if size >= limit_bytes:
                        break
                    file.write(line)
                    docs, size = docs + 1, size + len(line)
    return {"docs": docs, "file_mb": size / 1e6}


def tree_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, tasks.read_text().split())
            except OSError:
                continue  # it has just ended
    return found


def memory_of(pid: int) -> float:
    """Memory of one process in MB, shared pages by their share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def cpu_of(pid: int) -> float:
    """CPU seconds of one process without its children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu() -> float:
    """CPU seconds that all programs of this machine have used."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks


def is_over(process: subprocess.Popen) -> bool:
    """Whether it has ended, or does so before it is time for the next sample."""
    try:
        process.wait(SAMPLE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def run_export(docs: Path, model: str, out: Path, workers: int) -> dict:
    """One export as a user runs it: seconds, CPU seconds of all its processes and of the main one, peak memory."""
    specs = out.with_suffix(".json")
    size = int(model.partition("=")[0])
    specs.write_text(json.dumps({"tokenizers": [{"name": "t", "kind": "sentencepiece", "vocab_size": size}]}))
    command = [sys.executable, EXPORTER, "--docs-jsonl", docs, "--tokenizer-config", specs, "--reuse-sp-model", model]
    command += ["--output-root", out, "--val-docs", 50, "--unofficial-split", "--workers", workers]
    before, busy, began = resource.getrusage(resource.RUSAGE_CHILDREN), machine_cpu(), time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    peak = main_cpu = 0.0
    while not is_over(process):
        peak = max(peak, sum(map(memory_of, tree_of(process.pid))))
        main_cpu = max(main_cpu, cpu_of(process.pid))
    wall, busy = time.perf_counter() - began, machine_cpu() - busy
    if process.returncode:
        raise SystemExit(f"the export failed with exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    others = max(0.0, busy - cpu) / wall  # cores that other programs took meanwhile
    return {"wall_s": wall, "cpu_s": cpu, "others_cores": others, "main_cpu_s": main_cpu, "peak_mb": peak}


def run_plain(docs: Path, model: str) -> dict:
    command = [sys.executable, "-c", PLAIN, str(docs), model.partition("=")[2]]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def extrapolate(text_mb: float, tokens: int, one: dict, large: dict, large_mb: float) -> dict:
    """Hours for ten billion tokens: workers share the text, one process reads, writes and hashes all of it."""
    wanted_mb = TOKENS_WANTED * text_mb / tokens
    shared, serial = one["cpu_s"] / text_mb, large["main_cpu_s"] / large_mb  # CPU seconds per MB
    return {
        "how": "extrapolated, not measured: per MB, the larger of (CPU seconds of a one-worker export / cores) and "
        "(CPU seconds of the main process of the largest two-worker export), times the text of ten billion tokens",
        "text_gb": wanted_mb / 1e3,
        "main_process_mb_per_s": large_mb / large["main_cpu_s"],
        "hours_by_cores": {cores: max(shared / cores, serial) * wanted_mb / 3600 for cores in (1, 16, 64)},
    }


def summarise(plain: list[dict], exports: dict[int, list[dict]], large: dict | None, large_mb: float) -> dict:
    """The figures with a target, from the fastest round of each; the CPU figures depend least on the machine's load."""
    text_mb, tokens = plain[0]["text_mb"], plain[0]["tokens"]
    best = {workers: min(rounds, key=lambda run: run["wall_s"]) for workers, rounds in exports.items()}
    lean = {workers: min(rounds, key=lambda run: run["cpu_s"]) for workers, rounds in exports.items()}
    plain_wall, plain_cpu = (min(run[key] for run in plain) for key in ("wall_s", "cpu_s"))
    return {
        "mb_per_s_plain_encode": text_mb / plain_wall,
        "mb_per_s_by_workers": {workers: text_mb / run["wall_s"] for workers, run in best.items()},
        "others_cores_in_those": {workers: run["others_cores"] for workers, run in best.items()},
        "mb_per_cpu_s_one_worker": text_mb / lean[1]["cpu_s"],
        "speedup_two_workers": best[1]["wall_s"] / best[2]["wall_s"],
        "cpu_cost_of_two_workers": lean[2]["cpu_s"] / lean[1]["cpu_s"],
        "one_worker_over_plain_wall": best[1]["wall_s"] / plain_wall,
        "one_worker_over_plain_cpu": lean[1]["cpu_s"] / plain_cpu,
        "ten_billion_tokens": extrapolate(text_mb, tokens, lean[1], large or lean[2], large_mb),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, nargs="+", required=True, help="document files, .jsonl or .jsonl.xz")
    parser.add_argument("--model", required=True, metavar="V=PATH", help="SentencePiece model and its size")
    parser.add_argument("--speed-mb", type=float, default=60.0, help="documents for the speed rounds (default 60 MB)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true", help="leave out the export of all documents")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    args = parser.parse_args()
    result: dict = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine(),
                    "python": platform.python_version()},
        "load_before": os.getloadavg(), "command": " ".join(sys.argv[1:]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result["speed_docs"] = write_docs(args.docs, folder / "speed.jsonl", args.speed_mb * 1e6)
        plain, exports, loads = [], {1: [], 2: []}, []
        for _ in range(args.rounds):
            plain.append(run_plain(folder / "speed.jsonl", args.model))
            for workers, rounds in exports.items():
                rounds.append(run_export(folder / "speed.jsonl", args.model, folder / f"out{workers}", workers))
            loads.append(os.getloadavg()[0])
        result |= {"plain": plain, "exports": exports, "load_after_rounds": loads}
        size = result["speed_docs"]["file_mb"]
        if not args.no_memory:
            result["all_docs"] = write_docs(args.docs, folder / "all.jsonl", float("inf"))
            result["all_exported"] = run_export(folder / "all.jsonl", args.model, folder / "all", 2)
            size = result["all_docs"]["file_mb"]
        result |= summarise(plain, exports, result.get("all_exported"), size)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key not in ("plain", "exports")}, indent=1))


if __name__ == "__main__":
    main()
