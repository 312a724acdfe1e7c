"""`golf plot` and `golf report`: pictures of runs, and a page that needs nothing else."""
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from matplotlib.figure import Figure
from PIL import Image

from golf import plots
from golf.cli import main
from golf.logs import read_log

RULE = "=" * 100
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def golf(*arguments):
    return subprocess.run([sys.executable, "-m", "golf", *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True, check=False, timeout=120)


def write_log(folder, seed: int, records: bool = True):
    """A run of 40 steps whose losses, rates and sizes follow from the seed."""
    lines = [RULE, "Hyperparameters:", f"  seed: {seed}", "  muon_wd: 0.085", "  train_batch_tokens: 1000", RULE,
             "print('<b>source</b>')", RULE, "Running Python 3.11", "Running PyTorch 2.11", RULE,
             "0/40 val_loss: 8.3000 val_bpb: 3.6000"]
    lines += [f"{n}/40 train_loss: {8 - n / 10 + seed / 1000:.4f} train_time: {n / 60:.1f}m tok/s: {1000 + n}"
              for n in range(1, 41)]
    lines += ["40/40 val_loss: 4.1000 val_bpb: 1.8000", "WARNING: <script>alert(1)</script>",
              "Serialized model int6+brotli: 15000000 bytes", "Code size: 60000 bytes",
              "final_int6_roundtrip val_loss:4.2 val_bpb:1.82 eval_time:1000ms",
              f"final_int6_sliding_window val_loss:4.0 val_bpb:{1.75 + seed / 1e5} eval_time:9000ms"]
    path = folder / f"seed{seed}.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if records:
        steps = [{"type": "step", "step": n, "train_loss": 8 - n / 10, "train_seconds": n / 2,
                  "tokens_per_second": 2000, "lr_factor": 1 - n / 40} for n in range(1, 41)]
        path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    return [write_log(folder, 42), write_log(folder, 1337, records=False)]


@pytest.fixture(scope="module")
def report(logs):
    out = logs[0].with_name("report.html")
    result = golf("report", *logs, "-o", out, "--json")
    assert result.returncode == 0, result.stderr
    return out, json.loads(result.stdout)


def drawn(title, logs):
    """The axes of one panel."""
    axes = Figure().subplots()
    assert plots.draw_panel(axes, title, [read_log(path) for path in logs])
    return axes


def lines(title, logs):
    """(label, x, y) of each line that a panel shows."""
    return [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in drawn(title, logs).lines]


def test_losses_stand_at_their_steps_and_seconds(logs):
    by_steps = lines("Loss against steps", logs)
    assert [label for label, *_ in by_steps] == ["seed 42, train", "seed 42, validation", "seed 1337, train",
                                             "seed 1337, validation"]
    assert by_steps[0][1] == list(range(1, 41)) and by_steps[0][2][-1] == 4.0
    by_seconds = lines("Loss against seconds", logs)
    assert by_seconds[0][1] == [n / 2 for n in range(1, 41)] and by_seconds[1][1] == [0.0, 20.0]


def test_final_scores_stand_at_the_end(logs):
    ends = [(x[0], y[0]) for _, x, y in lines("Bits per byte against seconds", logs[:1]) if len(x) == 1]
    assert ends == [(20.0, 1.82), (20.0, 1.75042)]


def test_a_kind_of_score_that_the_first_run_lacks_is_in_the_legend(logs, tmp_path):
    first = write_log(tmp_path, 7)
    first.write_text("\n".join(line for line in first.read_text().split("\n") if "sliding" not in line))
    labels = drawn("Bits per byte against steps", [first, *logs]).get_legend_handles_labels()[1]
    assert sorted(labels) == ["quantised", "seed 1337", "seed 42", "seed 7", "sliding"]


def test_rate_needs_records_and_sizes_need_none(logs):
    assert [label for label, *_ in lines("Learning rate", logs)] == ["seed 42"]
    assert not plots.draw_panel(Figure().subplots(), "Learning rate", [read_log(logs[1])])
    assert [bar.get_width() for bar in drawn("Size", logs).patches] == [60000, 60000, 15000000, 15000000]


def test_runs_with_one_label_have_a_bar_each(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    bars = drawn("Size", [write_log(tmp_path / name, 42) for name in "ab"]).patches
    assert len({(bar.get_x(), bar.get_y()) for bar in bars}) == 4


def test_plot_is_a_picture_and_is_never_overwritten_unasked(logs, tmp_path, capsys):
    out = tmp_path / "runs.png"
    result = golf("plot", *logs, "-o", out)
    assert result.returncode == 0 and "standard deviation" in result.stdout
    with Image.open(out) as image:
        assert image.size[0] > 1000 and len(image.convert("L").getcolors(256)) > 10
    again = ["plot", str(logs[0]), "-o", str(out)]
    assert main(again) == 2 and "exists and is kept" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0


def test_report_is_one_file_without_references(report):
    text = report[0].read_text(encoding="utf-8")
    assert text.isascii() and 'name="viewport"' in text and "@media print" in text
    targets = re.findall(r'(?:src|href)="([^"]{0,30})', text) + re.findall(r"url\(", text)
    assert len(targets) == len(plots.PANELS) and all(t.startswith("data:image/svg+xml;base64,") for t in targets)
    assert "<script" not in text and "&lt;script&gt;" in text and "source</b>" not in text
    for part in ("1.75042", "1.76337", "15,060,000", "Settings that differ", "muon_wd"):
        assert part in text


def test_json_has_the_numbers_of_each_run(report):
    rows = report[1]["runs"]
    assert [row["final bpb"] for row in rows] == [1.75042, 1.76337] and rows[0]["total bytes"] == 15_060_000
    assert rows[0]["train s"] == 20.0 and rows[0]["eval s"] == 10.0


def test_unfinished_run_is_drawn_too(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("1/40 train_loss: 5.0 train_time: 0.1m tok/s: 7\n", encoding="utf-8")
    assert main(["report", str(path), "-o", str(tmp_path / "a.html")]) == 0


def test_a_run_whose_score_is_not_finite_is_drawn_too(logs, tmp_path, capsys):
    path = write_log(tmp_path, 42)
    path.write_text(re.sub(r"(sliding_window val_loss:4.0 val_bpb:)\S+", r"\1nan", path.read_text()))
    assert main(["plot", str(path), str(logs[1]), "-o", str(tmp_path / "a.png")]) == 0
    assert "final bpb nan, standard deviation -, 2 runs" in capsys.readouterr().out


def test_file_that_is_no_log_is_one_clear_message(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("nothing\n", encoding="utf-8")
    for name in ("a.txt", "missing.txt"):
        assert main(["plot", str(tmp_path / name), "-o", str(tmp_path / "a.png")]) == 2
        assert name in capsys.readouterr().err
        assert not (tmp_path / "a.png").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium, as .ci/run does")
def test_report_shows_its_pictures_on_a_phone(report, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    shot = tmp_path / "shot.png"
    subprocess.run([CHROMIUM, *flags, f"--user-data-dir={tmp_path}", "--window-size=390,4000", f"--screenshot={shot}",
                    report[0].as_uri()], check=True, capture_output=True, timeout=60)
    with Image.open(shot) as image:
        pixels = image.convert("RGB")
    assert pixels.size == (390, 4000)
    right_margin = [pixels.getpixel((x, y)) for x in range(380, 390) for y in range(0, 4000, 7)]
    assert set(right_margin) == {(255, 255, 255)}  # nothing sticks out of the page: tables scroll
    blue = (31, 119, 180)  # the first run's colour, in every picture but none of the text
    rows = [y for y in range(4000) if any(pixels.getpixel((x, y)) == blue for x in range(0, 390, 3))]
    assert max(rows) - min(rows) > 1500
