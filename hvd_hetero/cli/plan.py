"""``hvd-hetero plan``: the optimal split of a global batch, from records or a profile of speeds."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hvd_hetero.errors import ConfigurationError, check_int

if TYPE_CHECKING:
    from hvd_hetero.planning.what_if import Addition, Cluster, Comparison
    from hvd_hetero.telemetry.records import ConfigurationRecord, WindowRecord

MOST_ROWS = 8  # more ranks are printed by speed class
_EXAMPLE = """\
global_batch_size = 512

[[ranks]]
count = 4
name = "A100"
seconds_per_sample = 0.0011     # to the end of backward
fixed_seconds = 0.004           # per step, whatever the batch
first_bucket_share = 0.5        # optional: part of that time until the first gradient bucket
                                # is ready (1: nothing overlaps, the default)
max_local_batch = 256           # optional, as min_local_batch

[[ranks]]
count = 4
name = "T4"
seconds_per_sample = 0.0052

[network]                       # optional
overlapped_seconds = 0.010      # exchange of all gradient buckets but the last
final_seconds = 0.002           # of the last
# or: gradient_bytes, bandwidth_bits_per_second, latency_seconds, overlapped_share
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "plan",
        help="the optimal split of a batch, from a run's records or from known speeds",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Prints the split of the global batch that makes the step shortest (Cannikin, arXiv\n"
            "2402.05302), what an even split loses, and what one more rank of each speed would\n"
            "bring. Nothing is trained."
        ),
        epilog=(
            "Records: of the last run in the file that was logged with log=FILE and a balancer.\n"
            "A profile is TOML:\n\n" + _EXAMPLE
        ),
    )
    parser.add_argument("file", metavar="FILE", help="records of a run, or a profile in TOML")
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="samples of a step")
    parser.add_argument(
        "--granule", type=int, metavar="G", help="local batches are multiples of G (default 1)"
    )
    for name in ("min", "max"):
        parser.add_argument(
            f"--{name}-local-batch",
            metavar="N[,N...]",
            help=f"{'least' if name == 'min' else 'most'} samples of a rank: one number, or one "
            "for each rank",
        )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the result as JSON; -: print that instead"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Case:
    """A cluster to plan for, what was asked, and where its speeds come from."""

    cluster: Cluster
    global_batch_size: int | None
    granule: int | None
    source: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """A measured window and the local batches in force while it was measured."""

    record: WindowRecord
    local_batches: tuple[int, ...]


def run(options: argparse.Namespace) -> int:
    """Read, plan, print."""
    # Not before a command is run: the command line must start without numpy.
    from hvd_hetero.cli.profiles import parse_profile, read_text, write_text
    from hvd_hetero.planning.what_if import additions, compare

    text = read_text(options.file)
    if text.lstrip().startswith("{"):
        case = case_of_records(text, options.file)
    else:
        profile = parse_profile(text, options.file)
        source = (f"speeds    of the profile {options.file}",)
        case = Case(profile.cluster, profile.global_batch_size, profile.granule, source)
    total, granule = options.global_batch_size, options.granule
    total = case.global_batch_size if total is None else total
    if total is None:
        raise ConfigurationError(
            f"{options.file}: global_batch_size: missing; give it there or by --global-batch-size"
        )
    check_int("--global-batch-size", total, minimum=1)
    granule = check_int("--granule", (case.granule or 1) if granule is None else granule, minimum=1)
    cluster = _bounded(case.cluster, options)
    comparison = compare(cluster, total, granule=granule)
    more = additions(cluster, comparison, granule=granule)
    if options.json != "-":
        print(describe(cluster, comparison, more, granule, case.source))
    if options.json is not None:
        content = to_json(cluster, comparison, more, granule, case.source)
        write_text(options.json, json.dumps(content, indent=1))
    return 0


# ---- records ------------------------------------------------------------------------------------


