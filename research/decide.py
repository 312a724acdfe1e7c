"""The keep rule: pure functions from runs' scores to the next step. Lower scores (bpb) are better.

A group-sequential t test. Every run has a seed of its own; after each run of the candidate the difference of means is
compared with two bounds in standard errors. The upper one falls as runs accumulate (O'Brien and
Fleming, Biometrics 35, 1979), so that a lucky first run keeps nothing; the lower one rises from 0 to meet it (a
triangular test, Whitehead 1997), so that most candidates that do not help cost one run. The noise is pooled over the
incumbent's, its ancestors' and the candidate's own runs, never over discarded ones: one unstable candidate must not
hide later gains.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

EQUAL_ERRORS = 0.5  # "equal within noise": at most this many standard errors worse
EQUAL_RUNS = 3  # after as many runs


class Spread(NamedTuple):
    """Sum of squared deviations from group means, and its degrees of freedom."""

    squares: float = 0.0
    freedom: int = 0

    @property
    def noise(self) -> float | None:
        """Standard deviation of one run; None before any group has two."""
        return math.sqrt(self.squares / self.freedom) if self.freedom else None


NO_SPREAD = Spread()


@dataclass(frozen=True)
class Rule:
    k: float = 2.0  # standard errors that a gain must exceed at the last look
    most_runs: int = 5  # of a candidate
    most_incumbent_runs: int = 12


STANDARD = Rule()


@dataclass(frozen=True)
class Verdict:
    action: Literal["keep", "discard", "run candidate", "run incumbent"]
    gain: float  # incumbent's mean minus the candidate's: positive is better
    reason: str


def spread(groups: Sequence[Sequence[float]]) -> Spread:
    """Pooled over groups of runs of one commit each."""
    squares = freedom = 0.0
    for group in groups:
        if len(group) > 1:
            mean = math.fsum(group) / len(group)
            squares += math.fsum((value - mean) ** 2 for value in group)
            freedom += len(group) - 1
    return Spread(squares, int(freedom))


def t_bound(z: float, freedom: int) -> float:
    """Student's t with the same tail as `z` standard normal deviations (Abramowitz and Stegun 26.7.5).

    The series is too low below three degrees of freedom; a bound of infinity keeps nothing there."""
    if freedom < 3:
        return math.inf
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def in_errors(gain: float, noise: float, runs: int, others: int) -> float:
    """A difference of means in standard errors; without any noise, infinite unless it is zero."""
    error = noise * math.sqrt(1 / runs + 1 / others)
    return gain / error if error else math.copysign(math.inf, gain) if gain else 0.0


def decide(incumbent: Sequence[float], candidate: Sequence[float], ancestors: Spread = NO_SPREAD,
           bytes_saved: int = 0, best: Sequence[float] = (), rule: Rule = STANDARD) -> Verdict:
    """What to do after these runs.

    incumbent: scores of the commit to beat, at least two; candidate: at least one; ancestors: spread of the other kept
    commits; bytes_saved: how much smaller the candidate's script is; best: scores of the last commit that was kept for
    its gain, which a smaller script must equal too, so that many small losses do not add up.
    """
    assert len(incumbent) >= 2 and candidate, "two runs of the incumbent and one of the candidate are needed"
    runs, last = len(candidate), len(candidate) >= rule.most_runs
    own = spread([incumbent, candidate])
    pooled = Spread(own.squares + ancestors.squares, own.freedom + ancestors.freedom)
    mean = math.fsum(candidate) / runs
    gain = math.fsum(incumbent) / len(incumbent) - mean
    errors = in_errors(gain, pooled.noise, runs, len(incumbent))
    upper = t_bound(rule.k * math.sqrt(rule.most_runs / runs), pooled.freedom)
    lower = rule.k * (runs - 1) / max(1, rule.most_runs - 1)
    said = f"gain {gain:+.6f} is {errors:.1f} standard errors over {runs} run{'s' * (runs > 1)}"
    if runs > 1 and errors > upper:
        return Verdict("keep", gain, f"{said}, more than {upper:.1f}")
    if bytes_saved > 0:
        behind = math.fsum(best) / len(best) - mean if best else gain
        worst = min(errors, in_errors(behind, pooled.noise, runs, len(best) or len(incumbent)))
        if runs >= EQUAL_RUNS and worst >= -EQUAL_ERRORS:
            return Verdict("keep", gain, f"equal within noise and {bytes_saved} bytes smaller: {said}")
        if runs < EQUAL_RUNS and worst >= -2 * EQUAL_ERRORS:
            lower = -math.inf
    if last or errors <= lower:
        return Verdict("discard", gain, f"{said}, needs more than {upper if last else lower:.1f}")
    wanted = min(rule.most_incumbent_runs, 3 * (runs + 1))
    return Verdict("run incumbent" if len(incumbent) < wanted else "run candidate", gain, f"{said}: not decided")
