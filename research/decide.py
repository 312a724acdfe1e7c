"""The keep rule: pure functions from runs' scores to the next step. Lower scores (bpb) are better.

A group-sequential t test. Every run has a seed of its own; after each run of the candidate the difference of means is
compared with two bounds in standard errors. The upper one falls as runs accumulate (O'Brien and Fleming, Biometrics
35, 1979), so that a lucky first run keeps nothing; the lower one rises from 0 to meet it (a triangular test, Whitehead
1997), so that most candidates that do not help cost one run. The noise is pooled over the incumbent's, its ancestors'
and the candidate's own runs, never over discarded ones: one unstable candidate must not hide later gains."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

K = 2.0  # standard errors that a gain must exceed at the last look
MOST_RUNS, MOST_INCUMBENT_RUNS = 5, 12
EQUAL_ERRORS = 0.5  # "equal within noise": at most this many standard errors worse
EQUAL_RUNS = 3  # after as many runs

@dataclass(frozen=True)
class Verdict:
    action: str  # keep, discard, run candidate or run incumbent; elsewhere also the status of a failure
    gain: float  # incumbent's mean minus the candidate's: positive is better
    reason: str

def pooled_noise(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation of one run and its degrees of freedom, over groups of runs of one commit each; 0 and 0 when no
    group has two."""
    groups = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom

def t_bound(z: float, freedom: int) -> float:
    """Student's t with the same tail as `z` standard normal deviations (Abramowitz and Stegun 26.7.5)."""
    if freedom < 3:  # where the series is too low, nothing is kept
        return math.inf
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))

def in_errors(gain: float, noise: float, runs: int, others: int) -> float:
    """A difference of means in standard errors; without any noise, infinite unless it is zero."""
    error = noise * math.sqrt(1 / runs + 1 / others)
    return gain / error if error else math.copysign(math.inf, gain) if gain else 0.0

def decide(incumbent: Sequence[float], candidate: Sequence[float], ancestors: Sequence[Sequence[float]] = (),
           saved: int = 0, best: Sequence[float] = ()) -> Verdict:
    """What to do after these runs.

    incumbent: scores of the commit to beat, two or more; candidate: one or more; ancestors: of each other kept commit;
    saved: how much less syntax the candidate's script has; best: scores of the last commit that was kept for its gain,
    which a simpler script must equal too, so that many small losses do not add up."""
    assert len(incumbent) >= 2 and candidate, "two runs of the incumbent and one of the candidate are needed"
    runs, last = len(candidate), len(candidate) >= MOST_RUNS
    noise, freedom = pooled_noise([incumbent, candidate, *ancestors])
    gain = fmean(incumbent) - fmean(candidate)
    errors = in_errors(gain, noise, runs, len(incumbent))
    upper, lower = t_bound(K * math.sqrt(MOST_RUNS / runs), freedom), K * (runs - 1) / (MOST_RUNS - 1)
    said = f"gain {gain:+.6f} is {errors:.1f} standard errors over {runs} run{'s' * (runs > 1)}"
    if runs > 1 and errors > upper:
        return Verdict("keep", gain, f"{said}, more than {upper:.1f}")
    if saved > 0:
        best = best or incumbent
        worst = min(errors, in_errors(fmean(best) - fmean(candidate), noise, runs, len(best)))
        if runs >= EQUAL_RUNS and worst >= -EQUAL_ERRORS:
            return Verdict("keep", gain, f"equal within noise and simpler by {saved} nodes of syntax: {said}")
        if runs < EQUAL_RUNS and worst >= -2 * EQUAL_ERRORS:
            lower = -math.inf
    if last or errors <= lower:
        return Verdict("discard", gain, f"{said}, needs more than {upper if last else lower:.1f}")
    wanted = min(MOST_INCUMBENT_RUNS, 3 * (runs + 1))
    return Verdict("run incumbent" if len(incumbent) < wanted else "run candidate", gain, f"{said}: not decided")
