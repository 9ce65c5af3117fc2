"""What the demo ends with: the summary of all trainings, as a table, a file and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_training import RUNS, WINDOW_STEPS, Run

from hvd_hetero.telemetry.records import ConfigurationRecord, Record, WindowRecord

LABELS = {
    "horovod": "stock Horovod",
    "balance": "balance only",
    "compression": "compression only",
    "both": "both",
}
COLOURS = {"horovod": "#777777", "balance": "#1f77b4", "compression": "#e08214", "both": "#2a9d4a"}
RANK_COLOURS = ("#35608d", "#22908c", "#5ec962", "#c9b31f", "#e08214", "#b8336a")

Windows = Mapping[tuple[str, int], Sequence[WindowRecord]]


def windows_by_run(records: Iterable[Record]) -> Windows:
    """Sort window records by the (run, seed) that was marked before them."""
    windows: dict[tuple[str, int], list[WindowRecord]] = {}
    current: list[WindowRecord] = []
    for record in records:
        if isinstance(record, WindowRecord):
            current.append(record)
        elif isinstance(record, ConfigurationRecord) and "run" in record.options:
            key = (record.options["run"], record.options["seed"])
            current = windows.setdefault(key, [])
    return windows


def summarise(runs: Sequence[Run], windows: Windows, target: float) -> dict[str, dict[str, Any]]:
    """Return for each kind of training the medians over its seeds, and ``runs``, seed by seed.

    ``local_batches`` and ``cf`` (None: dense) are those at the end of the last seed. Each of
    ``runs`` also has its ``evaluations``: [step, seconds of training, accuracy].
    """
    summary: dict[str, dict[str, Any]] = {}
    for name in RUNS:
        each = [_of_one(run, windows[name, run.seed], target) for run in runs if run.name == name]
        if not each:
            continue
        entry: dict[str, Any] = {key: _median(one[key] for one in each) for key in _MEASURES}
        entry |= {"local_batches": each[-1]["local_batches"], "cf": each[-1]["cf"], "runs": each}
        summary[name] = entry
    return summary


_MEASURES = ("step_seconds", "bytes_per_step", "seconds_to_target", "accuracy", "seconds")


def _of_one(run: Run, windows: Sequence[WindowRecord], target: float) -> dict[str, Any]:
    reached = [seconds for _, seconds, accuracy in run.evaluations if accuracy >= target]
    return {
        "seed": run.seed,
        "step_seconds": statistics.median(run.step_seconds),
        "bytes_per_step": statistics.fmean(window.bytes_per_step for window in windows),
        "seconds_to_target": reached[0] if reached else None,
        "accuracy": run.evaluations[-1][2],
        "seconds": sum(run.step_seconds),
        "local_batches": list(run.local_batches),
        "cf": windows[-1].cf,
        "evaluations": [list(evaluation) for evaluation in run.evaluations],
    }


def _median(values: Iterable[float | None]) -> float | None:
    """The median, where a training that never got there took for ever."""
    middle = statistics.median(math.inf if value is None else value for value in values)
    return middle if math.isfinite(middle) else None


def format_table(summary: Mapping[str, Mapping[str, Any]], target: float) -> str:
    """Return the summary as a table of plain text."""
    header = (
        "",
        "step, median",
        "sent per step",
        f"to {target:.0%}",
        "accuracy",
        "local batches",
        "CF",
    )
    rows = [header]
    for name, entry in summary.items():
        seconds, cf = entry["seconds_to_target"], entry["cf"]
        rows.append(
            (
                LABELS[name],
                f"{entry['step_seconds'] * 1e3:.0f} ms",
                f"{entry['bytes_per_step'] / 1e6:.2f} MB",
                "not reached" if seconds is None else f"{seconds:.1f} s",
                f"{entry['accuracy']:.1%}",
                " ".join(map(str, entry["local_batches"])),
                "-" if cf is None else f"{cf:g}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def compare(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence on "both" against stock Horovod."""
    both, stock = summary["both"], summary["horovod"]
    step = both["step_seconds"] / stock["step_seconds"]
    text = f"Both against stock Horovod: {step:.2f} of the step time"
    if stock["bytes_per_step"]:  # one rank alone sends nothing
        text += f", {both['bytes_per_step'] / stock['bytes_per_step']:.2f} of the bytes"
    return f"{text}."


