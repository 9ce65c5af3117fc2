"""A mixed cluster on one machine: stock Horovod against balancing, compression, and both.

    mpirun -np 4 --oversubscribe --bind-to none python examples/mixed_cluster.py
    horovodrun --gloo -np 4 -H localhost:4 python examples/mixed_cluster.py

Ranks are made slow by sleeping for every sample, in forward and in backward, as ranks that burn
processor time on the few cores of one machine would only slow each other down. The same model
learns the same images four times: with Horovod's own optimizer and even batches, with balancing
only, with compression only, and with both. See --help for the options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
from demo_data import DataError, Images, load
from demo_report import LABELS, compare, draw, format_table, summarise, windows_by_run
from demo_training import RUNS, WINDOW_STEPS, Progress, Run, Settings, train, warm_up

import hvd_hetero as het
from hvd_hetero.telemetry.report import read_records

LEAST_SECONDS_PER_SAMPLE = 1.5e-3  # of the factor 1; well above what the real work takes
LEAST_EVEN_STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Preset:
    """What suits a data set where the user says nothing."""

    target_accuracy: float
    learning_rate: float


DIGITS = Preset(target_accuracy=0.95, learning_rate=0.2)
OTHER = Preset(target_accuracy=0.80, learning_rate=0.05)


class OptionError(ValueError):
    """A command line that cannot be used; the message is for the user."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message)  # argparse itself would end each rank with the whole usage


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options. Raises OptionError."""
    parser = _Parser(
        description="Stock Horovod, balancing, compression, and both, on emulated mixed machines.",
        epilog="Start it on several ranks, with mpirun or horovodrun.",
    )
    add = parser.add_argument
    add("--data", default="digits", help="digits, fashion-mnist, or a folder of idx(.gz) files")
    add("--slowdown", default="1,2,2,4", help="a factor for each rank (default %(default)s)")
    add("--global-batch-size", type=int, default=128, help="samples of a step over all ranks")
    add("--steps", type=int, default=120, help="steps of each training (default %(default)s)")
    add("--seeds", type=int, default=3, help="trainings of each kind (default %(default)s)")
    add("--eps", type=float, default=0.75, help="least compression gain (default %(default)s)")
    add("--target", type=float, help="accuracy for the time to target, between 0 and 1")
    add("--learning-rate", type=float)
    add("--momentum", type=float, default=0.9)
    add("--output", type=Path, default=Path("runs/demo"), help="folder for the results")
    add("--progress", choices=("auto", "rich", "plain"), default="auto")
    return parser.parse_args(arguments)


def make_settings(options: argparse.Namespace, ranks: int) -> Settings:
    """Check the options against the ranks. Raises OptionError or the library's own errors."""
    try:
        slowdown = tuple(float(factor) for factor in options.slowdown.split(","))
    except ValueError as error:
        raise OptionError(
            f"--slowdown {options.slowdown}: must be numbers, as in 1,2,2,4"
        ) from error
    if len(slowdown) != ranks:
        raise OptionError(
            f"--slowdown {options.slowdown}: {len(slowdown)} factors for {ranks} ranks; give one "
            f"for each rank, or start {len(slowdown)} ranks"
        )
    if not all(0 < factor < float("inf") for factor in slowdown):
        raise OptionError(f"--slowdown {options.slowdown}: factors must be above 0")
    total = options.global_batch_size
    if total < ranks or total % ranks:
        raise OptionError(
            f"--global-batch-size {total}: must be a multiple of the {ranks} ranks, as stock "
            "Horovod splits it evenly"
        )
    if options.steps < WINDOW_STEPS or options.steps % WINDOW_STEPS:
        raise OptionError(f"--steps {options.steps}: must be a multiple of {WINDOW_STEPS}")
    if options.seeds < 1:
        raise OptionError(f"--seeds {options.seeds}: must be at least 1")
    preset = DIGITS if options.data == "digits" else OTHER
    target = preset.target_accuracy if options.target is None else options.target
    if not 0 < target <= 1:
        raise OptionError(f"--target {target:g}: an accuracy is above 0 and at most 1")
    rate = preset.learning_rate if options.learning_rate is None else options.learning_rate
    if not 0 < rate < float("inf"):
        raise OptionError(f"--learning-rate {rate:g}: must be above 0")
    if not 0 <= options.momentum < 1:
        raise OptionError(f"--momentum {options.momentum:g}: must be at least 0 and below 1")
    het.Compression.adaptive(eps=options.eps)  # raises for an eps that cannot be used
    even_factor_samples = total / ranks * max(slowdown)
    return Settings(
        slowdown=slowdown,
        seconds_per_sample=max(
            LEAST_SECONDS_PER_SAMPLE, LEAST_EVEN_STEP_SECONDS / even_factor_samples
        ),
        global_batch_size=total,
        steps=options.steps,
        eps=options.eps,
        target_accuracy=target,
        learning_rate=rate,
        momentum=options.momentum,
        records=options.output / "records.jsonl",
    )


