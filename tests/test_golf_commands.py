"""`golf new`, `compare`, `board` and the command line as users call it."""
import json
import re
import shutil
import statistics

import conftest
import golf_helpers as gh
import pytest
from scipy.stats import ttest_ind

from golf import board, cli, compare, new, scripts
from golf.check import check_folder
from golf.logs import final, read_log

LOSSES = {1337: 2.5261, 42: 2.5275, 7: 2.5269}
WORSE = {1337: 2.5361, 42: 2.5379, 7: 2.5366}


@pytest.fixture
def logs(tmp_path):
    """Three published logs as files."""
    return write_logs(tmp_path / "logs", LOSSES)


def write_logs(folder, losses, **options):
    folder.mkdir()
    paths = []
    for seed, loss in losses.items():
        paths.append(folder / f"run{seed}.txt")
        paths[-1].write_text(gh.log_text(seed, loss, **options))
    return paths


def arguments(tmp_path, logs, track="10min_16mb", name="Fast-Thing", **options):
    values = {"author": "A. Person", "github-id": "person", "blurb": "Faster.", "date": "2026-04-01",
              "records": tmp_path / "records", **options}
    return ["new", track, name, "--logs", *map(str, logs), *(f"--{key}={value}" for key, value in values.items())]


# -- new ---------------------------------------------------------------------------------------------------------------

def test_new_makes_a_folder_that_checks_clean(tmp_path, logs, capsys):
    assert cli.main(arguments(tmp_path, logs)) == 0, capsys.readouterr()
    folder = tmp_path / "records/track_10min_16mb/2026-04-01_Fast-Thing"
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "submission.json", "train_gpt.py", "requirements.txt", *(f"train_seed{s}.log" for s in LOSSES)}
    assert [finding for finding in check_folder(folder) if finding.severity != "note"] == []
    assert (folder / "train_gpt.py").read_text() == gh.SCRIPT
    assert (folder / "train_seed42.log").read_bytes() == logs[1].read_bytes()
    values = json.loads((folder / "submission.json").read_text())
    scores = [gh.bpb(loss) for loss in LOSSES.values()]
    assert values["val_bpb"] == pytest.approx(statistics.fmean(scores), abs=1e-8)
    assert values["val_bpb_std"] == pytest.approx(statistics.stdev(scores), abs=1e-8)
    assert values["seeds"] == [7, 42, 1337] and values["track"] == "10min_16mb" and values["github_id"] == "person"
    assert values["seed_results"]["42"] == {
        "val_loss": 2.5275, "val_bpb": gh.bpb(2.5275), "artifact_bytes": 15_837_214 + len(gh.SCRIPT), "steps": 5962,
        "train_seconds": pytest.approx(598.209), "eval_seconds": pytest.approx(71.002)}
    assert values["hardware"] == "8 x NVIDIA H100 80GB HBM3" and values["bytes_code"] == len(gh.SCRIPT)


def test_new_readme_names_changed_settings_and_the_command(tmp_path):
    logs = write_logs(tmp_path / "logs", LOSSES, matrix_lr=0.031, ema_enabled=True)
    parent = tmp_path / "parent.py"
    parent.write_text(gh.SCRIPT.replace('"EMA_ENABLED", "1"', '"EMA_ENABLED", "0"').replace("vocab_size", "old_name"))
    assert cli.main(arguments(tmp_path, logs, parent=parent)) == 0
    text = (tmp_path / "records/track_10min_16mb/2026-04-01_Fast-Thing/README.md").read_text()
    for row in ("| matrix_lr | 0.02 | 0.031 |", "| ema_enabled | 0 | True |", "| vocab_size | (new) | 4096 |",
                "| old_name | 4096 | (gone) |"):
        assert row in text
    assert "for seed in 7 42 1337; do" in text
    assert "SEED=$seed MATRIX_LR=0.031 \\\n    torchrun --standalone --nproc_per_node=8 train_gpt.py" in text


def test_new_on_real_runs_of_our_script(tmp_path, tmp_path_factory):
    logs = gh.real_runs(tmp_path_factory.getbasetemp()).values()
    assert cli.main(arguments(tmp_path, logs, track="non-record_16mb", name="Tiny")) == 0
    record = tmp_path / "records/track_non_record_16mb/2026-04-01_Tiny"
    findings = check_folder(record, may_import=False)
    assert {finding.rule for finding in findings if finding.severity != "note"} == set()
    assert "| model_dim | 512 | 32 |" in (record / "README.md").read_text()


