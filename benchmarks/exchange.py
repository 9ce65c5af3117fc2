"""Seconds and bytes of an exchange: dense, allgather and shared-index, predicted and measured.

    python benchmarks/exchange.py [--json FILE]                       2, 4 and 8 ranks
    python benchmarks/exchange.py --simulate [--model FILE]           the model up to 4,096 ranks

Ranks sit on hosts of a lab (``benchmarks/lab``: network namespaces, every link shaped to --rate);
that needs root and iproute2. Without them all ranks share this machine's loopback: seconds then
say little, and bytes are accounted, not measured.

Every number of ranks first measures its cost model, as training does at its start (under a
second), refines it by a few steps with buckets half as long, then runs all cases in turn, a few
steps of each with a pause of 2 to 4 ms in place of each backward pass.

seconds            of the exchange of one bucket, from the launch of packed bytes on the rank that
                   launches last until that rank has all it needs: what it adds to a step; median
                   over steps. Unpacking and adding come on top (decode_seconds): ranks that share
                   a core do that slower than those of a cluster
predicted_seconds  what the refined model says of it; it was fitted to other sizes
predicted_at_start_seconds  what it said before the steps
bytes_per_rank     what the interface of the rank that received most has counted in that time,
                   median of two rounds, TCP's headers and Horovod's messages about the exchange
                   included. Counted in a job of its own, where 32 buckets of the case are under way
                   at once (dense: one), as in a step, and Horovod looks for work every 50 ms, not
                   every ms: its ranks talk each time, exchange or not

The control runs dense against itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.lab import Lab, LabError, LaunchError, run_ranks, why_not  # noqa: E402
from benchmarks.lab.launch import LAUNCHERS  # noqa: E402
from benchmarks.tables import print_table, write_json  # noqa: E402
from hvd_hetero.compression.topk import k_for  # noqa: E402
from hvd_hetero.compression.wire import VALUE_FORMATS  # noqa: E402
from hvd_hetero.planning.cost_model import CostModel, LocalCosts, dense_bytes  # noqa: E402
from hvd_hetero.planning.sparse_bytes import sparse_bytes  # noqa: E402
from hvd_hetero.planning.step_time import collective_calls  # noqa: E402

SIMULATED_RANKS = tuple(2**power for power in range(1, 13))
CONTROL = "dense again"
BYTE_ROUNDS = 2
RARE_CYCLES = {"HOROVOD_CYCLE_TIME": "50"}


def main() -> None:
    options = arguments()
    try:
        cases = simulate(options) if options.simulate else measure(options)
    except (LabError, LaunchError) as error:
        sys.exit(str(error))
    if options.json:
        write_json(options.json, cases)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers(int), default=[2, 4, 8], metavar="N,N,...")
    parser.add_argument("--cfs", type=numbers(float), default=[10.0, 100.0, 1000.0])
    parser.add_argument("--elements", type=numbers(int), default=[2_000_000])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate", default="200mbit", help="of every link (default 200mbit)")
    parser.add_argument("--values", choices=VALUE_FORMATS, default="float16")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="gloo")
    parser.add_argument("--loopback", action="store_true", help="use no lab")
    parser.add_argument("--lab-name", default="hetlab")
    parser.add_argument("--lab-subnet", default="10.98.0")
    parser.add_argument("--simulate", action="store_true", help="continue the model to many ranks")
    parser.add_argument("--model", metavar="FILE", help="simulate from a model saved before")
    parser.add_argument("--save-model", metavar="FILE", help="save that of the most ranks")
    parser.add_argument("--json", metavar="FILE", help="write the cases")
    return parser.parse_args()


def numbers(kind: type) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return parse


# ---- measured -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the jobs for every number of ranks, print tables, return the cases."""
    cases = []
    for ranks in options.ranks:
        timed = run_job(options, ranks, options.rounds, predict=True)
        problem = timed["problem"]
        if options.save_model:
            saved = {"model": timed["model"], "local": timed["local"]}
            Path(options.save_model).write_text(json.dumps(saved, indent=1) + "\n")
        counted = timed
        if not problem:
            counted = run_job(options, ranks, BYTE_ROUNDS, predict=False, env=RARE_CYCLES)
        pairs = zip(timed["cases"], counted["cases"], strict=True)
        added = [finished(case, other["steps"], problem) for case, other in pairs]
        cases += added
        print(
            f"{ranks} ranks, {where(options, problem)}; cost model measured in "
            f"{timed['model_seconds']:.2f} s; bytes {added[0]['bytes_from']}; idle, each rank "
            f"receives up to {timed['idle_bytes_per_second'] / 1e3:.0f} kB/s from Horovod"
        )
        print_cases(added)
    print_growth(cases)
    errors = [abs(case["prediction_error"]) for case in cases if case["strategy"] != CONTROL]
    print(
        f"predicted against measured, {len(errors)} cases: median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}, within 20 %: "
        f"{sum(error <= 0.2 for error in errors)}"
    )
    return cases


