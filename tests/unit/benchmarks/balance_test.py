"""benchmarks/balance.py: LB-BSP's rule, the lines of the ideal, the verdicts, and a small run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.balance import finished
from benchmarks.balance_rules import (
    CLUSTERS,
    Batches,
    Cluster,
    half_spread,
    lb_bsp_move,
    lb_bsp_settled,
    line_through,
    rank_model,
    sizes_to_measure,
    verdicts_of,
)
from tests.unit.benchmarks.small_run import run_benchmark

# ---- LB-BSP -------------------------------------------------------------------------------------


def test_samples_go_from_the_slowest_to_the_fastest() -> None:
    assert lb_bsp_move((32, 32, 32), (0.3, 0.1, 0.2), 5) == (27, 37, 32)


@pytest.mark.parametrize(
    "batches, seconds, expected",
    [
        ((3, 10), (0.2, 0.1), (1, 12)),  # one sample stays
        ((1, 10), (0.2, 0.1), (1, 10)),
        ((8, 8), (0.1, 0.1), (8, 8)),  # nobody is slower
        ((8, 8, 8), (0.2, 0.2, 0.1), (3, 8, 13)),  # of equals the first
        ((8,), (0.2,), (8,)),
    ],
)
def test_limits_of_a_move(batches: Batches, seconds: list[float], expected: Batches) -> None:
    assert lb_bsp_move(batches, seconds, 5) == expected


@pytest.mark.parametrize("delta", [1, 5, 12])
def test_it_settles_where_compute_seconds_are_equal(delta: int) -> None:
    """Whatever the first delta: seconds 0.006 + 0.004 b / speed are equal at 16, 16, 32 and 64."""

    def seconds(batches: Batches) -> list[float]:
        speeds = (1, 1, 2, 4)
        return [0.006 + 0.004 * b / v for b, v in zip(batches, speeds, strict=True)]

    batches, windows = lb_bsp_settled(seconds, (32, 32, 32, 32), delta)
    assert batches == (16, 16, 32, 64)
    assert 2 <= windows <= 60


def test_it_settles_though_measurements_never_agree() -> None:
    turns = iter(range(10_000))

    def seconds(batches: Batches) -> list[float]:
        return [b * (1.0 + 0.3 * (next(turns) % 7)) for b in batches]

    batches, windows = lb_bsp_settled(seconds, (10, 10), 5, most_windows=12)
    assert sum(batches) == 20
    assert min(batches) >= 1
    assert windows <= 12


# ---- lines --------------------------------------------------------------------------------------


def test_a_line_through_points_of_one() -> None:
    line = line_through([(8, 0.038), (16, 0.070), (32, 0.134)])
    assert line.slope_seconds == pytest.approx(0.004)
    assert line.intercept_seconds == pytest.approx(0.006)


@pytest.mark.parametrize(
    "points, slope, intercept",
    [
        ([(8, 0.5)], 0.0625, 0.0),
        ([(10, 0.5), (20, 0.4)], 0.0, None),  # faster with more samples: noise
        ([(10, 0.09), (20, 0.21)], None, 0.0),  # a fixed cost below zero
    ],
)
def test_limits_of_a_line(
    points: list[tuple[int, float]], slope: float | None, intercept: float | None
) -> None:
    line = line_through(points)
    if slope is not None:
        assert line.slope_seconds == pytest.approx(slope)
    if intercept is not None:
        assert line.intercept_seconds == pytest.approx(intercept)
    seconds = [seconds for _, seconds in points]
    assert min(seconds) <= line(points[0][0]) <= max(seconds)


def test_a_rank_has_a_line_to_its_first_gradient_and_one_to_its_last() -> None:
    model = rank_model([(10, 0.02, 0.05), (20, 0.03, 0.08)])
    assert model.ready(40) == pytest.approx(0.05)
    assert model.done(40) == pytest.approx(0.14)


def test_sizes_to_measure_lie_around_the_even_split() -> None:
    assert sizes_to_measure(32) == [8, 16, 32, 56]
    assert sizes_to_measure(1) == [1]


def test_clusters_have_their_fastest_rank_last() -> None:
    for clusters in CLUSTERS.values():
        for ranks, cluster in clusters.items():
            assert len(cluster.speeds) == len(cluster.forward_shares) == ranks
            assert max(cluster.speeds) == cluster.speeds[-1]


# ---- cases and verdicts -------------------------------------------------------------------------


def row(method: str, turns: list[float], predicted: float | None, expected: float) -> Any:
    return {
        "case": "bound",
        "method": method,
        "local_batches": [16, 48],
        "turns": turns,
        "predicted": [predicted] * len(turns),
        "windows": 3,
        "learning_seconds": [],
        "steps": [0, 10],
        "expected_seconds": expected,
        "overlapped_seconds": 0.05,
        "final_seconds": 0.01,
        "models": [],
    }


def cases_of(**changes: list[float]) -> list[dict[str, Any]]:
    turns = {
        "even": [2.0, 2.2, 1.8],
        "even again": [2.02, 2.2, 1.8],
        "lb-bsp": [1.2, 1.3, 1.1],
        "ours": [1.02, 1.12, 0.92],
        "ideal": [1.0, 1.1, 0.9],
    } | changes
    expected = {"lb-bsp": 1.2, "ideal": 1.0}
    rows = [
        row(method, seconds, 1.0 if method == "ours" else None, expected.get(method, 1.0))
        for method, seconds in turns.items()
    ]
    windows = [{"step": 10}, {"step": 20}]
    return finished({"rows": rows, "windows": windows}, 2, Cluster((1, 3), (0.2, 0.7)))


def test_ratios_are_of_turns_of_one_round() -> None:
    cases = {case["method"]: case for case in cases_of()}
    assert list(cases) == ["even", "lb-bsp", "ours", "ideal"]
    assert cases["ours"]["ratio_to_ideal"] == pytest.approx(1.02, abs=0.002)
    assert cases["ours"]["ratio_to_lb_bsp"] == pytest.approx(0.85, abs=0.02)
    assert cases["ours"]["prediction_error"] == pytest.approx(1 / 1.02 - 1)
    assert cases["lb-bsp"]["prediction_error"] is None
    assert cases["even"]["control_ratio"] == pytest.approx(1.0, abs=0.01)
    assert cases["ours"]["window_records"] == [{"step": 10}]
    assert cases["even"]["window_records"] == []
    assert cases["even"]["control_seconds"] == pytest.approx(2.02)


def missed(cases: list[dict[str, Any]]) -> set[str]:
    return {verdict.bar for verdict in verdicts_of(cases) if not verdict.passed}


@pytest.mark.parametrize(
    "changes, bars",
    [
        ({}, set()),
        ({"ours": [1.08, 1.18, 0.98]}, {"of ideal", "prediction error", "median prediction error"}),
        ({"lb-bsp": [1.0, 1.1, 0.9]}, {"of LB-BSP, with noise", "better than LB-BSP"}),
    ],
)
def test_verdicts(changes: Mapping[str, list[float]], bars: set[str]) -> None:
    assert missed(cases_of(**changes)) == bars


def test_a_gain_within_the_noise_is_not_asked_for() -> None:
    cases = cases_of()
    for case in cases:
        case["control_half_spread"] = 0.15
    assert "better than LB-BSP" not in {verdict.bar for verdict in verdicts_of(cases)}


def test_half_spread() -> None:
    assert half_spread([1.0]) == 0.0
    assert half_spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)


@pytest.mark.parallel
def test_a_small_run_prints_a_table_and_writes_its_cases(tmp_path: Path) -> None:
    printed, cases = run_benchmark(
        "balance.py",
        tmp_path,
        *("--cases", "free", "--ranks", "2", "--rounds", "2", "--steps", "2"),
        *("--windows", "2", "--window-steps", "4"),
        timeout_seconds=200,
    )
    assert "median prediction error" in printed
    by_method = {case["method"]: case for case in cases}
    assert set(by_method) == {"even", "lb-bsp", "ours", "ideal"}
    for case in cases:
        assert sum(case["local_batches"]) == 64
        assert case["seconds"] > 0
        assert len(case["turn_seconds"]) == 2
    assert by_method["even"]["local_batches"] == [32, 32]
    assert by_method["ideal"]["local_batches"][1] > 40
