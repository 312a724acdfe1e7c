"""Whole experiments with a simulated trainer: every status, what is kept and restored, agents, slots, kills."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import golf_helpers as gh
import pytest
from research_helpers import (  # noqa: F401 - fixtures
    START,
    commit,
    edit,
    error_of,
    folder,
    git,
    research_kills,
    run_json,
    session,
)

from golf import trial
from research import cli
from research.loop import Loop
from research.repo import remove_tree
from research.store import COLUMNS, append_line, read_rows, whole_lines

# ruff: noqa: F811 - fixtures are parameters too
ROOT = Path(__file__).resolve().parent.parent
AGENT = f"{sys.executable} {ROOT / 'tests/research_agent.py'}"


def assert_in_order(folder, status_lines=("?? user.txt",)):
    assert tuple(git(folder, "status", "--porcelain").splitlines()) == status_lines
    assert (folder / "user.txt").read_text() == research_kills.USER_FILES["user.txt"]
    assert research_kills.problems(folder, whole_lines(folder / "results.tsv")) == []


# -- start -------------------------------------------------------------------------------------------------------------

def test_start_makes_branch_baseline_and_table(session):
    lines = whole_lines(session / "results.tsv")
    assert lines[0].split("\t") == list(COLUMNS) and tuple(COLUMNS)[:5] == ("commit", "val_bpb", "memory_gb", "status",
                                                                     "description")
    (row,) = read_rows(session)
    assert (row.status, row.description, row.seeds) == ("keep", "baseline", "1337,1338")
    assert (row.steps, row.memory_gb) == (10, 2.0)
    assert "torch" in row.hardware and row.bytes == 15_000_000 and re.search(r"noise 0\.0\d+", row.reason)
    assert git(session, "symbolic-ref", "--short", "HEAD") == "research/night"
    assert not (session / ".gitignore").exists()
    assert_in_order(session)


def test_start_refuses(folder, capsys):
    assert "tag 'a b'" in error_of(capsys, "start", "a b")
    assert "--script no.py: no such path" in error_of(capsys, "start", "x", "--script", "no.py")
    assert "--link /tmp: no such path below" in error_of(capsys, "start", "x", "--link", "/tmp")
    assert "'nope' cannot be started" in error_of(capsys, "start", "x", "--command", "nope nope")
    assert not (folder / ".research/state.json").exists()  # else no later start could mend it
    assert "0 < budget <= limit" in error_of(capsys, "start", "x", "--budget", "9", "--limit", "3")
    (folder / "helper.py").write_text("CHANGED = 1\n")
    assert "the tree is not clean (helper.py)" in error_of(capsys, *START)
    git(folder, "checkout", "helper.py")
    assert "no research session" in error_of(capsys, "run", "-d", "x")
    assert cli.main([*START]) == 0
    assert "a session is under way" in error_of(capsys, "start", "other")


def test_start_takes_the_script_as_git_names_it(folder, capsys):
    assert cli.main([*START, "--script", "./train_gpt.py"]) == 0
    edit(folder, LEVEL=0.9)
    assert cli.main(["run", "-d", "better"]) == 0
    assert_in_order(folder)


def test_start_refuses_a_script_that_git_holds_otherwise(folder, capsys):
    assert "--script ../x: no such path below" in error_of(capsys, *START, "--script", "../x")
    (folder / "link.py").symlink_to("train_gpt.py")
    assert "--script link.py is a link" in error_of(capsys, *START, "--script", "link.py")
    git(folder, "config", "core.autocrlf", "true")
    (folder / "train_gpt.py").unlink()
    git(folder, "checkout", "train_gpt.py")
    assert "its line ends are changed at checkout; unset" in error_of(capsys, *START)
    git(folder, "config", "core.autocrlf", "false")
    (folder / "train_gpt.py").unlink()
    git(folder, "checkout", "train_gpt.py")
    assert cli.main([*START]) == 0


def test_a_start_that_failed_stands_in_no_ones_way(folder, capsys):
    git(folder, "branch", "research")
    assert "research/night" in error_of(capsys, *START)
    assert not (folder / ".research/state.json").exists()
    git(folder, "branch", "-D", "research")
    edit(folder, BEHAVIOUR="crash")
    commit(folder)
    assert "ends with crash" in error_of(capsys, *START)
    edit(folder, BEHAVIOUR="fine")
    commit(folder)
    assert cli.main(["start", "other", *START[2:]]) == 0
    assert Loop(folder).repo.tip() == git(folder, "rev-parse", "HEAD")


def test_start_with_a_script_that_fails_says_why(folder, capsys):
    edit(folder, BEHAVIOUR="crash")
    commit(folder)
    assert cli.main([*START]) == 2
    assert "ends with crash" in (said := capsys.readouterr().err) and "the candidate is broken" in said


def test_a_start_that_was_killed_starts_again(session):
    (session / "results.tsv").unlink()
    for name in ("index", "HEAD", "refs/heads/research/night"):
        (session / f".git/{name}.lock").touch()
    assert cli.main([*START]) == 0
    assert_in_order(session)


def test_start_in_a_repository_without_history_or_identity(folder, monkeypatch, tmp_path):
    research_kills.shutil.rmtree(folder / ".git")
    for name, value in {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
                        "EMAIL": ""}.items():
        monkeypatch.setenv(name, value)
    git(folder, "init", "-q")
    git(folder, "config", "user.useConfigOnly", "true")
    assert cli.main([*START]) == 0
    edit(folder, LEVEL=0.9)
    assert cli.main(["run", "-d", "better"]) == 0
    assert git(folder, "rev-list", "--count", "HEAD") == "2"
    bundle = folder.parent / "research.bundle"  # and everything can be brought home
    git(folder, "bundle", "create", str(bundle), "--glob=refs/research/*", "refs/heads/research/night")
    home = folder.parent / "home"
    home.mkdir()
    git(home, "init", "-q")
    git(home, "fetch", "-q", str(bundle), "refs/*:refs/night/*")
    assert git(home, "for-each-ref", "--format=%(refname)").splitlines() == [
        "refs/night/heads/research/night", "refs/night/research/night/0000", "refs/night/research/night/0001"]


# -- run: every status -------------------------------------------------------------------------------------------------

def test_a_true_gain_is_kept(session, capsys):
    edit(session, LEVEL=0.98)
    status, row = run_json(capsys, "run", "-d", "level\t1.0 -> 0.98")
    assert (status, row["status"], row["description"]) == (0, "keep", "level 1.0 -> 0.98")
    assert row["gain"] == pytest.approx(0.02, abs=0.006) and row["seeds"].count(",") >= 1
    assert git(session, "rev-parse", "HEAD").startswith(row["commit"])
    assert_in_order(session)


CASES = {"discard": {"LEVEL": 1.1}, "crash": {"BEHAVIOUR": "crash"}, "nan": {"BEHAVIOUR": "nan"},
         "oversize": {"BEHAVIOUR": "oversize"}, "invalid": {"BEHAVIOUR": "slow"}, "timeout": {"BEHAVIOUR": "hang"}}


@pytest.mark.parametrize("expected", CASES)
def test_everything_else_goes_back(session, capsys, expected):
    before = (session / "train_gpt.py").read_bytes()
    edit(session, **CASES[expected])
    tried = (session / "train_gpt.py").read_bytes()
    status, row = run_json(capsys, "run", "-d", expected)
    assert row["status"] == expected and status == (0 if expected == "discard" else 1) and row["reason"]
    assert (session / "train_gpt.py").read_bytes() == before
    loop = Loop(session)
    assert loop.repo.source(loop.repo.tried()[1]) == tried
    assert not list((session / ".research/runs").glob("**/weights.bin"))
    assert_in_order(session)
    if expected == "crash":
        assert "the candidate is broken" in loop.tail(row["commit"])


def test_debris_of_a_candidate_stays_out_of_the_tree(session):
    edit(session, BEHAVIOUR="debris", LEVEL=1.1)
    cli.main(["run", "-d", "debris"])
    assert not list(session.glob("junk.py"))
    assert_in_order(session)


def misbehave(folder, code):
    """Lets every run of the script do this too."""
    script = folder / "train_gpt.py"
    script.write_text(script.read_text().replace("def misbehave():\n", f"def misbehave():\n    {code}\n"))


@pytest.mark.parametrize("flakes, expected", [(1, "keep"), (2, "crash")])
def test_a_candidate_that_ran_well_may_fail_once(session, capsys, flakes, expected):
    """One fault of the machine is not its own."""
    count = session.parent / "count"
    edit(session, LEVEL=0.9)
    misbehave(session, f"count = Path({str(count)!r}); n = len(count.read_text()) if count.exists() else 0; "
                       f"count.write_text('x' * (n + 1)); assert not 0 < n <= {flakes}, 'unspecified launch failure'")
    assert run_json(capsys, "run", "-d", "gain of 0.1")[1]["status"] == expected


@pytest.mark.parametrize("where, status", [("", "discard"), ("..", "crash")])
def test_a_run_that_deletes_its_output_folder_or_even_its_log(session, capsys, where, status):
    edit(session, LEVEL=1.1)
    misbehave(session, f"import shutil; shutil.rmtree(os.environ['OUTPUT_DIR'] + '/{where}'); time.sleep(0.3)")
    assert run_json(capsys, "run", "-d", "cleans up")[1]["status"] == status
    assert_in_order(session)


def test_read_only_folders_of_a_run_go_with_its_worktree(tmp_path):
    """Without the rights of root, which no mode stops; what a link in the worktree points to keeps its mode."""
    (tmp_path / "data").mkdir(mode=0o555)
    pid = os.fork()
    if pid == 0:
        os.chdir(tmp_path)
        if os.geteuid() == 0:
            os.chown(".", 65534, 65534)
            os.setuid(65534)
        Path("tree/cache/inner").mkdir(parents=True)
        Path("tree/cache/inner/f").touch()
        Path("tree/data").symlink_to("../data")
        for path in ("tree/cache/inner", "tree/cache", "tree"):
            Path(path).chmod(0o555 if path != "tree/cache" else 0)
        remove_tree(Path("tree"))
        os._exit(Path("tree").exists())
    assert os.waitpid(pid, 0)[1] == 0 and (tmp_path / "data").stat().st_mode & 0o777 == 0o555


def test_a_script_too_deep_to_be_checked_does_not_end_the_loop(session, capsys):
    script = session / "train_gpt.py"
    script.write_text(script.read_text() + "TABLE = " + "+".join(["1"] * 3000) + "\n")
    _, row = run_json(capsys, "run", "-d", "deep")
    assert row["status"] == "crash" and row["reason"].startswith("no Python that can be checked")


def test_what_an_interrupted_run_left_is_gone_before_its_seed_runs_again(session):
    left = session / ".research/runs/0123456789/1339/output/weights.bin"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    edit(session, LEVEL=1.1)
    assert cli.main(["run", "-d", "worse"]) == 0
    assert read_rows(session)[-1].seeds == "1339" and not left.exists()


def test_equal_and_simpler_is_kept(session, capsys):
    edit(session, NOISE=1e-7, LEVEL=0.95)
    assert run_json(capsys, "run", "-d", "quiet and better")[1]["status"] == "keep"
    script = session / "train_gpt.py"
    source = script.read_text()
    for old, new in (("it prints what train_gpt.py prints, with a score", "with a score"), ("0.02", ".02"),
                     ("the candidate is broken", "broken"), ("sleep(SLEEP)", "sleep( SLEEP )")):
        script.write_text(source.replace(old, new))
        assert run_json(capsys, "run", "-d", "no simpler")[1]["status"] == "discard"
    assert script.read_text() == source
    script.write_text(source.replace("stderr=subprocess.DEVNULL)", ")"))
    _, row = run_json(capsys, "run", "-d", "one argument less")
    assert row["status"] == "keep" and row["reason"].startswith("equal within noise and simpler by 5 nodes of syntax")
    assert "stderr=" not in script.read_text()
    assert_in_order(session)


def test_a_candidate_that_chooses_its_seed_is_invalid(session, capsys):
    """Equal runs would count as runs without noise, and one lucky seed as a gain."""
    before = (session / "train_gpt.py").read_bytes()
    edit(session, NOISE=0.0, LEVEL=0.95)
    status, row = run_json(capsys, "run", "-d", "one seed for all")
    assert (status, row["status"]) == (1, "invalid") and "runs are equal whatever the seed" in row["reason"]
    assert (session / "train_gpt.py").read_bytes() == before
    assert_in_order(session)


def test_changes_of_metric_code_and_data_are_invalid(session, capsys, monkeypatch):
    script = session / "train_gpt.py"
    script.write_text(script.read_text().replace("return LEVEL", "return 0.5 * LEVEL"))
    status, row = run_json(capsys, "run", "-d", "half the score")
    assert (status, row["status"], row["reason"]) == (1, "invalid", "changes the metric: val_bpb")
    edit(session, LEVEL=0.9)
    (session / "helper.py").write_text("CHANGED = 1\n")
    _, row = run_json(capsys, "run", "-d", "other code")
    assert row["status"] == "invalid" and "helper.py" in row["reason"]
    assert (session / "helper.py").read_text() == "CHANGED = 1\n"  # whoever changed it undoes it


def test_changed_data_costs_no_proposal(folder, capsys):
    shards = folder / "data/datasets/a"
    shards.mkdir(parents=True)
    (shards / "fineweb_val_0.bin").write_text("tokens")
    assert cli.main([*START]) == 0
    (folder / "data/datasets/b").mkdir()
    (folder / "data/datasets/b/fineweb_val_0.bin").write_text("another data set")
    (folder / "data/other.model").write_text("and its tokenizer")
    assert cli.main(["auto", "--agent", f"{AGENT} gain=0.1", "--iterations", "1"]) == 0
    (shards / "fineweb_val_1.bin").write_text("more")
    for command in (("auto", "--agent", f"{AGENT} gain=0.1"), ("auto", "--agent", f"{AGENT} gain=0.2")):
        assert "data or tokenizer changed: data/datasets/a/fineweb_val_1.bin; restore it" in error_of(capsys, *command)
    assert [row.status for row in read_rows(folder)] == ["keep", "keep"]


def test_a_candidate_that_changes_the_data_is_invalid(folder, capsys):
    (folder / "data").mkdir()
    (folder / "data/fineweb_val_0.bin").write_text("tokens")
    assert cli.main([*START]) == 0
    capsys.readouterr()
    misbehave(folder, "Path('data/fineweb_val_0.bin').write_text('easier')")
    assert run_json(capsys, "run", "-d", "other data")[1]["status"] == "invalid"


def test_a_broken_machine_ends_the_loop_and_one_good_run_lets_it_go_on(folder, capsys):
    broken = folder.parent / "broken"
    misbehave(folder, f"assert not Path({str(broken)!r}).exists(), 'no memory'")
    commit(folder)
    assert cli.main([*START]) == 0
    assert cli.main(["auto", "--agent", f"{AGENT} behaviour=crash", "--iterations", "4"]) == 0
    broken.touch()
    said = error_of(capsys, "auto", "--agent", f"{AGENT} gain=0.1")
    assert "the kept script now fails too (exit status 1: AssertionError: no memory); look at machine" in said
    assert [row.status for row in read_rows(folder)][5:] == ["crash"] * 3


def test_a_gpu_is_no_path(session, capsys):
    edit(session, LEVEL=1.1)
    assert "GPU '..' must be letters" in error_of(capsys, "run", "-d", "x", "--gpu", "..")
    assert "GPU '.' must be letters" in error_of(capsys, "auto", "--agent", "true", "--gpus", "0,.")
    assert len(read_rows(session)) == 1


def test_run_refuses_what_was_tried_or_not_changed(session, capsys):
    assert "is as it was kept last" in error_of(capsys, "run", "-d", "nothing")
    edit(session, LEVEL=1.1)
    cli.main(["run", "-d", "worse"])
    edit(session, LEVEL=1.1)
    assert "was tried as " in error_of(capsys, "run", "-d", "again")


def test_settings_in_the_environment_stay_those_of_start(folder, capsys, monkeypatch):
    script = folder / "train_gpt.py"
    text = script.read_text().replace("LEVEL = 1.0\n", 'LEVEL = float(os.environ.get("WIDTH_LEVEL", "1.0"))\n')
    script.write_text(text + "\n\nclass Hyperparameters:\n    matrix_lr: float = 0.02\n")
    commit(folder)
    monkeypatch.setenv("MATRIX_LR", "0.1")
    assert cli.main([*START]) == 0
    edit(folder, MATRIX_LR=0.03)
    monkeypatch.setenv("WIDTH_LEVEL", "0.8")
    assert "is not that of `start`: WIDTH_LEVEL; set what" in error_of(capsys, "run", "-d", "other level")
    monkeypatch.delenv("WIDTH_LEVEL")
    monkeypatch.delenv("MATRIX_LR")
    assert "is not that of `start`: MATRIX_LR; set what" in error_of(capsys, "auto", "--agent", "false")
    monkeypatch.setenv("MATRIX_LR", "0.1")
    monkeypatch.setenv("HOME_PAGE", "no setting")
    assert cli.main(["run", "-d", "as at the start"]) == 0


def test_an_open_commit_of_the_user_holds_only_what_writes_to_the_tree(session):
    """Its lock holds the index as long as the editor is open."""
    lock = session / ".git/index.lock"
    lock.touch()
    assert cli.main(["auto", "--agent", f"{AGENT} gain=-0.1", "--iterations", "2"]) == 0
    Timer(2.0, lock.unlink).start()
    assert cli.main(["auto", "--agent", f"{AGENT} gain=0.1", "--iterations", "1"]) == 0
    assert [row.status for row in read_rows(session)] == ["keep", "discard", "discard", "keep"] and not lock.exists()
    assert_in_order(session)


def test_the_repository_of_a_git_around_the_loop_is_not_used(session, monkeypatch):
    """As with an alias in a linked worktree, which exports GIT_DIR, or in a hook."""
    tip = git(session, "rev-parse", "research/night")
    edit(session, LEVEL=1.1)
    monkeypatch.setenv("GIT_DIR", str(session / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(session / ".git/other"))
    assert cli.main(["run", "-d", "worse"]) == 0
    assert git(session, "rev-parse", "research/night") == tip
    assert_in_order(session)


def test_edits_made_during_a_run_stay(session, monkeypatch):
    edit(session, LEVEL=1.1)
    original = Loop.measure

    def measure(self, *arguments):
        edit(session, LEVEL=1.2)
        return original(self, *arguments)
    monkeypatch.setattr(Loop, "measure", measure)
    assert cli.main(["run", "-d", "worse"]) == 0
    assert "LEVEL = 1.2" in (session / "train_gpt.py").read_text()
    assert git(session, "status", "--porcelain", "--untracked-files=no") == "M train_gpt.py"


def test_other_hardware_gets_its_own_baseline(session, capsys, monkeypatch):
    monkeypatch.setattr("research.guard.hardware", lambda gpu: "2 x Other")
    edit(session, LEVEL=1.1)
    assert cli.main(["run", "-d", "elsewhere"]) == 0
    rows = read_rows(session)
    assert [(row.description, row.hardware == "2 x Other") for row in rows] == [
        ("baseline", False), ("baseline", True), ("elsewhere", True)]


def test_data_folder_is_linked_into_the_runs(folder, capsys):
    (folder / "data/datasets").mkdir(parents=True)
    (folder / "data/datasets/fineweb_val_0.bin").write_bytes(b"tokens")
    script = folder / "train_gpt.py"
    reading = "    misbehave()\n    Path('data/datasets/fineweb_val_0.bin').read_bytes()\n"
    script.write_text(script.read_text().replace("    misbehave()\n", reading))
    commit(folder)
    assert cli.main([*START]) == 0
    state = json.loads((folder / ".research/state.json").read_text())
    assert state["links"] == ["data"] and list(state["data"]) == ["data/datasets/fineweb_val_0.bin"]


# -- loops -------------------------------------------------------------------------------------------------------------

def test_one_loop_per_folder_and_two_side_by_side(session, capsys, monkeypatch):
    with research_kills.locked(session):
        assert "another loop works in" in error_of(capsys, "run", "-d", "x")
    git(session, "worktree", "add", "-q", "../second", "HEAD")
    second = session.parent / "second"
    loops = []
    for place, tag in ((session, None), (second, "other")):
        if tag:
            monkeypatch.chdir(place)
            assert cli.main(["start", tag, *START[2:]]) == 0
        auto = research_kills.command("auto", "--agent", f"{AGENT} gain=0.02", "--iterations", "3")
        loops.append(subprocess.Popen(auto, cwd=place, env=research_kills.environment(), stdout=subprocess.DEVNULL))
    assert [loop.wait(60) for loop in loops] == [0, 0]
    for place in (session, second):
        assert len(read_rows(place)) == 4
        assert git(place, "status", "--porcelain", "--untracked-files=no") == ""
    assert_in_order(session)


def test_agent_gets_protocol_history_and_failures(session, capsys):
    assert cli.main(["auto", "--agent", f"{AGENT} behaviour=crash", "--iterations", "1"]) == 0
    assert cli.main(["auto", "--agent", f"{AGENT} metric", "--iterations", "1"]) == 0
    assert cli.main(["auto", "--agent", f"{AGENT} other gain=0.02", "--iterations", "1"]) == 0
    assert [(row.status, row.description) for row in read_rows(session)][1:] == [
        ("crash", "behaviour crash"), ("invalid", "metric"), ("invalid", "other gain 0.02")]
    prompts = [path.read_text() for path in sorted((session / ".research/runs/agent").glob("*/prompt.md"))]
    assert "The protocol" in prompts[0] and "RuntimeError: the candidate is broken" in prompts[1]
    assert "behaviour crash" in prompts[2] and "changes the metric: val_bpb" in prompts[2]
    assert_in_order(session)


def test_any_command_is_an_agent(session):
    assert cli.main(["auto", "--agent", "sed -i 's/^LEVEL = 1.0/LEVEL = 0.9/' train_gpt.py", "--iterations", "1"]) == 0
    row = read_rows(session)[-1]
    assert (row.status, row.description) == ("keep", "LEVEL = 0.9")


def test_an_agents_last_line_may_hold_anything(session):
    agent = "sh -c 'echo \"# x\" >> train_gpt.py; printf \"lr\\000 up\\033[0m\\n\"'"
    assert cli.main(["auto", "--agent", agent, "--iterations", "1"]) == 0
    assert read_rows(session)[-1].description == "lr up [0m"


def test_agent_that_fails_or_repeats_itself_ends_the_loop(session, capsys):
    assert "5 calls in a row brought no proposal" in error_of(capsys, "auto", "--agent", "false")
    assert "the agent's script is that of " in error_of(capsys, "auto", "--agent", f"{AGENT} same")
    assert len(read_rows(session)) == 1


@pytest.mark.parametrize("limit", [("--target", "0.97"), ("--plateau", "2"), ("--iterations", "2")])
def test_limits(session, limit, capsys):
    edits = "gain=0.05" if limit[0] == "--target" else "gain=-0.05"
    assert cli.main(["auto", "--agent", f"{AGENT} {edits}", *limit]) == 0
    assert len(read_rows(session)) - 1 == (1 if limit[0] == "--target" else 2)


def test_several_slots_keep_one_history(session, capsys):
    assert cli.main(["auto", "--agent", f"{AGENT} gain=0.03", "--gpus", "0,1", "--iterations", "5"]) == 0
    rows = read_rows(session)
    assert sum(row.status == "keep" for row in rows) >= 4 and len(rows) >= 6
    assert {path.name for path in (session / ".research/work").iterdir()} == {"0", "1"}
    assert_in_order(session)


def test_a_gain_over_a_commit_that_is_no_longer_the_tip_is_tried_again_on_it(session):
    loop = Loop(session)
    base = loop.repo.tip()
    source = loop.repo.source(base)
    better = [source.replace(b"LEVEL = 1.0\n", b"LEVEL = 0.95\n"), source.replace(b"_LR = 0.02", b"_LR = 0.03"),
              source.replace(b"LEVEL = 1.0\n", b"LEVEL = 0.94\n")]
    rows = [loop.experiment(None, base, text, f"idea {i}") for i, text in enumerate(better)]
    assert [(row.status, row.description) for row in rows] == [
        ("keep", "idea 0"), ("keep", "idea 1 (on a newer keep)"), ("discard", "idea 2")]
    assert rows[2].reason.startswith("conflicts with a newer keep: gain +0.0")
    assert "LEVEL = 0.95\n" in (text := (session / "train_gpt.py").read_text()) and "MATRIX_LR = 0.03" in text
    assert [row.reason.split(":")[0] for row in loop.rows()][2] == "tried again on a newer keep"
    assert_in_order(session)


def test_a_commit_by_hand_during_a_run_gets_its_baseline_and_the_gain_is_tried_on_it(session, monkeypatch):
    original = Loop.measure

    def measure(self, *arguments):
        if not (session / "notes.md").exists():
            (session / "notes.md").write_text("by hand")
            git(session, "add", "notes.md")
            commit(session)
        return original(self, *arguments)
    monkeypatch.setattr(Loop, "measure", measure)
    agent = "sed -i 's/^LEVEL = 1.0/LEVEL = 0.9/' train_gpt.py"
    assert cli.main(["auto", "--agent", agent, "--iterations", "1"]) == 0
    assert [(row.status, row.description) for row in read_rows(session)] == [
        ("keep", "baseline"), ("keep", "baseline"), ("discard", "LEVEL = 0.9"),
        ("keep", "LEVEL = 0.9 (on a newer keep)")]
    assert "LEVEL = 0.9" in (session / "train_gpt.py").read_text()


def test_a_commit_by_hand_between_proposals_gets_its_baseline(session, tmp_path):
    (tmp_path / "agent.sh").write_text(f"cd {session}; test -e n.md || (touch n.md; git add n.md; git commit -qm n)\n"
                                       "cd $OLDPWD; sed -i 's/^LEVEL = 1.0/LEVEL = 1.1/' train_gpt.py\n"
                                       "echo \"# $$\" >> train_gpt.py\n")
    git(session, "config", "user.name", "t")
    git(session, "config", "user.email", "t@localhost")
    assert cli.main(["auto", "--agent", f"sh {tmp_path}/agent.sh", "--iterations", "2"]) == 0
    assert [row.description == "baseline" for row in read_rows(session)] == [True, False, True, False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_cleanly(session, number):
    edit(session, SLEEP=30.0)
    process = subprocess.Popen(research_kills.command("run", "-d", "long"), cwd=session, text=True,
                               env=research_kills.environment(), stderr=subprocess.PIPE)
    wait_until(lambda: trial.marked(session / ".research"))
    process.send_signal(number)
    assert process.wait(20) == 130 and "interrupted" in process.stderr.read()
    assert read_rows(session)[-1].reason == "interrupted"
    assert_in_order(session)
    edit(session, SLEEP=30.0)
    assert Loop(session).same_script((session / "train_gpt.py").read_bytes()) is None  # so it may be tried again


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_ten_kills():
    result = research_kills.campaign(kills=10, seed=7)
    assert result["problems"] == [] and result["experiments"] > 0


def test_a_worktree_whose_making_was_killed_is_made_again(session):
    research_kills.shutil.rmtree(session / ".research/work/0")
    (session / ".git/worktrees/0/locked").write_text("initializing")
    (session / ".git/worktrees/0/index.lock").touch()
    edit(session, LEVEL=1.1)
    assert cli.main(["run", "-d", "worse"]) == 0
    assert_in_order(session)
    for level, break_it in ((1.2, lambda path: path.write_text("")), (1.3, Path.unlink)):
        (session / ".git/worktrees/0/locked").write_text("initializing")
        break_it(session / ".git/worktrees/0/commondir")
        edit(session, LEVEL=level)
        assert cli.main(["run", "-d", "worse"]) == 0
        assert_in_order(session)


@pytest.mark.parametrize("head", ["0" * 40 + "\n", ""])
def test_a_worktree_that_points_at_nothing_is_forgotten(session, head):
    """So it is until git has checked the commit out. The entry of a worktree of the user's own stays."""
    git(session, "worktree", "add", "--quiet", "--detach", str(session.with_name("own")), "HEAD")
    (session / ".git/worktrees/0/HEAD").write_text(head)
    (session / ".git/worktrees/0/locked").write_text("initializing")
    Loop(session).repo.forget_half_made_worktrees()
    assert not (session / ".git/worktrees/0").exists() and (session / ".git/worktrees/own").exists()
    git(session, "fsck", "--connectivity-only")
    edit(session, LEVEL=1.1)
    assert cli.main(["run", "-d", "worse"]) == 0
    assert_in_order(session)