def introduction(settings: Settings, data: Images) -> str:
    """Say what is about to happen, what is emulated, and how it is measured."""
    ranks, total = len(settings.slowdown), settings.global_batch_size
    milliseconds = [1e3 * settings.seconds_per_sample * factor for factor in settings.slowdown]
    even = max(milliseconds) * total / ranks
    best = total / sum(1 / each for each in milliseconds)
    return (
        f"{ranks} ranks, {data.name}, {total} samples a step.\n"
        f"Emulated: ranks sleep {', '.join(f'{each:g}' for each in milliseconds)} ms a sample, a "
        "third of it in forward, the rest in backward.\n"
        f"Sleeping alone makes a step {even:.0f} ms with even batches, {best:.0f} ms with the best "
        "split."
    )


# ---- progress, on rank 0 ------------------------------------------------------------------------


class Silent:
    def step(self, run: Run) -> None:
        pass


class Lines:
    """A line every 50 steps, for logs."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def step(self, run: Run) -> None:
        done = len(run.step_seconds)
        if done % 50 == 0 or done == self._steps:
            print(f"{_title(run)}: step {done}/{self._steps}, {_state(run)}", flush=True)


class Bars:
    """A bar for each training, for terminals."""

    def __init__(self, steps: int, display: Any) -> None:
        self._steps = steps
        self._display = display
        self._tasks: dict[tuple[str, int], Any] = {}

    def step(self, run: Run) -> None:
        key = (run.name, run.seed)
        if key not in self._tasks:
            self._tasks[key] = self._display.add_task(_title(run), total=self._steps, state="")
        self._display.update(self._tasks[key], advance=1, state=_state(run))


def _title(run: Run) -> str:
    return f"{LABELS[run.name]}, seed {run.seed}"


def _state(run: Run) -> str:
    recent = statistics.median(run.step_seconds[-WINDOW_STEPS:])
    text = f"{1e3 * recent:.0f} ms a step"
    if run.evaluations:
        batches = " ".join(map(str, run.local_batches))
        text += f", {run.evaluations[-1][2]:.1%} right, batches {batches}"
    return text


@contextlib.contextmanager
def open_progress(choice: str, steps: int) -> Iterator[Progress]:
    """Choose how rank 0 shows progress; other ranks show none."""
    if choice == "auto":
        # mpirun gives its ranks a terminal of their own, also where its output is a file.
        terminal = sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
        choice = "rich" if terminal else "plain"
    if hvd.rank() != 0:
        yield Silent()
    elif choice == "plain":
        yield Lines(steps)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Display

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[state]}"),
        )
        with Display(*columns, console=Console(force_terminal=True)) as display:
            yield Bars(steps, display)


# ---- the demo -----------------------------------------------------------------------------------


def agree(error: Exception | None) -> None:
    """End all ranks with status 2 if any has an error; rank 0 says which."""
    messages = hvd.allgather_object(None if error is None else str(error))
    known = {message for message in messages if message is not None}
    if not known:
        return
    if hvd.rank() == 0:
        for message in sorted(known):
            print(f"mixed_cluster.py: error: {message}", file=sys.stderr, flush=True)
    hvd.barrier()  # the first rank to end may take the others along
    raise SystemExit(2)


def prepare() -> tuple[argparse.Namespace, Settings, Images]:
    """Return what the command line asks for; ends all ranks where that cannot be had."""
    error: Exception | None = None
    try:
        options = parse()
    except OptionError as wrong:
        error = wrong
    hvd.init()
    agree(error)
    try:
        settings = make_settings(options, hvd.size())
        data = load(options.data)
        if hvd.rank() == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            settings.records.unlink(missing_ok=True)
    except (OptionError, DataError, het.ConfigurationError, OSError) as wrong:
        error = wrong
    agree(error)
    return options, settings, data


def finish(options: argparse.Namespace, settings: Settings, runs: list[Run], title: str) -> None:
    """Rank 0: write the summary and the figure, print the table."""
    windows = windows_by_run(read_records(settings.records))
    summary = summarise(runs, windows, settings.target_accuracy)
    path = options.output / "summary.json"
    path.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    draw(options.output / "figure.png", runs, windows, settings.target_accuracy, title)
    medians = f"Medians over {options.seeds} seeds. " if options.seeds > 1 else ""
    print(
        f"\n{format_table(summary, settings.target_accuracy)}\n\n"
        f"{medians}Time is that of training steps, measured alike for all four; evaluation is left "
        "out.\nBytes are what a rank sends, mean over all steps.\n"
        f"{compare(summary)}\n"
        f"Written to {options.output}: summary.json, records.jsonl, figure.png",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)  # the ranks share this machine's cores
    options, settings, data = prepare()
    if hvd.rank() == 0:
        print(introduction(settings, data), flush=True)
    warm_up()
    runs = []
    with open_progress(options.progress, settings.steps) as progress:
        for seed in range(options.seeds):
            for name in RUNS:
                runs.append(train(name, seed, data, settings, progress))
    if hvd.rank() == 0:
        factors = ", ".join(f"{factor:g}" for factor in settings.slowdown)
        title = f"{data.name}, {hvd.size()} ranks slowed down by {factors}"
        finish(options, settings, runs, title)


if __name__ == "__main__":
    main()
