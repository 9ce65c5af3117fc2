"""Does ``policy="model"`` end where a sweep over all options would have ended?

    python benchmarks/policy.py [--objective gain,residual] [--json FILE]

Ranks on hosts of a lab (``benchmarks/lab``: network namespaces, links shaped to --rate; root and
iproute2) train the same network on scikit-learn's digits many times over in one job: without
compression, with every fixed factor and exchange, and with ``policy="model"`` once for each
objective. Every training first does --windows windows (default 2) by itself, after which the
policy has made its choice and makes no other. Then they take turns of a few steps, as training
does, --rounds times, in which step seconds are taken (medians; the first step of a turn is left
out). Then each takes a few more, in which gain and residual ratio are measured exactly, over all
coordinates:

    gain   sum over ranks of ||what is sent||^2 / sum over ranks of ||a||^2
    rho    ||sum over ranks of e|| / ||sum over ranks of r g||
    J      step seconds / gain, or step seconds * (1 + kappa * rho^p)

``of_best`` is J of the policy over the J of the sweep's best option; the bar is 1.05. The best
option is the one of half of the turns, and both Js come from the other half, as the least of many
noisy numbers is too small; this is done both ways, and the mean counts. ``control`` is the best
option against itself: its seconds in every second turn over those in the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.lab import Lab, LabError, LaunchError, run_ranks, why_not  # noqa: E402
from benchmarks.tables import print_table, write_json  # noqa: E402

OBJECTIVES = ("gain", "residual")
TURN_STEPS = 4
EXACT_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="100mbit", help="of every link (default 100mbit)")
    parser.add_argument("--objective", default="gain,residual")
    parser.add_argument("--min-cf", type=float, default=10.0)
    parser.add_argument("--max-cf", type=float, default=640.0)
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768, help="width of the two hidden layers")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--launcher", choices=("gloo", "mpi"), default="gloo")
    parser.add_argument("--loopback", action="store_true", help="use no lab")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.objective.split(",")) - set(OBJECTIVES)
    if unknown:
        parser.error(f"--objective {options.objective}: known are {', '.join(OBJECTIVES)}")
    if options.worker:
        work(options)
        return
    problem = "--loopback was given" if options.loopback else why_not()
    where = f"on loopback ({problem})" if problem else f"links of {options.rate}"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "cases.json"
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        try:
            with (
                nullcontext()
                if problem
                else Lab(options.ranks, options.rate, name="hetpol", subnet="10.97.0") as lab
            ):
                run_ranks(
                    [*command, "--worker", str(output)],
                    options.ranks,
                    lab=lab,
                    launcher=options.launcher,
                    timeout_seconds=3600.0,
                )
        except (LabError, LaunchError) as error:
            sys.exit(str(error))
        result = json.loads(output.read_text())
    print(f"{options.ranks} ranks, {where}, {result['elements']:,} parameters")
    print_table(
        ["training", "option", "ms a step", "gain", "rho", "J gain", "J residual"],
        [
            [
                case["training"],
                case["option"],
                f"{case['seconds'] * 1e3:.1f}",
                f"{case['gain']:.3f}",
                f"{case['rho']:.2f}",
                f"{case['J gain'] * 1e3:.1f}",
                f"{case['J residual'] * 1e3:.1f}",
            ]
            for case in result["cases"]
        ],
    )
    print_table(
        ["objective", "policy chose", "best of sweep", "J / best", "control"],
        [
            [v["objective"], v["chosen"], v["best"], f"{v['of_best']:.3f}", f"{v['control']:.3f}"]
            for v in result["verdicts"]
        ],
    )
    if options.json:
        write_json(options.json, [*result["cases"], *result["verdicts"]])


def work(options: argparse.Namespace) -> None:
    """On a rank: all trainings, one after the other; rank 0 writes what came out."""
    import horovod.torch as hvd
    import torch

    import hvd_hetero as het
    from hvd_hetero.compression.spec import Adaptive
    from hvd_hetero.planning.objective import default_penalty

    hvd.init()
    torch.set_num_threads(1)
    kind = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.AdamW
    penalty = default_penalty(options.optimizer, options.lr)
    ladder = Adaptive(min_cf=options.min_cf, max_cf=options.max_cf).ladder()

    def fixed(option: tuple[float, str] | None) -> Any:
        if option is None:
            return het.Compression.adaptive(dense_steps=10**6)
        return het.Compression.topk(option[0], exchange=option[1])

    sweep: list[tuple[float, str] | None] = [None]
    sweep += [(cf, how) for cf in ladder for how in ("allgather", "shared-index")]
    trainings = [
        Training("dense" if option is None else "fixed", kind, options, fixed(option))
        for option in sweep
    ]
    objectives = options.objective.split(",")
    for objective in objectives:
        compression = het.Compression.adaptive(
            policy="model",
            objective=objective,
            min_cf=options.min_cf,
            max_cf=options.max_cf,
            window=options.window,
        )
        trainings.append(Training(f"model, {objective}", kind, options, compression))
    for training in trainings:
        for _ in range(options.windows * options.window):
            training.step()
        training.decide_no_more()
    for _ in range(options.rounds):
        for training in trainings:
            training.turn()
    for training in trainings:
        for _ in range(EXACT_STEPS):
            training.step(exact=True)
    cases = [training.case(penalty) for training in trainings]
    swept, chosen = cases[: len(sweep)], cases[len(sweep) :]
    verdicts = []
    for objective, own in zip(objectives, chosen, strict=True):
        key = f"J {objective}"
        ratios = []
        for half, other in (("even", "odd"), ("odd", "even")):
            best = min(swept, key=lambda case: case[f"{key}, {half}"])
            ratios.append(own[f"{key}, {other}"] / best[f"{key}, {other}"])
        best = min(swept, key=lambda case: case[key])
        verdicts.append(
            {
                "objective": objective,
                "chosen": own["option"],
                "best": best["option"],
                "of_best": statistics.mean(ratios),
                "control": best[f"{key}, even"] / best[f"{key}, odd"],
            }
        )
    if hvd.rank() == 0:
        elements = sum(p.numel() for p in network(options).parameters())
        result = {"elements": elements, "cases": cases, "verdicts": verdicts}
        Path(options.worker).write_text(json.dumps(result))
    hvd.shutdown()


def network(options: argparse.Namespace) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, options.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(options.hidden, options.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(options.hidden, 10),
    )


class Training:
    """One model with its optimizer, and exact measures of what its compression does."""

    def __init__(self, name: str, kind: Any, options: argparse.Namespace, compression: Any) -> None:
        import horovod.torch as hvd
        import torch
        from sklearn.datasets import load_digits

        import hvd_hetero as het

        self.name = name
        self.turns: list[list[float]] = []
        self.energies = torch.zeros(4, dtype=torch.float64)  # sent, of all, left, fresh
        images, labels = load_digits(return_X_y=True)
        self.x = torch.tensor(images / 16.0, dtype=torch.float32)
        self.y = torch.tensor(labels)
        self.random = torch.Generator().manual_seed(hvd.rank())
        self.model = network(options)
        self.optimizer: Any = het.DistributedOptimizer(
            kind(self.model.parameters(), lr=options.lr),
            named_parameters=self.model.named_parameters(),
            compression=compression,
            bucket_bytes=2**20,
        )

    def decide_no_more(self) -> None:
        """Stay with the option in force."""
        self.optimizer._hetero._coordinator.control = None

    def turn(self) -> None:
        """Take some steps one after the other, and keep the seconds of all but the first."""
        import horovod.torch as hvd

        hvd.barrier()
        times = []
        for _ in range(TURN_STEPS):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        self.turns.append(times[1:])

    def step(self, exact: bool = False) -> None:
        """Train one step; ``exact``: look at what is sent and what is left on all ranks."""
        import horovod.torch as hvd
        import torch

        rows = torch.randint(0, len(self.x), (32,), generator=self.random)
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.x[rows]), self.y[rows])
        loss.backward()
        exchanger = self.optimizer._hetero.exchanger
        before, own = None, None
        if exact and exchanger.mode.cf is not None:
            # Local gradients lie in p.grad until synchronize() writes what was summed.
            own = flat(exchanger, lambda member: member.parameter.grad) / hvd.size()
            before = residuals(exchanger)
        self.optimizer.step()
        if own is None or before is None:
            return
        after = residuals(exchanger)
        a = own + before
        energies = torch.stack([(a - after).square().sum(), a.square().sum()])
        energies = hvd.allreduce(energies, op=hvd.Sum, name="energies")
        held = hvd.allreduce(after, op=hvd.Sum, name="held").square().sum()
        fresh = hvd.allreduce(own, op=hvd.Sum, name="fresh").square().sum()
        self.energies += torch.stack([*energies, held, fresh])

    def case(self, penalty: Any) -> dict[str, Any]:
        """Return what was measured; the slowest rank's view of the seconds counts."""
        import horovod.torch as hvd

        mode = self.optimizer._hetero.exchanger.mode
        parts = {"": self.turns, ", even": self.turns[::2], ", odd": self.turns[1::2]}
        own = {name: statistics.median(itertools.chain(*turns)) for name, turns in parts.items()}
        by_rank = hvd.allgather_object(own, name="seconds")
        sent, everything, left, fresh = self.energies.tolist()
        gain = sent / everything if everything else 1.0
        rho = (left / fresh) ** 0.5 if fresh else 0.0
        case = {
            "training": self.name,
            "option": "dense" if mode.cf is None else f"CF {mode.cf:g} {mode.strategy}",
            "cf": mode.cf,
            "strategy": "dense" if mode.cf is None else mode.strategy,
            "gain": gain,
            "rho": rho,
        }
        for part in parts:
            seconds = max(one[part] for one in by_rank)
            case |= {
                f"seconds{part}": seconds,
                f"J gain{part}": seconds / gain,
                f"J residual{part}": seconds * penalty.factor(rho),
            }
        return case


def residuals(exchanger: Any) -> Any:
    import torch

    return torch.cat([bucket.feedback.residual.double() for bucket in exchanger.buckets])


def flat(exchanger: Any, what: Any) -> Any:
    import torch

    return torch.cat(
        [what(m).double().flatten() for bucket in exchanger.buckets for m in bucket.members]
    )


if __name__ == "__main__":
    main()