def test_new_never_overwrites_and_leaves_nothing_behind(tmp_path, logs, capsys):
    cli.main(arguments(tmp_path, logs))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert cli.main(arguments(tmp_path, logs, blurb="Other.")) == 2
    assert "exists and is kept" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["../evil", "with space", "a/b", ".hidden", "", "a/../../2026-04-01_evil"])
def test_new_writes_only_inside_its_folder(tmp_path, logs, capsys, name):
    assert cli.main(arguments(tmp_path, logs, name=name)) == 2
    assert "folder name" in capsys.readouterr().err and not (tmp_path / "records").exists()


def bad_logs(tmp_path, logs, kind):
    if kind == "scripts":
        logs[0].write_text(gh.log_text(1337, 2.5, script=gh.SCRIPT + "# other\n"))
    elif kind == "twice":
        shutil.copy(logs[0], tmp_path / "again.txt")
        return [*logs, tmp_path / "again.txt"]
    elif kind == "console":
        logs[0].write_text(logs[0].read_text()[logs[0].read_text().index("train_shards"):])
    else:
        logs[0].write_text(logs[0].read_text()[:logs[0].read_text().rindex("final_int6_roundtrip")])
    return logs


@pytest.mark.parametrize("kind, part", [("scripts", "different scripts"), ("twice", "more than once"),
                                        ("console", "holds no script"), ("unfinished", "no final score")])
def test_new_refuses_logs_that_do_not_belong_together(tmp_path, logs, capsys, kind, part):
    assert cli.main(arguments(tmp_path, bad_logs(tmp_path, logs, kind))) == 2
    assert part in capsys.readouterr().err and not (tmp_path / "records").exists()


def test_new_wants_author_and_id(tmp_path, logs):
    words = [word for word in arguments(tmp_path, logs) if not word.startswith("--author")]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2


def test_defaults_are_read_without_running_a_script():
    found = scripts.defaults(conftest.SCRIPT.read_text(encoding="utf-8"))
    fields = conftest.tg.Hyperparameters.__dataclass_fields__
    assert found == {name: str(item.default) for name, item in fields.items()}
    assert scripts.defaults(gh.SCRIPT) == {"vocab_size": "4096", "matrix_lr": "0.02", "ema_enabled": "1"}


# -- compare -----------------------------------------------------------------------------------------------------------

def test_compare_is_scipys_one_sided_welch_in_nats(tmp_path, logs):
    worse = write_logs(tmp_path / "worse", WORSE)
    a, b = ([read_log(path) for path in paths] for paths in (logs, worse))
    for margin in (0.005, 0.0, 0.02):
        result = compare.compare(a, b, margin, 0.01)
        shifted = [loss + margin for loss in LOSSES.values()]
        expected = ttest_ind(shifted, list(WORSE.values()), equal_var=False, alternative="less").pvalue
        assert result["p"] == pytest.approx(expected, rel=1e-9)
        assert result["beats"] == (expected < 0.01)
    mean, other = statistics.fmean(LOSSES.values()), statistics.fmean(WORSE.values())
    assert list(result["stages"]) == ["pre-quant", "quantised", "final"]
    assert result["stages"]["final"]["difference_nats"] == pytest.approx(mean - other)
    assert result["stages"]["pre-quant"]["a_nats"] == pytest.approx(mean + 0.016)


@pytest.mark.parametrize("losses", [LOSSES, WORSE])
def test_compare_judges_runs_with_other_tokens_by_bits_per_byte(tmp_path, logs, losses, capsys):
    """A tokenizer of longer pieces has more nats per token: that must not hide a gain, nor feign one."""
    same = write_logs(tmp_path / "same", losses)
    longer = write_logs(tmp_path / "longer", losses, datasets_dir="./data/datasets/fineweb10B_sp8192")
    for path in longer:
        text = re.sub(r"val_loss:([\d.]+)", lambda m: f"val_loss:{1.125 * float(m[1]):.8f}", path.read_text())
        path.write_text(text)
    base = write_logs(tmp_path / "base", {seed: loss + 0.005 for seed, loss in LOSSES.items()})
    results = []
    for paths in (same, longer):
        assert cli.main(["compare", "--json", "--force", ",".join(map(str, paths)), str(base[0].parent)]) == 0
        results.append(json.loads(capsys.readouterr().out))
    ours, theirs = results
    assert theirs["p"] == pytest.approx(ours["p"], rel=1e-4) and theirs["beats"] == ours["beats"]
    assert ours["same_tokens"] and not theirs["same_tokens"] and theirs["p_any_gain"] != ours["p"]
    for name, stage in theirs["stages"].items():
        assert stage["difference_nats"] is None
        assert stage["difference_bpb"] == pytest.approx(ours["stages"][name]["difference_bpb"], abs=1e-12)
    cli.main(["compare", "--force", ",".join(map(str, longer)), str(base[0].parent)])
    assert "bits per byte are compared" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["compare", "a", "b", "--margin", "nan"], ["compare", "a", "b", "--alpha", "2"],
                                   ["fit", "a", "--jobs", "0"], ["fit", "a", "--target-bytes", "-5"],
                                   ["preflight", "--ranks", "x"]])
