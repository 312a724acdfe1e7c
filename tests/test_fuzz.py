"""A slice of bench/fuzz.py's campaign, the failures that its harness must notice, and runs on damaged artifacts."""
import ctypes
import json
import os
import random
import socket
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, assert_refused, new_folder, run_forked
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import train_gpt as tg
from golf.logs import read_log

sys.path.insert(0, str(ROOT / "bench"))

import fuzz
import fuzz_targets
from fuzz import Case, Kind

SEED, CASES = 5, 16  # of each kind
quick = examples(max_examples=40, deadline=None)

# -- the slice ---------------------------------------------------------------------------------------------------------



@pytest.fixture(scope="module")
def campaign():
    """Outcomes by kind, of all kinds in two processes."""
    cases = [Case(kind, number) for number in range(CASES) for kind in fuzz_targets.KINDS]
    found = {kind.name: [] for kind in fuzz_targets.KINDS}
    for outcome in fuzz.outcomes(cases, SEED, processes=2):
        found[outcome.case.rsplit("/", 1)[0]].append(outcome)
    return found


@pytest.mark.parametrize("kind", [kind.name for kind in fuzz_targets.KINDS])
def test_damage_is_refused_or_harmless(campaign, kind):
    assert len(campaign[kind]) == CASES
    assert [outcome for outcome in campaign[kind] if outcome.failed] == []


@pytest.mark.parametrize("case", [
    "tokenizer: pieces/19", "tokenizer: pieces/3943", "artifact: contents/1389", "manifest: byte sidecar/1050"])
def test_what_a_whole_campaign_found_stays_mended(case):
    name, number = case.rsplit("/", 1)
    kind = next(kind for kind in fuzz_targets.KINDS if kind.name == name)
    (outcome,) = fuzz.outcomes([Case(kind, int(number))], 1, processes=1)
    assert outcome.verdict == "refused"


def test_the_slice_has_both_refused_and_accepted_inputs(campaign):
    verdicts = {outcome.verdict for kind in campaign.values() for outcome in kind}
    assert {"correct", "refused"} <= verdicts


@pytest.mark.parametrize("kind", fuzz_targets.KINDS, ids=lambda kind: kind.name)
def test_a_case_is_the_same_again(kind, tmp_path):
    def files(folder: Path) -> dict[str, object]:
        folder.mkdir()
        kind.make(random.Random("1/x"), folder)
        return {str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
                for path in folder.rglob("*") if path.is_symlink() or path.is_file()}

    first = files(tmp_path / "a")
    assert first == files(tmp_path / "b") and first


# -- the harness -------------------------------------------------------------------------------------------------------

def raises():
    raise KeyError("lost")


def sleeps():
    time.sleep(60)


def allocates():
    return "correct" if len(bytearray(os.urandom(1)) * (100 << 20)) else "refused"


def swallows_a_bomb():
    try:
        bytearray(b"x") * (8 << 30)
    except MemoryError:  # a limit of the address space must not pass for a clean error
        return "refused" if len(b"x" * (100 << 20)) else "correct"
    return "correct"


def writes_here():
    Path("escaped").write_text("")
    return "refused"


def writes_into_the_folder(folder):
    (folder / "log").write_text("")
    return "refused"


def writes_without_python():
    os.close(ctypes.CDLL(None).open(b"escaped", os.O_CREAT | os.O_WRONLY, 0o600))
    return "refused"


def runs_a_command():
    os.system("true")
    return "refused"


def connects():
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except OSError:
        return "refused"
    return "correct"


def exits():
    os._exit(0)


BAD = {"raises": (raises, "traceback"), "exits by SystemExit": (lambda: sys.exit(3), "traceback"),
       "sleeps": (sleeps, "hang"), "allocates": (allocates, "memory"), "swallows a bomb": (swallows_a_bomb, "memory"),
       "writes here": (writes_here, "side effect"), "writes without Python": (writes_without_python, "side effect"),
       "runs a command": (runs_a_command, "side effect"), "connects": (connects, "side effect"),
       "aborts": (os.abort, "crash"), "segfaults": (lambda: ctypes.string_at(0), "crash"), "exits": (exits, "crash"),
       "says neither": (lambda: "fine", "fine"), "good": (lambda: "correct", "correct")}


