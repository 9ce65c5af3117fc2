"""How well, and how cheaply, a sample's shadow residuals tell gain and rho of every CF.

A model is trained without compression; its gradients are dealt to simulated ranks. For every
compression factor each rank keeps a real residual of the whole model, run to steady state; beside
them run the samples. Both see the same gradients, so every difference is the sample's.

    python -m benchmarks.shadow [--model text] [--steps 2000] [--samples 16384,65536] [--json FILE]

The cost is that of all factors together, per step, against selection, feedback and packing of the
same gradients at CF 100, in one process and in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.tables import print_table, write_json
from hvd_hetero.compression.feedback import ErrorFeedback
from hvd_hetero.compression.sample import GradientSample
from hvd_hetero.compression.shadow import largest
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.compression.topk import k_for
from hvd_hetero.compression.wire import pack

WINDOW_STEPS = 10
COST_CF = 100.0

Loss = Callable[[torch.Generator], torch.Tensor]


def mlp(width: int) -> tuple[nn.Module, Loss, float]:
    """Scikit-learn's digits; 870,922 parameters of width 896, 4.1 million of width 1984."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(data.target)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )

    def loss(random: torch.Generator) -> torch.Tensor:
        rows = torch.randint(len(images), (16,), generator=random)
        return functional.cross_entropy(model(images[rows]), labels[rows])

    return model, loss, 0.05


def text(width: int) -> tuple[nn.Module, Loss, float]:
    """Next character of Python's own documentation, by a GRU; 2.9 million of width 896."""
    from pydoc_data.topics import topics

    letters = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))

    class Characters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(128, 128)
            self.recurrent = nn.GRU(128, width, batch_first=True)
            self.output = nn.Linear(width, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.output(self.recurrent(self.embedding(x))[0])

    model = Characters()

    def loss(random: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(letters) - 33, (8,), generator=random).tolist()
        rows = torch.stack([letters[start : start + 33] for start in starts])
        return functional.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])

    return model, loss, 0.5


MODELS = {"mlp": mlp, "text": text}


class Truth:
    """Real residuals of one factor on all ranks."""

    def __init__(self, ranks: int, elements: int, cf: float) -> None:
        self.k = k_for(elements, cf)
        self.residuals = [np.zeros(elements, np.float32) for _ in range(ranks)]
        self.thresholds = [0.0] * ranks
        self.kept = self.total = 0.0

    def step(self, rank: int, gradient: np.ndarray, scratch: np.ndarray) -> None:
        residual = self.residuals[rank]
        residual += gradient
        np.abs(residual, out=scratch)
        self.total += float(np.dot(residual, residual))
        taken, self.thresholds[rank] = largest(scratch, self.k, self.thresholds[rank])
        self.kept += float(np.dot(residual[taken], residual[taken]))
        residual[taken] = 0.0

    def end_window(self, gradient_energy: float) -> tuple[float, float]:
        """Return gain and rho of the window."""
        gain, self.kept, self.total = self.kept / self.total, 0.0, 0.0
        waiting = np.sum(self.residuals, axis=0)
        return gain, float(np.linalg.norm(waiting)) / gradient_energy**0.5


@dataclass
class Measured:
    """Per window: [windows, factors, (gain, rho)] of the truth and of every sample."""

    truth: np.ndarray
    samples: list[np.ndarray]