def test_numbers_that_mean_nothing_are_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    said = capsys.readouterr().err
    assert end.value.code == 2 and words[-2] in said
    assert "must be from" in said or "invalid whole number value" in said


def test_an_interrupt_ends_in_one_line(monkeypatch, logs, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(compare, "compare", interrupt)
    assert cli.main(["compare", str(logs[0]), str(logs[1])]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_compare_counts_each_run_once(logs, tmp_path, capsys):
    shutil.copy(logs[0], tmp_path / "copy.txt")
    for twice in (f"{logs[0]},{logs[0]}", f"{logs[0].parent},{tmp_path / 'copy.txt'}"):
        assert cli.main(["compare", twice, str(logs[1])]) == 2
        assert "run run1337 is there twice, but counts once" in capsys.readouterr().err
    assert cli.main(["compare", "", str(logs[1])]) == 2 and "names no log" in capsys.readouterr().err
    gh.edit(logs[1], "run_id: run42", "run_id: run1337")  # two runs of one name, in two output folders
    assert cli.main(["compare", f"{logs[0]},{logs[1]}", str(logs[2])]) == 0


def test_compare_refuses_another_kind_of_score(logs, tmp_path, capsys):
    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join(line for line in logs[1].read_text().splitlines() if "sliding_window val" not in line))
    assert cli.main(["compare", str(logs[0]), str(plain)]) == 2
    assert "score: sliding against int6" in capsys.readouterr().err
    gh.edit(plain, "  vocab_size", "  sliding_window_enabled: 1\n  vocab_size")
    assert cli.main(["compare", str(logs[0]), str(plain)]) == 2
    assert "it ended before its sliding score" in capsys.readouterr().err


def test_compare_needs_two_runs_a_side(logs, capsys):
    assert cli.main(["compare", str(logs[0]), str(logs[1].parent), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["p"] is None and result["beats"] is False and len(result["b"]) == 3


@pytest.mark.parametrize("options, part", [
    ({"gpu": "NVIDIA H200"}, "machine: 8 x NVIDIA H100"), ({"world_size": 4}, "ranks: 8 against 4"),
    ({"max_wallclock_seconds": 300.0}, "budget: 600 s against 300 s"),
    ({"val_tokens": 9_660_000}, "validation tokens: 45508608 against 9660000"),
    ({"datasets_dir": "d/fineweb10B_sp8192"}, "data: fineweb10B_sp4096 against fineweb10B_sp8192"),
    ({"steps": 20_000}, "budget: 600 s against 20000 steps"),
])
def test_compare_refuses_unlike_runs_unless_forced(tmp_path, logs, capsys, options, part):
    write_logs(tmp_path / "other", WORSE, **options)
    words = ["compare", ",".join(map(str, logs)), str(tmp_path / "other")]
    assert cli.main(words) == 2
    assert part in capsys.readouterr().err
    assert cli.main([*words, "--force"]) == 0
    out = capsys.readouterr().out
    assert part in out and "beats by 0.005 nats at p < 0.01: " in out


# -- board -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def records(tmp_path):
    """Four folders of two tracks and two published rows."""
    base = tmp_path / "records"
    gh.build(base, name="2026-04-01_First")
    gh.build(base, name="2026-04-02_Better", results={seed: loss - 0.02 for seed, loss in LOSSES.items()})
    gh.build(base, name="2026-04-03_Same")
    gh.build(base, name="2026-04-01_Slow", track="non_record_16mb", results={1: 2.6})
    rows = [{"name": "A | B\u00b2", "val_bpb": 1.2, "date": "2026-03-01", "pull_request": 7, "track": "10min_16mb"},
            {"name": "Late", "val_bpb": 1.05, "date": "2026-05-01", "pull_request": None, "track": "10min_16mb"}]
    (base / "published.json").write_text(json.dumps({"source": "a list", "rows": rows}))
    (base / "README.md").write_text(f"Before\n{board.BEGIN}\nold\n{board.END}\nAfter\n")
    for folder in base.glob("*/*_*"):
        gh.edit_json(folder, date=folder.name[:10], name=folder.name[11:])
    return base


def test_board_is_sorted_marked_and_stable(records):
    words = ["board", f"--records={records}"]
    assert cli.main([*words, "--check"]) == 1 and "old" in (records / "README.md").read_text()
    assert cli.main(words) == 0
    text = (records / "README.md").read_text()
    assert text.startswith(f"Before\n{board.BEGIN}\n### 10min") and text.endswith(f"{board.END}\nAfter\n")
    assert text.isascii()
    rows = [line for line in text.split("\n") if line.startswith("| ") and "/README.md" in line]
    assert [row.split("[")[1].split("]")[0] for row in rows] == ["Better", "First", "Same", "Slow"]
    assert [row.split("|")[1].strip() for row in rows] == ["1", "2", "2", "1"]
    assert [row.split("|")[-2].strip() for row in rows] == ["record", "record", "non-record, tie", "non-record"]
    assert "| 1.2000 | A \\| B&#178; | 2026-03-01 | #7 |" in text and text.index("Late") < text.index("A \\| B")
    assert cli.main([*words, "--check"]) == 0 and cli.main(words) == 0
    assert (records / "README.md").read_text() == text


def test_board_needs_its_markers_and_readable_entries(records, capsys):
    (records / "track_10min_16mb/2026-04-03_Same/submission.json").write_text("{")
    assert cli.main(["board", f"--records={records}"]) == 2
    assert "no val_bpb" in capsys.readouterr().err
    shutil.rmtree(records / "track_10min_16mb/2026-04-03_Same")
    (records / "README.md").write_text("no markers")
    assert cli.main(["board", f"--records={records}"]) == 2
    assert "put them back" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"val_loss": "2.5"}, {"val_bpb": 10**400}, {"val_bpb": float("nan")},
                                    {"val_bpb_std": "small"}])
