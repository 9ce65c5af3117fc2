"""How long the split of a global batch takes to find, and that no split is better.

    python benchmarks/optperf.py [--ranks 10,100,1000,10000] [--json FILE]

Compared, on the same random instances:

- ``solve``, the best split into whole samples. Inside the clock: the checks of the arguments,
  reading the rank models into arrays, the search, and the tuple of the result. The models and the
  bounds stand ready when it starts, as they do in a job;
- ``solve_real``, the best split into real batches, in the same way;
- scipy's linprog (HiGHS) for the real split, as a linear program. Inside the clock: linprog alone;
  its sparse matrices are built before.

An instance is a cluster of 2 to 5 classes of devices, up to 10 times apart, whose ranks differ by
some 5% within a class. The exchange takes about as long as the rest of backward, so some ranks are
bound by done and others by ready; bounds hold a few ranks back. ``gap`` compares our real optimum
with linprog's; ``integer_gap`` is what whole samples cost. ``control`` is solve timed again in
the same turns: how far the machine's noise reaches; CPU time leaves out waiting for a busy core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import print_table, write_json
from hvd_hetero.balance.lines import Line, RankModel
from hvd_hetero.balance.optperf import Bounds, solve
from hvd_hetero.balance.real_optimum import solve_real


@dataclass(frozen=True)
class Instance:
    """Arguments of solve; times in seconds, batches in samples."""

    models: list[RankModel]
    total: int
    bounds: Bounds
    overlapped_seconds: float
    final_seconds: float

    def run(self, solver: Callable[..., Any]) -> Any:
        return solver(
            self.models,
            self.total,
            bounds=self.bounds,
            overlapped_seconds=self.overlapped_seconds,
            final_seconds=self.final_seconds,
        )


def random_instance(ranks: int, rng: np.random.Generator) -> Instance:
    """Return a cluster of random speed classes that shares about 64 samples a rank."""
    classes = 1e-3 * 10 ** rng.random(int(rng.integers(2, 6)))
    slopes = rng.choice(classes, ranks) * rng.normal(1.0, 0.05, ranks).clip(0.8, 1.2)
    ready = rng.uniform(0.3, 0.7, ranks)  # of done
    fixed = rng.uniform(2e-3, 2e-2, ranks)
    models = [
        RankModel(Line(share * slope, share * start), Line(slope, start))
        for share, slope, start in zip(ready.tolist(), slopes.tolist(), fixed.tolist(), strict=True)
    ]
    lower, upper = rng.integers(1, 33, ranks), rng.integers(64, 513, ranks)
    total = int(min(64 * ranks, upper.sum()) - rng.integers(0, ranks))
    balanced = (total + (fixed / slopes).sum()) / (1 / slopes).sum()
    return Instance(
        models,
        total,
        Bounds(tuple(lower.tolist()), tuple(upper.tolist())),
        overlapped_seconds=0.5 * float(balanced),
        final_seconds=5e-3,
    )


class LinearProgram:
    """Minimise T over the real b and T: each line of each rank ends by T, the b add up."""

    def __init__(self, instance: Instance) -> None:
        from scipy import sparse  # of use here only

        slopes = np.array(
            [[m.done.slope_seconds, m.ready.slope_seconds] for m in instance.models]
        ).T
        starts = np.array(
            [[m.done.intercept_seconds, m.ready.intercept_seconds] for m in instance.models]
        ).T
        starts[1] += instance.overlapped_seconds
        lower = np.array(instance.bounds.lower, dtype=np.float64)
        upper = np.array(instance.bounds.upper, dtype=np.float64)
        # T is about 1 then: HiGHS' tolerances are absolute.
        self.scale = float((slopes * (lower + upper) / 2 + starts).max()) or 1.0
        self.final_seconds = instance.final_seconds
        ranks = len(lower)
        lines = sparse.vstack([sparse.diags(line) for line in slopes / self.scale])
        ends = -np.ones((2 * ranks, 1))
        self.arguments: dict[str, Any] = {
            "c": np.append(np.zeros(ranks), 1.0),
            "A_ub": sparse.hstack([lines, ends], format="csr"),
            "b_ub": -starts.ravel() / self.scale,
            "A_eq": sparse.csr_matrix(np.append(np.ones(ranks), 0.0)[None]),
            "b_eq": [float(instance.total)],
            "bounds": np.column_stack([np.append(lower, 0.0), np.append(upper, np.inf)]),
            "method": "highs",
            "options": {
                "primal_feasibility_tolerance": 1e-10,
                "dual_feasibility_tolerance": 1e-10,
            },
        }

    def solve(self) -> float:
        """Return the step in seconds; RuntimeError if HiGHS finds no optimum."""
        from scipy.optimize import linprog

        found = linprog(**self.arguments)
        if found.status != 0:
            raise RuntimeError(f"linprog: {found.message}")
        return float(found.fun) * self.scale + self.final_seconds


def seconds_of(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return seconds, seconds of CPU, and the result of ``work``."""
    start, cpu_start = time.perf_counter(), time.process_time()
    result = work()
    cpu_end, end = time.process_time(), time.perf_counter()
    return end - start, cpu_end - cpu_start, result