def test_a_worktree_without_git_never_reaches_the_users_repository(session):
    (session / ".research/work/0/.git").write_text("gitdir: /nowhere\n")
    edit(session, LEVEL=1.1)
    assert cli.main(["run", "-d", "worse"]) == 0
    assert_in_order(session)


def test_a_torn_last_line_is_not_a_row(session):
    with (session / "results.tsv").open("a") as f:
        f.write("abc1234\t0.9")
    assert len(read_rows(session)) == 1
    append_line(session / "results.tsv", "\t".join(["abc1234", "0.900000", "1.0", "discard", "classic row"]))
    assert [row.description for row in read_rows(session)] == ["baseline", "classic row"]


def test_a_last_line_without_its_end_is_a_row_when_it_is_whole(session):
    for name in ("results.tsv", ".research/runs.jsonl"):  # as editors leave it
        path = session / name
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert len(read_rows(session)) == 1 and len(Loop(session).records) == 2
    edit(session, LEVEL=1.1)
    assert cli.main(["run", "-d", "worse"]) == 0
    assert [row.description for row in read_rows(session)] == ["baseline", "worse"] and len(Loop(session).records) == 3
    assert_in_order(session)


def test_rows_may_be_edited(session):
    path = session / "results.tsv"
    path.write_text(path.read_text().replace("baseline, 2 runs", "equal"))
    edit(session, LEVEL=0.9)
    assert cli.main(["run", "-d", "better"]) == 0 and read_rows(session)[-1].status == "keep"


