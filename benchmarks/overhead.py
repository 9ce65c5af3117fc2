"""Step time against stock Horovod where nothing can be won: the plugin must cost nothing.

    python benchmarks/overhead.py [--ranks 4] [--pairs 21] [--json FILE]

Ranks on one machine exchange through its memory, so compression can win nothing. Starting
adaptive, the plugin has to find that out (within --settle steps) and then keep Horovod's own
speed. Rounds of stock, plugin and stock again alternate in one run; ``ratio`` is the median over
rounds of plugin / stock, ``control`` of stock again / stock, the A/A control. The bar is
1.03 plus the control's half-spread (half the distance of its quartiles).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

STEPS_PER_ROUND = 5
FEATURES, HIDDEN, CLASSES = 64, 1024, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=21, help="rounds that count (default 21)")
    parser.add_argument("--settle", type=int, default=50, help="plugin steps before them")
    parser.add_argument("--policy", choices=("gravac", "model"), default="gravac")
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank and step")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: at least 2, as their spread is the control")
    if not {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK"} & os.environ.keys():
        launcher = str(REPOSITORY / "tools" / "mpirun.py")
        script = [str(Path(__file__).resolve()), *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, launcher, "-n", str(options.ranks), *script])
    measure(options)


def measure(options: argparse.Namespace) -> None:
    import horovod.torch as hvd
    import torch

    import hvd_hetero as het
    from benchmarks.tables import print_table, write_json

    hvd.init()
    torch.set_num_threads(1)

    def training(wrap: Callable[..., torch.optim.Optimizer]) -> tuple[Callable[[], float], object]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN, HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN, CLASSES),
        )
        optimizer = wrap(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            named_parameters=model.named_parameters(),
        )
        x = torch.randn(options.batch, FEATURES)
        y = torch.randint(0, CLASSES, (options.batch,))

        def step() -> float:
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            return time.perf_counter() - start

        return step, optimizer

    stock, _ = training(hvd.DistributedOptimizer)
    plugin, optimizer = training(
        lambda *args, **named: het.DistributedOptimizer(
            *args, **named, compression=het.Compression.adaptive(policy=options.policy)
        )
    )
    for _ in range(options.settle):
        plugin()
    for _ in range(10):
        stock()

    rounds: list[tuple[float, float, float]] = []
    for number in range(options.pairs):
        order = [0, 1, 2]
        order = order[number % 3 :] + order[: number % 3]
        seconds = {}
        for which in order:
            step = plugin if which == 1 else stock
            step()  # the first after a change finds cold caches
            seconds[which] = statistics.median(step() for _ in range(STEPS_PER_ROUND))
        rounds.append((seconds[0], seconds[1], seconds[2]))

    if hvd.rank() == 0:
        ratios = [plugin_seconds / a for a, plugin_seconds, _ in rounds]
        controls = [b / a for a, _, b in rounds]
        quartiles = statistics.quantiles(controls, n=4)
        half_spread = (quartiles[2] - quartiles[0]) / 2
        ratio, control = statistics.median(ratios), statistics.median(controls)
        case = {
            "ranks": hvd.size(),
            "policy": options.policy,
            "pairs": options.pairs,
            "horovod_seconds": statistics.median(itertools.chain(*((a, b) for a, _, b in rounds))),
            "plugin_seconds": statistics.median(one for _, one, _ in rounds),
            "ratio": ratio,
            "control_ratio": control,
            "control_half_spread": half_spread,
            "bar": 1.03 + half_spread,
        }
        print_table(
            ["policy", "stock Horovod", "plugin", "ratio", "control", "half-spread", "bar"],
            [
                [
                    options.policy,
                    f"{case['horovod_seconds'] * 1e3:.1f} ms",
                    f"{case['plugin_seconds'] * 1e3:.1f} ms",
                    f"{ratio:.3f}",
                    f"{control:.3f}",
                    f"{half_spread:.3f}",
                    f"{case['bar']:.3f}",
                ]
            ],
        )
        mode = optimizer._hetero.exchanger.mode
        print("compression at the end:", "dense" if mode.cf is None else f"CF {mode.cf:g}")
        if options.json:
            write_json(options.json, [case])


if __name__ == "__main__":
    main()
