"""What comes in and what goes out: locked packages, no network at run time, no secrets in what a run leaves behind."""
import base64
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires

import pytest
from conftest import ROOT, new_folder, run_environment, run_forked, run_script, torchrun, write_wrapper
from packaging.requirements import Requirement

import train_gpt as tg

# -- requirements.lock -------------------------------------------------------------------------------------------------

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PIN = re.compile(r"(?m)^([a-z0-9._-]+)==(\S+)(?: ; .*?)? \\\n((?:    --hash=.*\n?)+)")
FROM_TORCH = ("torch", "triton", "nvidia", "cuda")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.lower())


def required() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {plain(requirement.name): requirement for requirement in found}


def test_each_line_of_the_lock_is_a_pin_with_hashes():
    rest = re.sub(r"(?m)^#.*\n", "", PIN.sub("", LOCK))
    assert rest.strip() == "", rest[:300]
    for name, _, hashes in PIN.findall(LOCK):
        digests = re.findall(r"--hash=(\S+)", hashes)
        assert digests and all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in digests), name
        assert len(set(digests)) == len(digests), name


def test_the_lock_holds_what_requirements_txt_names_and_nothing_of_pytorch():
    pinned = {plain(name): version for name, version, _ in PIN.findall(LOCK)}
    for name, requirement in required().items():
        assert name == "torch" or requirement.specifier.contains(pinned[name]), name
    assert [name for name in pinned if name.startswith(FROM_TORCH)] == []


def test_the_lock_is_closed():
    """Each package's own requirements, as installed here, are in the lock, too; else --require-hashes refuses it."""
    pinned, seen = {plain(name) for name, _, _ in PIN.findall(LOCK)}, 0
    for name in pinned:
        try:
            needed = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # for another system or Python
            continue
        needed = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
        assert {plain(r.name) for r in needed} <= pinned, name
        seen += 1
    assert seen >= len(required()) - 1


def test_the_lock_s_command_makes_it_from_requirements_txt():
    assert "sed /^torch/d requirements.txt | uv pip compile" in LOCK
    assert [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch")] != []


# -- no network --------------------------------------------------------------------------------------------------------

WATCH = """
import os, socket, sys

LOCAL = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname().lower()}

def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None  # None: a socket file, not a host
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    with open(os.environ["NETWORK_LOG"], "a") as log:
        log.write(f"{event} {host} {'local' if host in LOCAL else 'REFUSED'}\\n")
    if host not in LOCAL:
        raise OSError(f"{event} to {host}: no network here")

sys.addaudithook(watch)
"""
SHORT = {"run_id": "r", "iterations": 2}


@pytest.fixture
def watched(tmp_path):
    """A data folder, and settings under which every Python process there logs and limits its connections."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(WATCH)
    log = tmp_path / "network.log"
    log.write_text("")
    return new_folder(tmp_path, "here"), log, {"pythonpath": tmp_path / "site", "network_log": log}


@pytest.mark.parametrize("call", [
    "socket.create_connection(('192.0.2.1', 80), 0.1)", "socket.getaddrinfo('example.invalid', 80)",
    "__import__('urllib.request').request.urlopen('http://example.invalid')",
    "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"])
def test_the_watch_sees_connections(watched, call):
    folder, log, changes = watched
    done = subprocess.run([sys.executable, "-c", f"import socket; {call}"], cwd=folder, env=run_environment(**changes),
                          capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "no network here" in done.stderr
    assert "REFUSED" in log.read_text()


def test_training_and_evaluation_open_no_connection(watched):
    folder, log, changes = watched
    trained = run_script(folder, **SHORT, **changes)
    assert trained.returncode == 0, trained.stderr
    scored = run_script(folder, run_id="again", eval_only="final_model.int6.ptz", **changes)
    assert scored.returncode == 0, scored.stderr
    assert log.read_text() == ""


def test_several_ranks_talk_to_this_machine_alone(watched):
    folder, log, changes = watched
    done = torchrun(folder, 2, **SHORT, gptq_enabled=0, **changes)
    assert done.returncode == 0, done.stderr
    assert "REFUSED" not in log.read_text()


# -- no secrets --------------------------------------------------------------------------------------------------------

SECRETS = {name: f"canary-{number}-{'f3' * 12}" for number, name in enumerate((
    "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "WANDB_API_KEY",
    "DATABASE_PASSWORD", "MY_SECRET"))}


def leaks(text: bytes) -> list[str]:
    """Names of secrets that a text holds, as they are or in base64 or hex."""
    forms = {name: (value.encode(), base64.b64encode(value.encode())[:-4], value.encode().hex().encode())
             for name, value in SECRETS.items()}
    return [name for name, shapes in forms.items() if any(shape in text for shape in shapes)]


def left_behind(folder, outputs) -> dict[str, list[str]]:
    """Leaks in every file below a folder, artifacts also unpacked, and in what the commands printed."""
    texts = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts |= {f"{name}, unpacked": tg.byte_unshuffle(tg.decompress(data))
              for name, data in texts.items() if name.endswith(".ptz")}
    texts |= {f"output {n}": (done.stdout + done.stderr).encode() for n, done in enumerate(outputs)}
    assert len(texts) > 3
    return {name: found for name, text in texts.items() if (found := leaks(text))}


def golf(folder, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "golf", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=run_environment(pythonpath=ROOT, **SECRETS), capture_output=True,
                          text=True, check=False, timeout=120)


def test_leaks_are_found(tmp_path):
    value = SECRETS["HF_TOKEN"]
    for text in (value, f"x{value}y", base64.b64encode(value.encode()).decode(), value.encode().hex()):
        assert leaks(text.encode()) == ["HF_TOKEN"], text
    assert leaks(b"HF_TOKEN=canary-0") == []


def test_secrets_of_the_environment_are_in_no_log_artifact_or_record(tmp_path):
    good, bad = new_folder(tmp_path, "good"), new_folder(tmp_path, "bad")
    runs = {"trains": (good, {**SHORT, "seed": 7, **SECRETS}), "refused": (bad, {"matrix_l": 1, **SECRETS})}
    trained, refused = run_forked(runs).values()
    assert trained.returncode == 0 and refused.returncode == 2, trained.stderr + refused.stderr
    assert "MATRIX_L is no setting" in refused.stderr
    made = golf(good, "new", "non_record_16mb", "Quiet", "--logs", "logs/r.txt", "--author=A", "--github-id=a",
                "--blurb=b", "--records=records")
    assert made.returncode == 0 and len(list((good / "records").glob("*/*/submission.json"))) == 1, made.stderr
    checked = golf(good, "check", *(good / "records").glob("*/*"))
    doctor = golf(good, "doctor", "--data-dir", "data", "--vocab-size", "512")
    assert left_behind(tmp_path, [trained, refused, made, checked, doctor]) == {}


def test_the_traceback_of_an_unexpected_error_shows_no_secret(tmp_path):
    folder = new_folder(tmp_path, "here")
    wrapper = write_wrapper(folder, "train_gpt.Trainer.step = None")
    failed = run_script(folder, script=wrapper, **SHORT, **SECRETS)
    assert failed.returncode == 1 and "Traceback" in failed.stderr
    assert left_behind(folder, [failed]) == {}
