"""What compressing a gradient costs: selection, error feedback and packing of one bucket.

    python benchmarks/compress.py [--json FILE]

Compared in one run, in turn, by medians:

- this package: the residual is added and the k largest entries are selected in one pass, they are
  packed for the wire, and what was not sent stays behind as the next residual;
- the textbook: ``a = g + e``, ``torch.topk`` of ``a.abs()``, gather, and a clone of ``a`` with
  the entries sent set to zero as the next residual; nothing is packed;
- one copy of the gradient in memory, the least that any pass over it costs.

The gradient lies where each way wants it when the clock starts: a training step writes it there
in any case. Both residuals are in their steady state, and both ways end on the same selection:
``exact`` says that the magnitudes were those of torch.topk of the same tensor, and the sets equal
but for ties at the threshold. ``control`` is this package timed against itself in the same turns:
how far the machine's noise reaches. The last table splits the time by part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import print_table, write_json
from hvd_hetero.compression.feedback import ErrorFeedback
from hvd_hetero.compression.topk import SparseGradient, k_for
from hvd_hetero.compression.wire import VALUE_FORMATS, pack


class Textbook:
    """Top-k with error feedback as papers and their code write it."""

    def __init__(self, elements: int) -> None:
        self.residual = torch.zeros(elements)

    def step(self, gradient: Tensor, k: int) -> SparseGradient:
        a = gradient + self.residual
        indices = torch.topk(a.abs(), k).indices
        values = a[indices]
        self.residual = a.clone()
        self.residual[indices] = 0.0
        return SparseGradient(values, indices, a.numel())


class Plugin:
    """The same by this package, packed as well; ``seconds`` holds the parts of the last step."""

    def __init__(self, elements: int, values_as: str) -> None:
        self.feedback = ErrorFeedback(elements, torch.float32)
        self.values_as = values_as
        self.packet_bytes = 0
        self.seconds: dict[str, float] = {}

    def step(self, k: int) -> SparseGradient:
        start = time.perf_counter()
        sparse = self.feedback.select(k)
        selected = time.perf_counter()
        packed = pack(sparse, self.values_as)
        done = time.perf_counter()
        self.feedback.sent(sparse.indices, packed.sent)
        self.feedback.commit()
        end = time.perf_counter()
        self.packet_bytes = packed.data.numel()
        self.seconds = {"select": selected - start, "pack": done - selected, "feedback": end - done}
        return sparse


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def is_exact(sparse: SparseGradient, a: Tensor) -> bool:
    """Whether ``sparse`` is a top-k of ``a`` as torch.topk gives it, up to ties."""
    magnitudes = a.abs()
    best = torch.topk(magnitudes, sparse.k)
    threshold = best.values[-1]
    chosen = torch.zeros(a.numel(), dtype=torch.bool)
    chosen[sparse.indices] = True
    expected = torch.zeros_like(chosen)
    expected[best.indices] = True
    return (
        torch.equal(sparse.values, a[sparse.indices])
        and torch.equal(sparse.values.abs().sort(descending=True).values, best.values)
        and not bool(((chosen != expected) & (magnitudes != threshold)).any())
    )


def measure(
    cf: float, elements: int, values_as: str, repeats: int, warm_up_steps: int
) -> tuple[dict[str, float | int | bool], dict[str, float]]:
    """Return the case of one compression factor, and the seconds of the parts."""
    generator = torch.Generator().manual_seed(0)
    k = k_for(elements, cf)
    plugin, control, textbook = (
        Plugin(elements, values_as),
        Plugin(elements, values_as),
        Textbook(elements),
    )
    gradient, copied = torch.empty(elements), torch.empty(elements)

    def next_gradient() -> None:
        gradient.normal_(generator=generator)

    for _ in range(warm_up_steps):  # residuals and thresholds settle
        next_gradient()
        for one in (plugin, control):
            one.feedback.work.copy_(gradient)
            one.step(k)
        # Its own way of settling would take long, and ends the same.
        textbook.residual.copy_(plugin.feedback.residual)

    times: dict[str, list[float]] = {"plugin": [], "control": [], "textbook": [], "copy": []}
    parts: dict[str, list[float]] = {}
    exact = True
    for turn in range(repeats):
        next_gradient()
        pair = (("plugin", plugin), ("control", control))
        for name, one in pair if turn % 2 else pair[::-1]:
            one.feedback.work.copy_(gradient)
            a = gradient + one.feedback.residual
            start = time.perf_counter()
            sparse = one.step(k)
            times[name].append(time.perf_counter() - start)
            exact = exact and is_exact(sparse, a)
            if one is plugin:
                for part, seconds in one.seconds.items():
                    parts.setdefault(part, []).append(seconds)
        times["textbook"].append(seconds_of(lambda: textbook.step(gradient, k)))
        times["copy"].append(seconds_of(lambda: copied.copy_(gradient)))

    medians = {name: statistics.median(values) for name, values in times.items()}
    case: dict[str, float | int | bool] = {
        "cf": cf,
        "elements": elements,
        "seconds": medians["plugin"],
        "memcpy_seconds": medians["copy"],
        "reference_seconds": medians["textbook"],
        "exact": exact,
        "bytes_per_element": plugin.packet_bytes / k,
        "control_seconds": medians["control"],
    }
    return case, {part: statistics.median(seconds) for part, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of compressing one bucket of float32")
    parser.add_argument("--elements", type=int, default=10_000_000, help="default 10 million")
    parser.add_argument("--cf", type=float, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--values", choices=VALUE_FORMATS, default="float16")
    parser.add_argument("--repeats", type=int, default=15, help="turns that are timed")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before, not timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the cases there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    cases, shown, split = [], [], []
    for cf in options.cf:
        case, parts = measure(
            cf, options.elements, options.values, options.repeats, options.warm_up
        )
        cases.append(case)
        copy_seconds = case["memcpy_seconds"]
        shown.append(
            [
                f"{cf:g}",
                f"{1e3 * case['seconds']:.2f}",
                f"{case['seconds'] / copy_seconds:.2f}",
                f"{1e3 * case['reference_seconds']:.1f}",
                f"{case['reference_seconds'] / case['seconds']:.1f}",
                f"{case['control_seconds'] / case['seconds']:.3f}",
                "yes" if case["exact"] else "NO",
                f"{case['bytes_per_element']:.3f}",
            ]
        )
        split.append([f"{cf:g}", *(f"{part / copy_seconds:.2f}" for part in parts.values())])
    copy_ms = 1e3 * statistics.median(case["memcpy_seconds"] for case in cases)
    print(
        f"{options.elements:,} float32, {options.threads} thread, values as {options.values}; "
        f"one memory copy takes {copy_ms:.2f} ms\n"
    )
    print_table(
        [
            "CF",
            "ms",
            "copies",
            "textbook ms",
            "times faster",
            "control",
            "exact",
            "bytes an entry",
        ],
        shown,
    )
    print_table(["CF", "select, copies", "pack, copies", "feedback, copies"], split)
    if options.json:
        write_json(options.json, cases)


if __name__ == "__main__":
    main()
