"""A training script that trains nothing: it prints what train_gpt.py prints, with a score that has a true level and the
noise of one run. The loop's tests and bench/research_kills.py change its constants."""
import hashlib
import os
import random
import sys
import time
from pathlib import Path

LEVEL = 1.0
NOISE = 0.0
SLEEP = 0.0
BEHAVIOUR = "fine"
MATRIX_LR = 0.02  # [0.001, 0.1]


def val_bpb(seed):
    source = Path(__file__).read_bytes()
    noise = random.Random(hashlib.sha256(source + str(seed).encode()).digest()).gauss(0, NOISE)
    return LEVEL + abs(MATRIX_LR - 0.03) + noise


def misbehave():
    if BEHAVIOUR == "crash":
        raise RuntimeError("the candidate is broken")
    if BEHAVIOUR == "hang":
        import signal
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
        time.sleep(600)
    if BEHAVIOUR == "debris":
        Path("junk.py").write_text("left behind\n")
    if BEHAVIOUR == "nan":
        sys.exit(3)


def main():
    seed, budget = int(os.environ["SEED"]), float(os.environ["MAX_WALLCLOCK_SECONDS"])
    output = Path(os.environ["OUTPUT_DIR"])
    (output / "weights.bin").write_bytes(b"\0" * (1 << 21))
    print("1/10 train_loss: 2.5000 train_time: 0.0m tok/s: 1000", flush=True)
    time.sleep(SLEEP)
    misbehave()
    trained = 2 * budget + 9 if BEHAVIOUR == "slow" else budget
    size = 16_000_001 if BEHAVIOUR == "oversize" else 15_000_000
    print(f"---\nval_bpb: {val_bpb(seed):.8f}\ntrain_seconds: {trained}\nsteps: 10\npeak_memory_mib: 2048\n"
          f"total_bytes: {size}\nvalid: yes")


if __name__ == "__main__":
    main()
