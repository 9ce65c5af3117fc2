"""Step time on ranks of unequal speed: the Balancer, an even split, LB-BSP and the ideal.

    python benchmarks/balance.py [--cases NAME,NAME,...] [--ranks 2,4] [--json FILE]

Ranks train with ``DistributedOptimizer`` and a ``Balancer`` each, all methods in one job and in
turns of a few steps:

even     the same number of samples for every rank; twice, as the control
lb-bsp   LB-BSP (Chen et al., SoCC 2020): after every window a few samples go from the rank that
         computes longest to the one that computes shortest. It knows nothing of the exchange. It
         is given as many windows as it wants before it is timed, and an ever smaller delta, so
         this is where its rule ends and not how slowly it gets there
ours     the Balancer as it comes: even at first, nothing known. Timed after --windows windows
ideal    the best split by lines through what each rank measured alone, without any exchange, and
         by the seconds of the exchange alone

free         little is exchanged: computing decides
free-unlike  the same where ranks spend different parts of a step before their first gradient
slowdown     the fastest rank of "free" becomes three times slower; timed --windows windows later
bound        the exchange that overlaps with backward decides on ranks that are late with their
             first gradient, and those parts differ; links of --rate, which needs root and
             iproute2 (``benchmarks/lab``)
bound-alike  the same where they are alike: then equal compute time is the best split as well, and
             there is nothing to win; left out unless asked for

--speeds sleep (default): layers sleep, forward and backward, in proportion to the local batch and
to the rank's slowness; gradients become ready layer by layer, and their exchange is real. Ranks
that sleep need no core each. --speeds cgroup: layers work, and each rank has a share of the CPU;
needs root, and a machine with nothing else to do. On a busy machine --scale 3 makes everything
three times as long, and what the others do to it smaller.

``ratio`` is the median over rounds of a method's seconds / the ideal's in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.balance_rules import (  # noqa: E402
    CLUSTERS,
    Cluster,
    half_spread,
    paired_ratio,
    verdicts_of,
)
from benchmarks.lab import Lab, LabError, LaunchError, run_ranks, why_not  # noqa: E402
from benchmarks.tables import print_table, write_json  # noqa: E402

CASES = ("free", "slowdown", "free-unlike", "bound", "bound-alike")
DEFAULT_CASES = CASES[:-1]  # the last is to explain the others, and takes a minute more
SAMPLES_PER_RANK = 32
SAMPLE_SECONDS, FIXED_SECONDS = 4e-3, 6e-3  # of a rank of speed 1; the second of every rank
LAYERS = 8
FREE_ELEMENTS, BOUND_ELEMENTS = 1_000, 40_000  # of a layer
SLOWDOWN = 3.0
CPU_USED = 0.8  # of all cores, with --speeds cgroup; the rest is for exchanges


def main() -> None:
    options = arguments()
    cases: list[dict[str, Any]] = []
    for ranks in options.ranks:
        for job in jobs(options, ranks):
            cases += run_job(options, ranks, job)
    if not cases:
        sys.exit("no case could be measured")
    print_cases(cases)
    failed = print_verdicts(cases)
    if options.json:
        write_json(options.json, cases)
    print(f"{failed} bars missed" if failed else "all bars met")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=names, default=list(DEFAULT_CASES), metavar="NAME,NAME,...")
    parser.add_argument("--ranks", type=numbers, default=[2, 4], metavar="N,N")
    parser.add_argument("--speeds", choices=("sleep", "cgroup"), default="sleep")
    parser.add_argument("--windows", type=int, default=3, help="of ours before it is timed")
    parser.add_argument("--window-steps", type=int, default=10, help="steps of ours in a window")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each method (default 4)")
    parser.add_argument("--steps", type=int, default=5, help="timed in a turn of the others")
    parser.add_argument("--scale", type=float, default=1.0, help="of all seconds (default 1)")
    parser.add_argument("--delta", type=int, default=5, help="samples LB-BSP moves at first")
    parser.add_argument("--rate", default="200mbit", help="of the links of bound (default 200mbit)")
    parser.add_argument("--bucket-bytes", type=int, help="of the optimizer; default: one layer")
    parser.add_argument("--lab-name", default="hetbal")
    parser.add_argument("--lab-subnet", default="10.96.0")
    parser.add_argument("--json", metavar="FILE", help="write the cases")
    options = parser.parse_args()
    unknown = [ranks for ranks in options.ranks if ranks not in CLUSTERS["alike"]]
    if unknown:
        parser.error(f"--ranks {unknown[0]}: there are clusters of {sorted(CLUSTERS['alike'])}")
    least = {"scale": 0.1, "windows": 1, "window_steps": 3, "rounds": 2, "steps": 1, "delta": 1}
    for name, minimum in least.items():
        if getattr(options, name) < minimum:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(options, name)}: at least {minimum}")
    return options


def names(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: known are {', '.join(CASES)}")
    return chosen


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# ---- jobs ---------------------------------------------------------------------------------------


def jobs(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """Return the jobs that measure the chosen cases; a slowdown follows "free" in its job."""
    chosen, even_speed = options.cases, [1.0] * ranks
    found = []
    if "free" in chosen or "slowdown" in chosen:
        phases = [{"case": "free", "slowness": even_speed, "measured": "free" in chosen}]
        if "slowdown" in chosen:
            slow = [*even_speed[:-1], SLOWDOWN]  # clusters have their fastest rank last
            phases.append({"case": "slowdown", "slowness": slow, "measured": True})
        found.append(
            {"cluster": CLUSTERS["alike"][ranks], "elements": FREE_ELEMENTS, "phases": phases}
        )
    for case, kind, elements in (
        ("free-unlike", "unlike", FREE_ELEMENTS),
        ("bound", "unlike", BOUND_ELEMENTS),
        ("bound-alike", "alike", BOUND_ELEMENTS),
    ):
        if case in chosen:
            phases = [{"case": case, "slowness": even_speed, "measured": True}]
            found.append({"cluster": CLUSTERS[kind][ranks], "elements": elements, "phases": phases})
    return found


def run_job(
    options: argparse.Namespace, ranks: int, job: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Run ``balance_ranks.py`` on ``ranks`` ranks; return its cases, none where it cannot run."""
    cluster: Cluster = job["cluster"]
    bound = job["elements"] == BOUND_ELEMENTS
    sent_share = 2 * (ranks - 1) / ranks  # of the bytes, by a ring; alike seconds for all ranks
    elements = round(options.scale * job["elements"] / sent_share)
    cgroup = options.speeds == "cgroup"
    title = ", ".join(phase["case"] for phase in job["phases"])
    problem = why_not() if bound or cgroup else ""
    if problem:
        print(
            f"{title}, {ranks} ranks: left out, as it needs shaped links or CPU shares: {problem}"
        )
        return []
    cores = CPU_USED * len(os.sched_getaffinity(0))
    shares = [cores * speed / sum(cluster.speeds) for speed in cluster.speeds]
    lab = Lab(
        ranks,
        options.rate if bound else "10gbit",
        name=options.lab_name,
        subnet=options.lab_subnet,
        cpu_shares=shares if cgroup else (),
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        passed = {
            "cluster": asdict(cluster),
            "phases": job["phases"],
            "global_batch_size": SAMPLES_PER_RANK * ranks,
            "sample_seconds": options.scale * SAMPLE_SECONDS,
            "fixed_seconds": options.scale * FIXED_SECONDS,
            "layers": LAYERS,
            "layer_elements": elements,
            "bucket_bytes": options.bucket_bytes or 4 * elements,
            "windows": options.windows,
            "window_steps": options.window_steps,
            "rounds": options.rounds,
            "turn_steps": options.steps + 1,
            "delta_samples": options.delta,
            "cpu_groups": [f"{lab.name}{rank + 1}" for rank in range(ranks)] if cgroup else [],
            "cpu_shares": shares,
            "log": str(Path(folder) / "log.jsonl"),
            "output": str(output),
        }
        command = [sys.executable, str(REPOSITORY / "benchmarks" / "balance_ranks.py")]
        try:
            with nullcontext() if not (bound or cgroup) else lab as network:
                run_ranks(
                    [*command, json.dumps(passed)],
                    ranks,
                    lab=network,
                    env={"HOROVOD_LOG_LEVEL": "error"},
                    timeout_seconds=1800.0,
                )
        except (LabError, LaunchError) as error:
            sys.exit(f"{title}, {ranks} ranks: {error}")
        result = json.loads(output.read_text())
    return finished(result, ranks, cluster)


def finished(result: Mapping[str, Any], ranks: int, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the cases of a job: medians over rounds, ratios of turns of the same round."""
    cases = []
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    for row in rows:
        turns = {one["method"]: one["turns"] for one in rows if one["case"] == row["case"]}
        if row["method"] == "even again":
            continue
        again, even = turns["even again"], turns["even"]
        errors = [
            predicted / seconds - 1.0
            for predicted, seconds in zip(row["predicted"], row["turns"], strict=True)
            if predicted is not None
        ]
        known = [predicted for predicted in row["predicted"] if predicted is not None]
        cases.append(
            {
                "case": row["case"],
                "ranks": ranks,
                "speeds": list(cluster.speeds),
                "forward_shares": list(cluster.forward_shares),
                "method": row["method"],
                "local_batches": row["local_batches"],
                "seconds": statistics.median(row["turns"]),
                "ideal_seconds": statistics.median(turns["ideal"]),
                "ratio_to_ideal": paired_ratio(row["turns"], turns["ideal"]),
                "ratio_to_lb_bsp": paired_ratio(row["turns"], turns["lb-bsp"]),
                "control_seconds": statistics.median(again),
                "control_ratio": paired_ratio(again, even),
                "control_half_spread": half_spread(
                    [b / a for a, b in zip(even, again, strict=True)]
                ),
                "predicted_seconds": statistics.median(known) if known else None,
                "prediction_error": statistics.median(errors) if errors else None,
                "expected_seconds": row["expected_seconds"],
                "windows": row["windows"],
                "turn_seconds": row["turns"],
                "learning_seconds": row["learning_seconds"],
                "overlapped_seconds": row["overlapped_seconds"],
                "final_seconds": row["final_seconds"],
                "models": row["models"],
                "window_records": [
                    record
                    for record in result["windows"]
                    if row["method"] == "ours"
                    and row["steps"][0] < record["step"] <= row["steps"][1]
                ],
            }
        )
    return cases


# ---- what is printed ----------------------------------------------------------------------------


def print_cases(cases: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for case in cases:
        error = case["prediction_error"]
        predicted = case["predicted_seconds"]
        first = case["method"] == "even"
        rows.append(
            [
                case["case"] if first else "",
                ":".join(f"{speed:g}" for speed in case["speeds"]) if first else "",
                case["method"],
                " ".join(str(samples) for samples in case["local_batches"]),
                f"{case['seconds'] * 1e3:.1f}",
                f"{case['control_ratio']:.3f}" if first else "",
                f"{case['ratio_to_ideal']:.3f}",
                "" if predicted is None else f"{predicted * 1e3:.1f}",
                "" if error is None else f"{error:+.1%}",
                f"{case['windows'] or ''}",
                f"{case['overlapped_seconds'] * 1e3:.0f}+{case['final_seconds'] * 1e3:.0f}"
                if first
                else "",
            ]
        )
    header = ["case", "speeds", "method", "samples", "ms", "control", "/ ideal", "predicted"]
    print_table([*header, "error", "windows", "T_o+T_u ms"], rows)


def print_verdicts(cases: Sequence[Mapping[str, Any]]) -> int:
    """Print every bar, what was measured and whether it is met; return how many are missed."""
    verdicts = verdicts_of(cases)
    print_table(
        ["bar", "case", "measured", "at most", ""],
        [
            [
                verdict.bar,
                verdict.case,
                f"{verdict.value:.3f}",
                f"{verdict.limit:.3f}",
                "pass" if verdict.passed else "FAIL",
            ]
            for verdict in verdicts
        ],
    )
    return sum(not verdict.passed for verdict in verdicts)


if __name__ == "__main__":
    main()
