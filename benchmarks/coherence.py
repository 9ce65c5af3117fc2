"""What one rank's indices for all cost in gain and residual, simulated, and as it is predicted.

    python -m benchmarks.coherence [--ranks 2,4,8] [--cfs 10,50] [--json FILE]

Ranks with the same mean gradient and noise of their own, normal or with scales that differ by
coordinate, compress with error feedback until the residual is in its steady state: once each by
its own top-k, once all by that of a leader that changes every step. ``planning/worth.py`` predicts
the second from the first by the coherence of the residuals.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from benchmarks.tables import print_table, write_json
from hvd_hetero.compression.gain import Worth
from hvd_hetero.planning.worth import shared_worth

ELEMENTS = 20_000


def simulate(
    ranks: int, cf: int, signal: float, heavy: bool, shared: bool, random: np.random.Generator
) -> Worth:
    """Return what a factor is worth in steady state; ``signal``: mean over noise."""
    scale = np.exp(random.normal(0, 1.5, ELEMENTS)) if heavy else np.ones(ELEMENTS)
    mean = random.normal(0, signal, ELEMENTS) * scale
    residual = np.zeros((ranks, ELEMENTS), np.float32)
    k, steps = ELEMENTS // cf, 6 * cf + 100
    sums = np.zeros(5)  # kept, total, left together, left apart, fresh
    for step in range(steps):
        noise = random.standard_normal((ranks, ELEMENTS), np.float32) * scale
        gradient = ((mean + noise) / ranks).astype(np.float32)
        residual += gradient
        total = float(np.square(residual).sum())
        magnitudes = np.abs(residual)
        if shared:
            magnitudes = np.broadcast_to(magnitudes[step % ranks], magnitudes.shape)
        indices = np.argpartition(magnitudes, ELEMENTS - k, axis=1)[:, ELEMENTS - k :]
        kept = float(np.square(np.take_along_axis(residual, indices, 1)).sum())
        np.put_along_axis(residual, indices, 0.0, 1)
        if step > steps // 2:
            together, fresh = residual.sum(axis=0), gradient.sum(axis=0)
            squares = [np.dot(one, one) for one in (together, residual.ravel(), fresh)]
            sums += [kept, total, *map(float, squares)]
    kept, total, together, apart, fresh = sums
    return Worth(kept / total, (together / fresh) ** 0.5, together / (ranks * apart))


def main() -> None:
    parser = argparse.ArgumentParser(description="one rank's indices for all: cost and prediction")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--cfs", default="10,50")
    parser.add_argument("--signals", default="0.03,0.1,0.3,1.0", help="mean over noise")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cases = []
    for ranks in map(int, options.ranks.split(",")):
        for heavy in (False, True):
            for signal in map(float, options.signals.split(",")):
                for cf in map(int, options.cfs.split(",")):
                    own, shared = (
                        simulate(ranks, cf, signal, heavy, how, np.random.default_rng(0))
                        for how in (False, True)
                    )
                    gain, rho = shared_worth(own)
                    case = {"ranks": ranks, "cf": cf, "signal": signal, "heavy": heavy}
                    case |= {"coherence": own.coherence, "own_rho": own.rho, "own_gain": own.gain}
                    case |= {"rho": shared.rho, "predicted_rho": rho}
                    cases.append(case | {"gain": shared.gain, "predicted_gain": gain})
    print_table(
        list(cases[0]),
        [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in c.values()] for c in cases],
    )
    for what in ("rho", "gain"):
        errors = [abs(case[f"predicted_{what}"] / case[what] - 1.0) for case in cases]
        print(f"{what}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    if options.json:
        write_json(options.json, cases)


if __name__ == "__main__":
    main()