def test_board_refuses_scores_that_are_no_numbers(records, capsys, change):
    gh.edit_json(records / "track_10min_16mb/2026-04-03_Same", **change)
    assert cli.main(["board", f"--records={records}"]) == 2
    assert f"2026-04-03_Same/submission.json: no {next(iter(change))} as a number" in capsys.readouterr().err


def test_our_board_is_up_to_date():
    assert cli.main(["board", "--check"]) == 0


def test_our_records_are_valid():
    for path in sorted((gh.ROOT / "records").glob("track_*/*/submission.json")):
        errors = [finding for finding in check_folder(path.parent) if finding.severity == "error"]
        assert errors == [], path.parent.name


# -- command line ------------------------------------------------------------------------------------------------------

def test_each_command_once_as_a_program(tmp_path, logs):
    made = gh.golf(*arguments(tmp_path, logs), "--json", cwd=gh.ROOT)
    assert made.returncode == 0, made.stderr
    folder = json.loads(made.stdout)["folder"]
    checked = gh.golf("check", folder, "--json")
    assert checked.returncode == 0 and isinstance(json.loads(checked.stdout)[folder], list)
    compared = gh.golf("compare", folder, logs[0].parent)
    assert compared.returncode == 0 and "beats by 0.005 nats at p < 0.01: no" in compared.stdout
    gh.edit_json(new.Path(folder), val_bpb=1.0)
    broken = gh.golf("check", folder)
    assert broken.returncode == 1 and ": 1 violation (" in broken.stdout and "Traceback" not in broken.stderr
    listed = gh.golf("board", "--check", "--json")
    assert listed.returncode == 0 and json.loads(listed.stdout)["out_of_date"] is False
    for words in (["check", tmp_path / "nothing"], ["compare", logs[0], tmp_path / "records"], ["nonsense"]):
        failed = gh.golf(*words)
        assert failed.returncode == 2 and "error: " in failed.stderr and "Traceback" not in failed.stderr


def test_every_command_has_json_and_help():
    parser = cli.build_parser()
    commands = next(action for action in parser._actions if action.dest == "command").choices
    assert {"new", "check", "compare", "board"} <= set(commands)
    for name, command in commands.items():
        assert "--json" in command.format_help(), name


def test_the_final_score_of_a_published_log_is_what_new_reports(tmp_path, logs):
    rows = new.seed_table(new.read_runs(logs))
    assert f"{final(read_log(logs[0]))[1]:.8f}" in rows[-1]
