"""A repository with the simulated trainer, and commands in it, for the tests of the research loop."""
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import research_kills

from golf import trial
from research import cli

START = ("start", "night", "--budget", "1", "--limit", "4")


def git(folder, *arguments):
    return research_kills.git(folder, *arguments).strip()


def edit(folder, **constants):
    script = folder / "train_gpt.py"
    source = script.read_text()
    for name, value in constants.items():
        source = re.sub(rf"(?m)^{name} = .*", f"{name} = {value!r}", source)
    script.write_text(source)


def commit(folder):
    git(folder, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-qam", "changed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A repository with the simulated trainer, noise 0.002, in which commands run."""
    research_kills.make_repository(tmp_path / "repo")
    edit(tmp_path / "repo", SLEEP=0.0)
    commit(tmp_path / "repo")
    monkeypatch.chdir(tmp_path / "repo")
    monkeypatch.setattr(trial, "GRACE_SECONDS", 0.3)
    return tmp_path / "repo"


@pytest.fixture
def session(folder, capsys):
    assert cli.main([*START]) == 0
    capsys.readouterr()
    return folder


def run_json(capsys, *arguments):
    """Exit status and the JSON that a command prints."""
    status = cli.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def error_of(capsys, *arguments):
    assert cli.main([*arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    return next(line for line in lines if line.startswith("error: "))
