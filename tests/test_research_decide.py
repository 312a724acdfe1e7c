"""The keep rule: its bounds, single verdicts, and whole simulated nights."""
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm, t

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import research_nights

from research.decide import MOST_INCUMBENT_RUNS, MOST_RUNS, decide, in_errors, pooled_noise, t_bound

CALM = [[1 - 0.002 / math.sqrt(2), 1 + 0.002 / math.sqrt(2)]] * 40  # earlier runs with a noise of 0.002
INCUMBENT = [1.001, 0.999, 1.002, 0.998] * 3


@pytest.mark.parametrize("z", [1.5, 2.0, 2.6, 3.2])
@pytest.mark.parametrize("freedom", [6, 10, 30, 100])
def test_bound_is_students(z, freedom):
    assert t_bound(z, freedom) == pytest.approx(t.isf(norm.sf(z), freedom), rel=0.02)


def test_nothing_is_kept_with_two_degrees_of_freedom():
    assert t_bound(2, 2) == math.inf
    assert decide([1.0, 1.0001], [0.5]).action.startswith("run")


def test_noise_is_pooled_within_groups():
    assert pooled_noise([[1, 3], [10, 10, 13], [7]]) == (math.sqrt((2 + 6) / 3), 3)
    assert pooled_noise([[1], []]) == (0, 0) and pooled_noise(CALM) == (pytest.approx(0.002), 40)


def test_errors_without_noise():
    assert in_errors(0.1, 0, 1, 2) == math.inf and in_errors(-0.1, 0, 1, 2) == -math.inf and in_errors(0, 0, 1, 2) == 0


def test_no_better_first_run_is_discarded_at_once():
    verdict = decide(INCUMBENT, [1.0], CALM)
    assert verdict.action == "discard" and verdict.gain == pytest.approx(0, abs=1e-12)


def test_one_run_never_suffices():
    assert decide(INCUMBENT, [0.5], CALM).action == "run candidate"
    kept = decide(INCUMBENT, [0.5, 0.5], CALM)
    assert kept.action == "keep" and kept.gain == pytest.approx(0.5)


def test_a_promising_candidate_lets_the_incumbent_run_too():
    assert decide([1.001, 0.999], [0.996], CALM).action == "run incumbent"
    assert decide(INCUMBENT, [0.996], CALM).action == "run candidate"


def test_unstable_candidate_is_not_kept_and_its_noise_is_its_own():
    verdict = decide(INCUMBENT, [0.9, 1.05, 0.99, 1.04, 0.98])
    assert verdict.action == "discard"


def test_equal_and_simpler_is_kept_after_three_runs():
    same = [1.0003, 1.0001, 0.9999]
    assert decide(INCUMBENT, same[:1], CALM, saved=50).action == "run candidate"
    kept = decide(INCUMBENT, same, CALM, saved=50)
    assert kept.action == "keep" and kept.reason.startswith("equal within noise and simpler by 50 nodes")
    assert decide(INCUMBENT, same, CALM).action == "discard"
    assert decide(INCUMBENT, [1.003, 1.003, 1.003], CALM, saved=50).action == "discard"


def test_small_losses_of_simpler_scripts_do_not_add_up():
    worse = [1.0003, 1.0001, 0.9999]
    best = [0.998, 0.996, 0.997] * 2
    assert decide(INCUMBENT, worse, CALM, saved=50, best=best).action == "discard"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=12), st.lists(st.floats(0.5, 2), min_size=1, max_size=5),
       st.integers(-100, 100))
def test_always_answers_and_ends(incumbent, candidate, saved):
    verdict = decide(incumbent, candidate, saved=saved)
    assert verdict.gain == pytest.approx(math.fsum(incumbent) / len(incumbent) - math.fsum(candidate) / len(candidate))
    if len(candidate) == MOST_RUNS:
        assert verdict.action in ("keep", "discard")
    if verdict.action == "run incumbent":
        assert len(incumbent) < MOST_INCUMBENT_RUNS
    if verdict.action == "keep":
        assert len(candidate) >= 2


def test_twenty_nights_of_no_ops_keep_fewer_than_two_each():
    result = research_nights.campaign(nights=20, seed=1, no_ops=50, true_gains=0)
    assert result["false_keeps"] < 2 and result["worst_false_keeps"] <= 3 and 55 < result["runs"] < 150


def test_twenty_nights_find_eight_of_ten_gains():
    result = research_nights.campaign(nights=20, seed=1, no_ops=90, true_gains=10)
    assert result["true_keeps"] >= 8 and result["false_keeps"] < 2


def test_a_strict_comparison_would_keep_luck():
    """The simulated trainer is as hard as said: the classic rule (one run, strictly lower) keeps several no-ops."""
    rng, best, keeps = random.Random(1), 1.0, 0
    for _ in range(50):
        score = rng.gauss(1.0, research_nights.NOISE)
        keeps, best = keeps + (score < best), min(best, score)
    assert keeps >= 3


def test_of_equal_and_simpler_candidates_few_that_are_worse_are_kept():
    kept = [research_nights.simpler(candidates=400, seed=1, loss=loss)["kept"] for loss in (0, 0.001, 0.002, 0.004)]
    assert 0.5 < kept[0] < 0.7 and kept[1] < 0.4 and kept[2] < 0.16 and kept[3] < 0.02