def case_of_records(text: str, name: str) -> Case:
    """Return the ranks of the last run in ``text``, with lines fitted to its windows."""
    from hvd_hetero.planning.exchange_view import smoothing
    from hvd_hetero.planning.what_if import (
        Cluster,
        ExchangeSeconds,
        Rank,
        classes_by_speed,
        fit_models,
    )
    from hvd_hetero.telemetry.records import ConfigurationRecord, WindowRecord
    from hvd_hetero.telemetry.report import last_run, parse_lines

    records = last_run(parse_lines(text.split("\n"), name=name))
    configuration = next((r for r in records if isinstance(r, ConfigurationRecord)), None)
    windows = [record for record in records if isinstance(record, WindowRecord)]
    used, skipped = usable_windows(windows, configuration)
    if not used:
        found = f"{len(windows)} windows, none usable" if windows else "no window"
        reasons = "".join(f"; {why}: {count}" for why, count in skipped.items())
        raise ConfigurationError(
            f"FILE={name!r}: the last run has {found}{reasons}; train a few more windows with "
            "balancer=... and log=FILE, or give a profile (`hvd-hetero plan --help` shows one)"
        )
    models, fitted = fit_models([(w.local_batches, w.record.compute_seconds) for w in used])
    final = least_wait(used[0])
    for window in used[1:]:
        waited = least_wait(window)
        final += smoothing(waited, final) * (waited - final)
    total = windows[-1].global_batch_size or sum(used[-1].local_batches)
    ranks = len(models)
    classes = classes_by_speed(models, max(1, total // ranks))
    asked = _balancer_options(configuration)
    least, most = (_recorded(asked, f"{kind}_local_batch", ranks) for kind in ("min", "max"))
    # A balancer without max_local_batch writes down its global batch.
    free = asked.get("global_batch_size")
    return Case(
        Cluster(
            tuple(
                Rank(
                    model,
                    f"class {classes[rank] + 1}",
                    1 if least is None else least[rank],
                    None if most is None or most[rank] == free else most[rank],
                )
                for rank, model in enumerate(models)
            ),
            ExchangeSeconds(0.0, final),
        ),
        total,
        asked.get("granule"),
        _source(name, windows, used, skipped, fitted, ranks),
    )


def usable_windows(
    windows: Sequence[WindowRecord], configuration: ConfigurationRecord | None
) -> tuple[list[Window], dict[str, int]]:
    """Return the windows whose seconds belong to known local batches; of the others, why not.

    A record holds the plan decided at the window's end, so the one in force is the record's
    before. Of the first window it is the record's own if nothing changed, else the balancer's
    first plan. The window after a change may mix both: batches drawn ahead keep their old size.
    """
    used: list[Window] = []
    skipped: dict[str, int] = {}
    every = _balancer_options(configuration).get("window_steps")
    before: WindowRecord | None = None
    for window in windows:
        changed = "plan" in window.changed
        if before is not None:
            force = before.local_batches
        else:
            force = window.local_batches
            if changed:  # a run that goes on from a checkpoint begins with another plan
                force = _first_plan(configuration) if window.plan_version == 1 else ()
        why = ""
        if not window.local_batches:
            why = "no local batches, as without a balancer"
        elif not all(math.isfinite(x) and x > 0 for x in window.compute_seconds):
            why = "a rank without compute seconds"
        elif before is not None and "plan" in before.changed:
            why = "plan changed just before"
        elif len(force) != len(window.local_batches) or (
            used and len(force) != len(used[0].local_batches)
        ):
            why = "local batches not known"
        elif changed and (not every or window.step % every):
            why = "plan changed within"
        if why:
            skipped[why] = skipped.get(why, 0) + 1
        else:
            used.append(Window(window, force))
        before = window
    return used, skipped


def least_wait(window: Window) -> float:
    """Seconds of the exchange that follow the last rank's backward, see ``exchange_times``."""
    waits = [seconds for seconds in window.record.wait_seconds if math.isfinite(seconds)]
    return max(0.0, min(waits, default=0.0))


def _first_plan(configuration: ConfigurationRecord | None) -> tuple[int, ...]:
    """The split a balancer begins with, from the options it wrote down; empty if they are none."""
    from hvd_hetero.balance.optperf import Bounds
    from hvd_hetero.planning.planner import PlannerConfig, first_plan

    asked = _balancer_options(configuration)
    try:
        bounds = Bounds(tuple(asked["min_local_batch"]), tuple(asked["max_local_batch"]))
        config = PlannerConfig(asked["global_batch_size"], bounds, asked["granule"])
        return first_plan(config, bounds.ranks).local_batches
    except (KeyError, TypeError, ConfigurationError):
        return ()


def _balancer_options(configuration: ConfigurationRecord | None) -> Mapping[str, Any]:
    options = configuration.options.get("balancer") if configuration is not None else None
    return options if isinstance(options, Mapping) else {}


def _recorded(asked: Mapping[str, Any], name: str, ranks: int) -> list[int] | None:
    values = asked.get(name)
    return values if isinstance(values, list) and len(values) == ranks else None


def _source(
    name: str,
    windows: Sequence[WindowRecord],
    used: Sequence[Window],
    skipped: Mapping[str, int],
    fitted: int,
    ranks: int,
) -> tuple[str, ...]:
    steps = span([window.record.step for window in used], "{}..{}")
    left = ", ".join(f"{why}: {count}" for why, count in skipped.items())
    if fitted:
        basis = f"a line over the local batch for {fitted} of {ranks} ranks"
        if fitted < ranks:
            basis += "; the others, seen with one size only, get the usual share of fixed seconds"
    else:
        basis = (
            "seconds per sample through the origin: no rank was seen with two batch sizes, so "
            "fixed seconds are not known"
        )
    return (
        f"speeds    of the last run in {name}",
        f"windows   {len(used)} of {len(windows)} used, ended at step {steps}"
        + (f" (left out: {left})" if left else ""),
        f"fit       {basis}",
        "exchange  as measured after backward; taken as the same for every split",
    )


# ---- options ------------------------------------------------------------------------------------


def _bounded(cluster: Cluster, options: argparse.Namespace) -> Cluster:
    """Return ``cluster`` with the bounds asked for on the command line."""
    ranks = list(cluster.ranks)
    for name in ("min_local_batch", "max_local_batch"):
        text = getattr(options, name)
        if text is None:
            continue
        option = f"--{name.replace('_', '-')}"
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError as error:
            raise ConfigurationError(
                f"{option}={text!r}: give one whole number, or one for each rank, by commas"
            ) from error
        if len(values) not in (1, len(ranks)):
            raise ConfigurationError(
                f"{option}={text!r}: {len(values)} numbers for {len(ranks)} ranks; give one, or "
                "one for each rank"
            )
        for rank, value in enumerate(values * (len(ranks) if len(values) == 1 else 1)):
            check_int(option, value, minimum=1)
            changes: dict[str, Any] = {name: value}
            if name == "min_local_batch" and options.max_local_batch is not None:
                changes["max_local_batch"] = None  # about to be replaced
            least, most = ranks[rank].min_local_batch, ranks[rank].max_local_batch
            low = value if name == "min_local_batch" else least
            high = changes.get("max_local_batch", most)
            if high is not None and low > high:
                raise ConfigurationError(
                    f"{option}={text!r}: rank {rank} would take at least {low} and at most {high} "
                    "samples; lower the least or raise the most"
                )
            ranks[rank] = replace(ranks[rank], **changes)
    return replace(cluster, ranks=tuple(ranks))


# ---- output -------------------------------------------------------------------------------------


def describe(
    cluster: Cluster,
    comparison: Comparison,
    more: Sequence[Addition],
    granule: int,
    source: Sequence[str],
) -> str:
    """The report for a person."""
    even, best = comparison.even_step_seconds, comparison.optimal_step_seconds
    multiples = f", local batches in multiples of {granule}" if granule > 1 else ""
    lines = [*source, f"batch     {comparison.global_batch_size}{multiples}", ""]
    rows = [["ranks", "speed class", "a sample", "fixed", "even", "optimal", "own work"]]
    groups: list[tuple[int, ...]] = [(rank,) for rank in range(len(cluster.ranks))]
    if len(cluster.ranks) > MOST_ROWS:
        groups = [cluster.members(name) for name in cluster.speed_classes]
    for group in groups:
        models = [cluster.ranks[i].model for i in group]
        batches = [comparison.optimal_local_batches[i] for i in group]
        work = [m.done(batch) * 1e3 for m, batch in zip(models, batches, strict=True)]
        rows.append(
            [
                _numbers(group),
                cluster.ranks[group[0]].speed_class,
                span([m.done.slope_seconds * 1e3 for m in models], style=".3g") + " ms",
                span([m.done.intercept_seconds * 1e3 for m in models], style=".3g") + " ms",
                span([comparison.even_local_batches[i] for i in group]),
                span(batches),
                span(work, style=".1f") + " ms",
            ]
        )
    lines += [
        *table(rows),
        "",
        f"step, even split     {even * 1e3:8.1f} ms",
        f"step, optimal split  {best * 1e3:8.1f} ms",
        f"lost by even split   {comparison.lost_seconds * 1e3:8.1f} ms, "
        f"{comparison.lost_share:.1%} of its step",
        "",
        "one more rank, same global batch, optimal split:",
    ]
    width = max(len(one.speed_class) for one in more)
    for one in more:
        lines.append(f"  {one.speed_class:{width}}  {_brought(one)}")
    return "\n".join(lines)


def to_json(
    cluster: Cluster,
    comparison: Comparison,
    more: Sequence[Addition],
    granule: int,
    source: Sequence[str],
) -> dict[str, Any]:
    """The result as JSON types."""
    return {
        "source": list(source),
        "global_batch_size": comparison.global_batch_size,
        "granule": granule,
        "overlapped_seconds": comparison.exchange.overlapped_seconds,
        "final_seconds": comparison.exchange.final_seconds,
        "even_step_seconds": comparison.even_step_seconds,
        "optimal_step_seconds": comparison.optimal_step_seconds,
        "lost_seconds": comparison.lost_seconds,
        "lost_share": comparison.lost_share,
        "ranks": [
            {
                "speed_class": rank.speed_class,
                **rank.model.to_dict(),
                "even_local_batch": even,
                "optimal_local_batch": best,
            }
            for rank, even, best in zip(
                cluster.ranks,
                comparison.even_local_batches,
                comparison.optimal_local_batches,
                strict=True,
            )
        ],
        "one_more": [vars(one) for one in more],
    }


def _brought(one: Addition) -> str:
    if one.optimal_step_seconds is None or one.saved_seconds is None or one.saved_share is None:
        return "does not fit: no split obeys the bounds and the granule then"
    word = "shorter" if one.saved_seconds >= 0 else "longer"
    return (
        f"{one.optimal_step_seconds * 1e3:8.1f} ms, {abs(one.saved_seconds) * 1e3:.1f} ms "
        f"({abs(one.saved_share):.1%}) {word}"
    )


def span(values: Sequence[float], form: str = "{}-{}", *, style: str = "") -> str:
    """``3`` for equal values, else ``3-5``: the least and the most."""
    low, high = format(min(values), style), format(max(values), style)
    return low if low == high else form.format(low, high)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with a header; all columns but the first are set right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            f"{cell:{'<' if i == 0 else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _numbers(ranks: Sequence[int]) -> str:
    """``0-3, 8``; a few stretches, then their number."""
    stretches: list[list[int]] = []
    for rank in ranks:
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    if len(stretches) > 4:
        return f"{len(ranks)} ranks"
    return ", ".join(span(stretch) for stretch in stretches)