def draw(path: Path, runs: Sequence[Run], windows: Windows, target: float, title: str) -> None:
    """Write the figure: local batches, CF and gain, step time, accuracy (first seed)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = [run for run in runs if run.seed == runs[0].seed]
    seen = windows["both", runs[0].seed]
    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "font.size": 9,
    }
    with pyplot.rc_context(style):
        figure, ((steps, batches), (factors, accuracy)) = pyplot.subplots(
            2, 2, figsize=(10, 6.4), layout="constrained"
        )
        figure.suptitle(title, fontsize=11)
        _draw_step_seconds(steps, first)
        _draw_local_batches(batches, seen)
        _draw_compression(factors, seen)
        _draw_accuracy(accuracy, runs, target)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _draw_step_seconds(axes: Any, runs: Sequence[Run]) -> None:
    axes.set(title="Step time", xlabel="step", ylabel="ms (median of 10 steps)")
    for run in runs:
        starts = range(0, len(run.step_seconds), WINDOW_STEPS)
        medians = [
            statistics.median(run.step_seconds[start : start + WINDOW_STEPS]) for start in starts
        ]
        axes.plot(
            [start + WINDOW_STEPS / 2 for start in starts],
            [1e3 * seconds for seconds in medians],
            color=COLOURS[run.name],
            label=LABELS[run.name],
            linestyle="--" if run.name in ("compression", "both") else "-",
        )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=2, loc="lower left")


def _draw_local_batches(axes: Any, windows: Sequence[WindowRecord]) -> None:
    # A record tells the plan that holds from its step on; the first plan was the even one.
    ranks = len(windows[0].local_batches)
    even = windows[0].global_batch_size or 0
    axes.set(title="Local batches (both)", xlabel="step", ylabel="samples")
    at = [0, *(window.step for window in windows)]
    for rank in range(ranks):
        sizes = [even / ranks, *(window.local_batches[rank] for window in windows)]
        colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
        axes.step(at, sizes, where="post", color=colour, label=f"rank {rank}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=2)


def _draw_compression(axes: Any, windows: Sequence[WindowRecord]) -> None:
    axes.set(title="Compression (both)", xlabel="step", ylabel="CF (1: dense)", yscale="log")
    steps = [window.step for window in windows]
    colour = COLOURS["both"]
    axes.step(steps, [window.cf or 1 for window in windows], where="post", color=colour)
    axes.set_ylim(0.8, 2 * max(window.cf or 1 for window in windows))
    axes.yaxis.label.set_color(colour)
    gains = axes.twinx()
    gains.spines["right"].set_visible(True)
    measured = [window.gain if window.gain is not None else math.nan for window in windows]
    gains.plot(steps, measured, color="#444444", marker=".", linewidth=1)
    gains.set(ylabel="gain of the window before", ylim=(0, 1.05))


def _draw_accuracy(axes: Any, runs: Sequence[Run], target: float) -> None:
    axes.set(title="Accuracy", xlabel="seconds of training", ylabel="test accuracy")
    for run in runs:
        first = run.seed == runs[0].seed
        axes.plot(
            [seconds for _, seconds, _ in run.evaluations],
            [accuracy for _, _, accuracy in run.evaluations],
            color=COLOURS[run.name],
            label=LABELS[run.name] if first else None,
            alpha=1.0 if first else 0.35,
            linewidth=1.6 if first else 0.9,
        )
    axes.axhline(target, color="#bbbbbb", linestyle=":", zorder=0)
    axes.set_ylim(max(0.0, target - 0.25), 1.0)
    axes.legend(frameon=False, loc="lower right")