def measure(options: argparse.Namespace, cfs: tuple[float, ...]) -> tuple[Measured, int]:
    """Train, and follow every factor beside; return what was seen and the model's size."""
    torch.manual_seed(options.seed)
    model, loss, learning_rate = MODELS[options.model](options.width)
    parameters = list(model.parameters())
    elements = sum(parameter.numel() for parameter in parameters)
    ranks = options.ranks
    randoms = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    truths = [Truth(ranks, elements, cf) for cf in cfs]
    samples = [
        [GradientSample([elements], cfs, sample_elements=size, seed=seed) for _ in range(ranks)]
        for size in options.samples
        for seed in range(options.sample_seeds)
    ]
    scratch, energies = np.empty(elements, np.float32), []
    seen_truth: list[list[tuple[float, float]]] = []
    seen: list[list[list[tuple[float, float]]]] = [[] for _ in samples]
    for step in range(1, options.steps + 1):
        mean = torch.zeros(elements)
        for rank in range(ranks):
            model.zero_grad()
            loss(randoms[rank]).backward()
            gradient = torch.cat([one.grad.reshape(-1) for one in parameters]).div_(ranks)
            mean += gradient
            for truth in truths:
                truth.step(rank, gradient.numpy(), scratch)
            for sample in samples:
                sample[rank].take_gradient(0, gradient)
                sample[rank].end_step()
        energies.append(float(mean.square().sum()))
        with torch.no_grad():
            parts = mean.split([one.numel() for one in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.sub_(part.view_as(parameter), alpha=learning_rate)
        if step % WINDOW_STEPS == 0:
            energy = float(np.mean(energies[-WINDOW_STEPS:]))
            seen_truth.append([truth.end_window(energy) for truth in truths])
            for sample, rows in zip(samples, seen, strict=True):
                curves = sample[0].read(torch.stack([one.sums() for one in sample]).sum(dim=0))
                rows.append([(curves.gain[cf], curves.rho[cf]) for cf in cfs])
    return Measured(np.asarray(seen_truth), [np.asarray(rows) for rows in seen]), elements


def cost(size: int, elements: int, cfs: tuple[float, ...], windows: int) -> tuple[float, float]:
    """Return seconds a step of the sample and of compression; means of alternating windows."""
    gradients = [torch.randn(elements) for _ in range(4)]
    feedback = ErrorFeedback(elements, torch.float32)
    sample = GradientSample([elements], cfs, sample_elements=size)
    own: list[float] = []
    compression: list[float] = []
    for step in range(windows * WINDOW_STEPS):
        feedback.work.copy_(gradients[step % 4])
        times = [time.perf_counter()]
        sample.take_gradient(0, feedback.work)
        times.append(time.perf_counter())
        sparse = feedback.select(k_for(elements, COST_CF))
        feedback.sent(sparse.indices, pack(sparse, "float16").sent)
        times.append(time.perf_counter())
        sample.take_compensated(0, feedback.work)
        sample.end_step()
        if (step + 1) % WINDOW_STEPS == 0:
            sample.sums()
        times.append(time.perf_counter())
        feedback.commit()
        times.append(time.perf_counter())
        if step >= WINDOW_STEPS:  # the first window primes
            own.append(times[1] - times[0] + times[3] - times[2])
            compression.append(times[2] - times[1] + times[4] - times[3])

    def typical(seconds: list[float]) -> float:
        return float(np.median(np.asarray(seconds).reshape(-1, WINDOW_STEPS).mean(axis=1)))

    return typical(own), typical(compression)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="text")
    add("--ranks", type=int, default=4)
    add("--width", type=int, default=896, help="of the hidden layers (%(default)s)")
    add("--steps", type=int, default=2000, help="steady state is the last third (%(default)s)")
    add("--max-cf", type=float, default=1000.0)
    add("--samples", type=_sizes, default=(16384, 65536), help="coordinates, several sizes at once")
    add("--sample-seeds", type=int, default=1, help="samples of each size (%(default)s)")
    add("--cost-windows", type=int, default=21)
    add("--seed", type=int, default=0)
    add("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cfs = Adaptive(max_cf=options.max_cf).ladder()
    measured, elements = measure(options, cfs)
    tail = slice(-(len(measured.truth) // 3), None)
    cases = []
    for index, sample in enumerate(measured.samples):
        size, seed = options.samples[index // options.sample_seeds], index % options.sample_seeds
        seconds, compress_seconds = cost(size, elements, cfs, options.cost_windows)
        rows = []
        for place, cf in enumerate(cfs):
            gain, rho = (float(one) for one in measured.truth[tail, place].mean(axis=0))
            shadow_gain, shadow_rho = (float(one) for one in sample[tail, place].mean(axis=0))
            early_gain, early_rho = (float(one) for one in sample[1, place])
            cases.append(
                {
                    "model": options.model,
                    "elements": elements,
                    "sample_elements": size,
                    "seed": seed,
                    "cf": cf,
                    "gain": gain,
                    "shadow_gain": shadow_gain,
                    "gain_after_two_windows": early_gain,
                    "rho": rho,
                    "shadow_rho": shadow_rho,
                    "rho_after_two_windows": early_rho,
                    "seconds": seconds,
                    "compress_seconds": compress_seconds,
                }
            )
            gains = [f"{one:.4f}" for one in (gain, shadow_gain, early_gain)]
            rhos = [f"{one:.2f}" for one in (rho, shadow_rho, early_rho)]
            gains.insert(2, f"{shadow_gain / gain - 1:+.1%}")
            rhos.insert(2, f"{shadow_rho / rho - 1:+.1%}")
            rows.append([f"{cf:g}", *gains, *rhos])
        print(
            f"{options.model}, {elements:,} parameters, {options.ranks} ranks; {size:,} coordinates"
        )
        print_table(["CF", "gain", "shadow", "error", "@20", "rho", "shadow", "error", "@20"], rows)
        print(
            f"{seconds * 1e3:.2f} ms a step, compression {compress_seconds * 1e3:.2f} ms: "
            f"{seconds / compress_seconds:.2f}\n"
        )
    if options.json:
        write_json(options.json, cases)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


if __name__ == "__main__":
    main()