@pytest.fixture(scope="module")
def verdicts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "LIMIT_SECONDS", 5.0)
        patch.setattr(fuzz, "LIMIT_MIB", 50)
        kinds = [Kind(name, 1, lambda rng, folder, f=function: f) for name, (function, _) in BAD.items()]
        kinds.append(Kind("writes into the folder", 1, lambda rng, folder: lambda: writes_into_the_folder(folder)))
        cases = [Case(kind, number) for kind in kinds for number in (0, 1)]
        return {outcome.case: outcome for outcome in fuzz.outcomes(cases, SEED, processes=4)}


@pytest.mark.parametrize("name", [*BAD, "writes into the folder"])
def test_the_harness_notices(verdicts, name):
    """Twice each, so that the process which replaces a dead one works, too."""
    expected = BAD[name][1] if name in BAD else "side effect"
    for number in (0, 1):
        outcome = verdicts[f"{name}/{number}"]
        assert outcome.verdict == expected, outcome
        assert outcome.failed == (expected != "correct")


def test_the_summary_lists_each_failure_once_with_its_cases():
    results = [fuzz.Outcome("a/1", "correct"), fuzz.Outcome("a/2", "hang"),
               fuzz.Outcome("b/1", "traceback", "x", 0.5, 3.0), fuzz.Outcome("b/9", "traceback", "x", 0.1, 9.0)]
    summary = fuzz.summarise(results)
    assert (summary["cases"], summary["verdicts"]) == (4, {"correct": 1, "hang": 1, "traceback": 2})
    assert summary["failures"] == [
        {"kind": "a", "verdict": "hang", "detail": "", "cases": 1, "first": ["2"]},
        {"kind": "b", "verdict": "traceback", "detail": "x", "cases": 2, "first": ["1", "9"]}]
    assert summary["kinds"]["b"] == {"verdicts": {"traceback": 2}, "most_seconds": 0.5, "most_mib": 9.0}


def test_a_plan_has_the_kinds_shares():
    kinds = [Kind("a", 3, None), Kind("b", 1, None)]
    cases = fuzz.plan(kinds, 400)
    assert len(set(cases)) == len(cases) == 400
    assert sum(case.kind.name == "a" for case in cases) == 300
    assert fuzz.plan(kinds, 400) == cases


# -- found by Hypothesis, which makes a failure small ------------------------------------------------------------------

NAMES = st.sampled_from(["type", "step", "name", "run_id", "val_loss", "val_bpb", "train_loss", "eval_seconds"])
KINDS = st.sampled_from(["settings", "step", "validation", "evaluation", "summary", ""])
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | KINDS,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=8)


@quick
@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_any_bytes_are_no_artifact(data, shuffled, compressed):
    data = tg.byte_shuffle(data) if shuffled else data
    with pytest.raises(tg.ArtifactError):
        tg.unpack_artifact(tg.compress(data, "lzma") if compressed else data)


@quick
@given(st.lists(JSON, max_size=4))
def test_any_records_beside_a_log_are_read_or_refused(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("log") / "run.txt"
    path.write_text(fuzz_targets.LOG, encoding="utf-8")
    path.with_suffix(".jsonl").write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    try:
        read_log(path)
    except ValueError as error:
        assert str(path.with_suffix(".jsonl")) in str(error) and "\n" not in str(error)


# -- whole runs --------------------------------------------------------------------------------------------------------

def good_artifact() -> bytes:
    """Of the tiny configuration, which the runs below have."""
    hp = fuzz_targets.HP
    model = tg.build_model(hp, tg.Operations(tg.sdpa_attention), tg.torch.device("cpu"), tg.torch.float32)
    return tg.pack_artifact(tg.quantize_state(model.state_dict(), {}, hp), "lzma")


def test_a_run_on_a_damaged_artifact_ends_with_6_and_one_line(tmp_path):
    good, rng = good_artifact(), random.Random(SEED)
    given = {"good": good, **{f"damaged{n}": fuzz_targets.damage(good, rng) for n in range(3)},
             "command": fuzz_targets.compress(fuzz_targets.CALLS[0].pickled(), rng),
             "other": fuzz_targets.PACKED[0]}
    runs = {}
    for name, data in given.items():
        folder = new_folder(tmp_path, name)
        (folder / "given.ptz").write_bytes(data)
        runs[name] = folder, {"run_id": "r", "eval_only": "given.ptz", "sliding_window_enabled": 0}
    results = run_forked(runs)
    assert results.pop("good").returncode == 0
    for name, result in results.items():
        assert_refused(result, 6, "given.ptz cannot be scored")
        assert len(result.stderr.strip().splitlines()) == 1, name
        assert not (runs[name][0] / "escaped").exists()