@pytest.mark.parametrize("name, text", [("state.json", ""), ("state.json", '{"tag": "n"}'), ("state.json", "[]"),
                                        ("runs.jsonl", "garbage\n"), ("runs.jsonl", '{"a": 1}\n')])
def test_a_damaged_file_is_named_in_one_line(session, capsys, name, text):
    (session / ".research" / name).write_text(text)
    assert f".research/{name}" in error_of(capsys, "history")


# -- history, report, promote ------------------------------------------------------------------------------------------

def write_rows(folder, count):
    rows = ["\t".join([f"{i:010x}", f"{1 - i / 1e5:.6f}", "1.0", "discard" if i % 5 else "keep", f"idea {i}", "300.0",
                       "100", "15000000", "machine", "1337", "+0.000100", f"reason {i}"]) for i in range(count)]
    if count > 2:
        rows[2] = "\t".join(["0000000002", "0.000000", "0.0", "crash", "broken"])
    (folder / "results.tsv").write_text("\n".join(["\t".join(COLUMNS), *rows]) + "\n")


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_report_and_history_of_any_length(session, capsys, count):
    write_rows(session, count)
    status, report = run_json(capsys, "report")
    assert status == 0 and report["experiments"] == count
    assert (session / "progress.png").exists() == (count > 0)
    status, rows = run_json(capsys, "history")
    assert len(rows) == count
    if count == 1000:
        assert report["counts"]["keep"] == 200 and report["counts"]["crash"] == 1 and report["keep_rate"] == 200 / 999
        assert report["best_bpb"] == pytest.approx(1 - 995 / 1e5) and report["since_last_keep"] == 4
        assert len(report["top"]) == 10 and len(run_json(capsys, "history", "--last", "3")[1]) == 3
    assert cli.main(["report"]) == 0 and cli.main(["history"]) == 0