def measure(ranks: int, instances: int, repeats: int, seed: int) -> dict[str, float | int]:
    """Return the case of one number of ranks: medians over instances and turns, worst gaps."""
    rng = np.random.default_rng([seed, ranks])
    times: dict[str, list[float]] = {"solve": [], "control": [], "real": [], "lp": [], "cpu": []}
    slowest, gaps, integer_gaps = 0.0, [], []
    for _ in range(instances):
        instance = random_instance(ranks, rng)
        program = LinearProgram(instance)
        turns: dict[str, list[float]] = {"solve": [], "control": [], "real": []}
        whole = real = None
        for _ in range(repeats):
            for name, solver in (("solve", solve), ("real", solve_real), ("control", solve)):
                seconds, cpu_seconds, found = seconds_of(partial(instance.run, solver))
                turns[name].append(seconds)
                if name == "solve":
                    times["cpu"].append(cpu_seconds)
                whole, real = (whole, found) if name == "real" else (found, real)
        lp_seconds, _, lp = seconds_of(program.solve)
        for name, values in turns.items():
            times[name] += values
        times["lp"].append(lp_seconds)
        slowest = max(slowest, statistics.median(turns["solve"]))
        gaps.append(abs(real.step_seconds / lp - 1))
        integer_gaps.append(whole.step_seconds / real.step_seconds - 1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "ranks": ranks,
        "instances": instances,
        "seconds": medians["solve"],
        "control_seconds": medians["control"],
        "cpu_seconds": medians["cpu"],
        "fastest_seconds": min(times["solve"]),
        "slowest_instance_seconds": slowest,
        "real_seconds": medians["real"],
        "lp_seconds": medians["lp"],
        "gap": max(gaps),
        "integer_gap": max(integer_gaps),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="time to find the best split, and its gaps")
    parser.add_argument("--ranks", default="10,100,1000,10000", help="default %(default)s")
    parser.add_argument("--instances", type=int, default=5, help="random clusters of each size")
    parser.add_argument("--repeats", type=int, default=15, help="turns that are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the cases there")
    options = parser.parse_args(arguments)

    cases, shown = [], []
    for ranks in map(int, options.ranks.split(",")):
        case = measure(ranks, options.instances, options.repeats, options.seed)
        cases.append(case)
        shown.append(
            [
                f"{ranks:,}",
                f"{1e3 * case['seconds']:.2f}",
                f"{case['control_seconds'] / case['seconds']:.3f}",
                f"{1e3 * case['cpu_seconds']:.2f}",
                f"{1e3 * case['fastest_seconds']:.2f}",
                f"{1e3 * case['slowest_instance_seconds']:.2f}",
                f"{1e3 * case['real_seconds']:.2f}",
                f"{1e3 * case['lp_seconds']:.1f}",
                f"{case['lp_seconds'] / case['seconds']:.0f}",
                f"{case['gap']:.1e}",
                f"{case['integer_gap']:.1e}",
            ]
        )
    print_table(
        [
            "ranks",
            "solve ms",
            "control",
            "CPU ms",
            "fastest ms",
            "slowest instance ms",
            "real ms",
            "linprog ms",
            "times faster",
            "gap",
            "integer gap",
        ],
        shown,
    )
    if options.json:
        write_json(options.json, cases)


if __name__ == "__main__":
    main()
