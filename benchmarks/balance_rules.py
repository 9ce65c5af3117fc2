"""What ``benchmarks/balance.py`` compares and by which rules, without a clock or a rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_hetero.balance.lines import Line, RankModel

Batches = tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """Ranks of unequal speed.

    speeds: relative, in rank order. forward_shares: of a rank's seconds for a sample, the part that
    lies before its backward pass. Where these are alike, equal compute time is the best split with
    and without overlapped exchange; where they differ it is not.
    """

    speeds: tuple[float, ...]
    forward_shares: tuple[float, ...]


CLUSTERS: dict[str, dict[int, Cluster]] = {
    # Fast ranks that wait for their data, as fast accelerators often do.
    "unlike": {
        2: Cluster((1, 3), (0.2, 0.8)),
        4: Cluster((1, 1, 2, 4), (0.2, 0.2, 0.5, 0.8)),
    },
    "alike": {
        2: Cluster((1, 3), (0.35, 0.35)),
        4: Cluster((1, 1, 2, 4), (0.35, 0.35, 0.35, 0.35)),
    },
}


# ---- LB-BSP -------------------------------------------------------------------------------------


def lb_bsp_move(batches: Batches, compute_seconds: Sequence[float], delta_samples: int) -> Batches:
    """Return the split after one window of LB-BSP (Chen et al., SoCC 2020).

    ``delta_samples`` go from the rank with the largest compute seconds to the one with the
    smallest; the slowest keeps at least one. Of equally slow (or fast) ranks the first counts.
    """
    ranks = range(len(batches))
    slowest = max(ranks, key=lambda rank: (compute_seconds[rank], -rank))
    fastest = min(ranks, key=lambda rank: (compute_seconds[rank], rank))
    moved = min(delta_samples, batches[slowest] - 1)
    after = list(batches)
    after[slowest] -= moved
    after[fastest] += moved
    return tuple(after)


def lb_bsp_settled(
    compute_seconds: Callable[[Batches], Sequence[float]],
    start: Batches,
    delta_samples: int,
    most_windows: int = 60,
) -> tuple[Batches, int]:
    """Let LB-BSP move until it comes back to a split it had; return its best, and the windows.

    Then delta is halved, down to one sample, so that the result is the split at which compute
    seconds are as equal as whole samples allow, and no coarse delta is held against the rule.
    ``compute_seconds``: of every rank, measured in a window with that split.
    """
    worst: dict[Batches, float] = {}
    best, windows, delta = start, 0, delta_samples
    while True:
        batches, seen = best, set[Batches]()
        while batches not in seen and windows < most_windows:
            seen.add(batches)
            seconds = compute_seconds(batches)
            windows += 1
            worst[batches] = max(seconds)
            batches = lb_bsp_move(batches, seconds, delta)
        best = min(worst, key=worst.__getitem__)
        if delta == 1 or windows >= most_windows:
            return best, windows
        delta = max(delta // 2, 1)


# ---- the ideal ----------------------------------------------------------------------------------


def line_through(points: Sequence[tuple[int, float]]) -> Line:
    """Return the line of least relative squares through (samples, seconds), slopes kept >= 0."""
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    batch = sum(w * samples for w, (samples, _) in zip(weights, points, strict=True)) / total
    mean = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (b - batch) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    moment = sum(w * (b - batch) * (t - mean) for w, (b, t) in zip(weights, points, strict=True))
    slope = max(moment / spread, 0.0) if spread > 0.0 else mean / batch
    if mean - slope * batch < 0.0:  # through the origin: no fixed cost is below zero
        slope = mean / batch
    return Line(slope, max(mean - slope * batch, 0.0))


def rank_model(points: Sequence[tuple[int, float, float]]) -> RankModel:
    """Return the two lines through (samples, ready_seconds, done_seconds) of one rank."""
    return RankModel(
        ready=line_through([(batch, ready) for batch, ready, _ in points]),
        done=line_through([(batch, done) for batch, _, done in points]),
    )


def sizes_to_measure(even_samples: int) -> list[int]:
    """Return the local batches at which a rank is measured by itself, ascending."""
    return sorted({max(even_samples * part // 4, 1) for part in (1, 2, 4, 7)})


# ---- results ------------------------------------------------------------------------------------


def half_spread(values: Sequence[float]) -> float:
    """Return half the distance of the quartiles."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return (quartiles[2] - quartiles[0]) / 2


def paired_ratio(seconds: Sequence[float], other: Sequence[float]) -> float:
    """Return the median over rounds of ``seconds`` / ``other``."""
    return statistics.median(a / b for a, b in zip(seconds, other, strict=True))


@dataclass(frozen=True)
class Verdict:
    """A bar, what was measured for it, and whether that passes."""

    bar: str
    case: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


WITHIN_IDEAL = 0.05
PREDICTION_ERROR = 0.05


def noise_of(case: Mapping[str, Any]) -> float:
    """Return how far the control is from 1, or reaches from round to round, the larger."""
    return max(abs(case["control_ratio"] - 1.0), case["control_half_spread"])


def verdicts_of(cases: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdicts on ``cases``, the rows of one run of the benchmark."""
    verdicts = []
    for case in cases:
        if case["method"] != "ours":
            continue
        name = f"{case['case']}, {case['ranks']} ranks"
        expected = {
            one["method"]: one["expected_seconds"]
            for one in cases
            if (one["case"], one["ranks"]) == (case["case"], case["ranks"])
        }
        noise = noise_of(case)
        against = case["ratio_to_ideal"]
        verdicts.append(Verdict("of ideal", name, against, 1.0 + WITHIN_IDEAL))
        verdicts.append(
            Verdict("of LB-BSP, with noise", name, case["ratio_to_lb_bsp"], 1.0 + noise)
        )
        # By the ranks' own lines, not by what is judged: is there more to win than noise?
        to_win = expected["lb-bsp"] > (1.0 + 2.0 * noise) * expected["ideal"]
        if to_win and case["case"].startswith("bound"):
            verdicts.append(
                Verdict("better than LB-BSP", name, case["ratio_to_lb_bsp"], 1.0 - noise)
            )
        if case["prediction_error"] is not None:
            error = abs(case["prediction_error"])
            verdicts.append(Verdict("prediction error", name, error, PREDICTION_ERROR))
    errors = [
        abs(case["prediction_error"])
        for case in cases
        if case["method"] == "ours" and case["prediction_error"] is not None
    ]
    if errors:
        median = statistics.median(errors)
        verdicts.append(Verdict("median prediction error", "all cases", median, PREDICTION_ERROR))
    return verdicts