def run_job(
    options: argparse.Namespace,
    ranks: int,
    rounds: int,
    *,
    predict: bool,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``exchange_ranks.py`` on ``ranks`` ranks; return what it has written, and the problem
    that has kept it from shaped links."""
    problem = "--loopback was given" if options.loopback else why_not()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        job = {
            "elements": options.elements,
            "cfs": options.cfs,
            "rounds": rounds,
            "values_as": options.values,
            "interface": "" if problem else "eth0",
            "output": str(output),
            "predict": predict,
        }
        command = [sys.executable, str(REPOSITORY / "benchmarks" / "exchange_ranks.py")]
        lab = Lab(ranks, options.rate, name=options.lab_name, subnet=options.lab_subnet)
        with nullcontext() if problem else lab as network:
            run_ranks(
                [*command, json.dumps(job)],
                ranks,
                lab=network,
                launcher=options.launcher,
                env={"HOROVOD_LOG_LEVEL": "error", **(env or {})},
            )
        result: dict[str, Any] = json.loads(output.read_text())
    return result | {"problem": problem}


def where(options: argparse.Namespace, problem: str) -> str:
    if problem:
        return f"on loopback, without shaped links ({problem})"
    return f"links of {options.rate}"


def finished(case: dict[str, Any], counted: dict[str, Any], problem: str) -> dict[str, Any]:
    """Return a case with the medians of its steps; bytes from the steps ``counted``."""
    steps = case["steps"]
    seconds = statistics.median(steps["seconds"])
    accounted = statistics.median(steps["accounted_bytes"])
    received = sent = None
    if not problem:
        received, sent = (
            statistics.median(counted[f"{way}_bytes"]) for way in ("received", "sent")
        )
    return {
        **{key: value for key, value in case.items() if key != "steps"},
        "seconds": seconds,
        "fastest_seconds": min(steps["seconds"]),
        "slowest_seconds": max(steps["seconds"]),
        "decode_seconds": statistics.median(steps["decode_seconds"]),
        "prediction_error": case["predicted_seconds"] / seconds - 1.0,
        "prediction_error_at_start": case["predicted_at_start_seconds"] / seconds - 1.0,
        "bytes_per_rank": accounted if received is None else received,
        "sent_bytes_per_rank": sent,
        "accounted_bytes_per_rank": accounted,
        "bytes_from": "accounted" if problem else "measured at the interfaces",
    }


def print_cases(cases: list[dict[str, Any]]) -> None:
    dense = {c["elements"]: c["seconds"] for c in cases if c["strategy"] == "dense"}
    rows = []
    for case in sorted(cases, key=lambda one: one["elements"]):
        rows.append(
            [
                f"{case['elements']:,}",
                case["strategy"],
                "" if case["cf"] is None else f"{case['cf']:g}",
                f"{case['seconds'] * 1e3:.1f}",
                f"{case['fastest_seconds'] * 1e3:.1f}-{case['slowest_seconds'] * 1e3:.1f}",
                f"{case['predicted_seconds'] * 1e3:.1f}",
                f"{case['prediction_error']:+.0%}",
                f"{case['prediction_error_at_start']:+.0%}",
                f"{case['seconds'] / dense[case['elements']]:.3f}",
                f"{case['decode_seconds'] * 1e3:.1f}",
                f"{case['bytes_per_rank'] / 1e3:,.1f}",
                f"{case['accounted_bytes_per_rank'] / 1e3:,.1f}",
            ]
        )
    header = [
        "elements",
        "strategy",
        "cf",
        "ms",
        "range",
        "predicted",
        "error",
        "at start",
        "/ dense",
        "decode",
    ]
    print_table([*header, "kB a rank", "accounted"], rows)


def print_growth(cases: list[dict[str, Any]]) -> None:
    """Print the bytes of the most ranks against those of the fewest."""
    few, many = min(c["ranks"] for c in cases), max(c["ranks"] for c in cases)
    if few == many:
        return
    by_key = {(c["ranks"], c["elements"], c["strategy"], c["cf"]): c for c in cases}
    rows = []
    for (ranks, elements, strategy, cf), case in by_key.items():
        if ranks != few or strategy == CONTROL:
            continue
        other = by_key[many, elements, strategy, cf]
        rows.append(
            [
                f"{elements:,}",
                strategy,
                "" if cf is None else f"{cf:g}",
                f"{other['bytes_per_rank'] / case['bytes_per_rank']:.2f}",
                f"{other['accounted_bytes_per_rank'] / case['accounted_bytes_per_rank']:.2f}",
            ]
        )
    print(f"bytes a rank at {many} ranks against {few}")
    print_table(["elements", "strategy", "cf", "ratio", "accounted"], rows)


# ---- simulated ----------------------------------------------------------------------------------


def simulate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Continue a model to many ranks; a saved one, or that of the most ranks, measured now."""
    if options.model:
        saved = json.loads(Path(options.model).read_text())
        print(f"model of {options.model}, measured with {saved['model']['ranks']} ranks")
    else:
        saved = run_job(options, max(options.ranks), 0, predict=True)
        where_measured = where(options, saved["problem"])
        print(f"model measured with {max(options.ranks)} ranks, {where_measured}")
    measured, local = CostModel.from_dict(saved["model"]), LocalCosts.from_dict(saved["local"])
    cases = [
        simulated(strategy, elements, cf, measured.at_ranks(ranks), local, options.values)
        for elements in options.elements
        for ranks in SIMULATED_RANKS
        for cf in options.cfs
        for strategy in ("dense", "allgather", "shared-index")
        if strategy != "dense" or cf == options.cfs[0]
    ]
    for elements in options.elements:
        print(f"{elements:,} elements: predicted ms with decoding (kB a rank)")
        columns = [("dense", None)]
        columns += [(s, cf) for cf in options.cfs for s in ("allgather", "shared-index")]
        rows = []
        for ranks in SIMULATED_RANKS:
            row = [str(ranks)]
            for column in columns:
                case = next(
                    c
                    for c in cases
                    if (c["elements"], c["ranks"]) == (elements, ranks)
                    and (c["strategy"], c["cf"]) == column
                )
                whole = case["predicted_seconds"] + case["predicted_decode_seconds"]
                milliseconds = whole * 1e3
                row.append(f"{milliseconds:,.1f} ({case['bytes_per_rank'] / 1e3:,.0f})")
            rows.append(row)
        titles = [s if cf is None else f"{s} {cf:g}" for s, cf in columns]
        print_table(["ranks", *titles], rows)
    return cases


def simulated(
    strategy: str,
    elements: int,
    cf: float,
    model: CostModel,
    local: LocalCosts,
    values_as: str,
) -> dict[str, Any]:
    ranks, k = model.ranks, k_for(elements, cf)
    entries = {"dense": 0, "allgather": ranks * k, "shared-index": k}[strategy]
    decode = local.decode_seconds(elements, entries) if entries else 0.0
    calls = collective_calls(strategy, ranks, k, elements, torch.float32, values_as)
    seconds = model.seconds(calls)
    if strategy == "dense":
        bytes = dense_bytes(ranks, elements)
    else:
        bytes = sparse_bytes(ranks, k, elements, torch.float32, values_as, strategy)
    return {
        "strategy": strategy,
        "ranks": ranks,
        "elements": elements,
        "cf": None if strategy == "dense" else cf,
        "seconds": None,
        "predicted_seconds": seconds,
        "predicted_decode_seconds": decode,
        "bytes_per_rank": bytes,
        "bytes_from": "accounted",
        "simulated": True,
    }


if __name__ == "__main__":
    main()