def test_report_measures_the_gain_again(session, capsys):
    edit(session, LEVEL=0.9)
    cli.main(["run", "-d", "better"])
    capsys.readouterr()
    _, report = run_json(capsys, "report")
    assert report["gain_by_all_runs"] == pytest.approx(0.1, abs=0.01) and 0 < report["noise_bpb"] < 0.02


def test_report_counts_every_run_and_names_what_is_on_the_branch(session, capsys, monkeypatch):
    for level in (0.9, 0.8):
        edit(session, LEVEL=level)
        cli.main(["run", "-d", f"level {level}"])
    capsys.readouterr()
    _, report = run_json(capsys, "report")
    assert report["seconds_of_training"] == len(Loop(session).records) > 6
    git(session, "tag", "research/night", "HEAD~2")  # a tag of the same name is not the branch
    git(session, "reset", "-q", "--hard", "HEAD~1")
    _, report = run_json(capsys, "report")
    assert git(session, "rev-parse", "HEAD").startswith(report["best_commit"])
    assert report["best_bpb"] == pytest.approx(0.91, abs=0.01)
    assert cli.main(["auto", "--agent", f"{AGENT} gain=-0.1", "--target", "0.85", "--iterations", "1"]) == 0
    assert read_rows(session)[-1].status == "discard"
    monkeypatch.setattr("research.guard.hardware", lambda gpu: "2 x Other")
    edit(session, LEVEL=0.7)
    cli.main(["run", "-d", "elsewhere"])
    capsys.readouterr()
    _, report = run_json(capsys, "report")
    assert report["baseline_bpb"] == pytest.approx(0.91, abs=0.01)


def test_plateau_counts_this_calls_experiments(session):
    for count in (2, 4):
        assert cli.main(["auto", "--agent", f"{AGENT} gain=-0.05", "--plateau", "2"]) == 0
        assert len(read_rows(session)) == count + 1


def test_promote_makes_a_checked_record_folder(session, capsys, tmp_path):
    script = (session / "train_gpt.py").read_text()
    for seed, loss in ((1337, 2.5261), (1338, 2.5275)):
        (logs,) = session.glob(f".research/runs/*/{seed}")
        logs = logs / "output/logs"
        logs.mkdir()
        (logs / "run.txt").write_text(gh.log_text(seed, loss, script))
    options = ("non_record", "Found", "--author", "A", "--github-id", "a", "--blurb", "Found by the loop.")
    cli.main(["promote", *options, "--seeds", "2", "--records", str(tmp_path / "records")])
    (folder,) = (tmp_path / "records").glob("track_*/*_Found")
    assert (folder / "train_gpt.py").read_text() == script and "made " in capsys.readouterr().out
    assert "and wrote no OUTPUT_DIR/logs" in error_of(capsys, "promote", *options)
