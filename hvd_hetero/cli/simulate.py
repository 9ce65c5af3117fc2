"""``hvd-hetero simulate``: a mixed cluster of up to thousands of ranks, without training."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from hvd_hetero.errors import ConfigurationError, check_int

if TYPE_CHECKING:
    from hvd_hetero.cli.profiles import Profile
    from hvd_hetero.planning.what_if import RingNetwork, ScalePoint

# The mixed cluster of Cannikin (Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302). From the
# paper are only the cards and their numbers; speeds, model and network are assumptions.
PAPER = """\
global_batch_size = 1024        # at scale 1; grows with the ranks

[[ranks]]
count = 4
name = "A100"
seconds_per_sample = 0.0010     # assumed: 3.4 times as fast as an RTX 6000
fixed_seconds = 0.004           # assumed, as the next: of a step until the first bucket is ready
first_bucket_share = 0.5

[[ranks]]
count = 4
name = "V100"
seconds_per_sample = 0.0017     # assumed: 2.0 times
fixed_seconds = 0.004
first_bucket_share = 0.5

[[ranks]]
count = 8
name = "RTX 6000"
seconds_per_sample = 0.0034     # assumed: 1.0
fixed_seconds = 0.004
first_bucket_share = 0.5

[network]
gradient_bytes = 102.2e6        # assumed: ResNet-50 in float32
bandwidth_bits_per_second = 25e9
latency_seconds = 10e-6
overlapped_share = 0.9          # of the exchange, beside backward
"""
_CLUSTERS = {"paper": PAPER}
_ASSUMED = (
    "Cards and numbers are those of the Cannikin paper (arXiv 2402.05302). Assumptions: relative "
    "speeds\nA100 3.4, V100 2.0, RTX 6000 1.0, their seconds, the gradient and the network; "
    "`--help` says\nhow to replace them."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "simulate",
        help="even and optimal split of a mixed cluster, up to thousands of ranks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Predicts the steps of the even and of the optimal split (Cannikin, arXiv 2402.05302)\n"
            "with every rank 1, 2, 4, ... times and a global batch that grows alike. Nothing is\n"
            "trained; the exchange is a ring allreduce, 2 (n-1)/n bytes / bandwidth + 2 (n-1) "
            "latency."
        ),
        epilog=(
            "FILE is TOML. The built-in cluster `paper` is the following; its speeds and network\n"
            "are assumptions: to use your own, save it as FILE, change it, and give FILE instead\n"
            "of --cluster paper. [network] may be left out: the exchange then takes no time.\n\n"
            + PAPER
        ),
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a cluster in TOML, see below")
    parser.add_argument("--cluster", choices=tuple(_CLUSTERS), help="a built-in cluster")
    parser.add_argument(
        "--scale",
        type=int,
        metavar="N",
        help="the last scale: every rank N times (default: the largest up to 4096 ranks)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the result as JSON; -: print that instead"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, simulate, print."""
    # Not before a command is run: the command line must start without numpy.
    from hvd_hetero.cli.profiles import MOST_RANKS, write_text
    from hvd_hetero.planning.what_if import RingNetwork, scale_factors, simulate

    name, profile = _profile(options)
    cluster = profile.cluster
    if profile.global_batch_size is None:
        raise ConfigurationError(
            f"{name}: global_batch_size: missing; give the samples of a step at scale 1"
        )
    network = cluster.network
    if not isinstance(network, RingNetwork) and any(vars(network.exchange(2)).values()):
        raise ConfigurationError(
            f"{name}: network.overlapped_seconds or final_seconds: seconds do not say how they "
            "grow with the ranks; give gradient_bytes, bandwidth_bits_per_second, latency_seconds "
            "and overlapped_share"
        )
    if options.scale is not None:
        most = max(1, MOST_RANKS // len(cluster.ranks))
        check_int("--scale", options.scale, minimum=1, maximum=most)
    factors = scale_factors(len(cluster.ranks), options.scale)
    granule = profile.granule or 1
    points = list(simulate(cluster, profile.global_batch_size, factors, granule=granule))
    if options.json != "-":
        print(describe(name, profile, points, built_in=options.cluster is not None))
    if options.json is not None:
        content = to_json(name, profile, points, built_in=options.cluster is not None)
        write_text(options.json, json.dumps(content, indent=1))
    return 0


def _profile(options: argparse.Namespace) -> tuple[str, Profile]:
    from hvd_hetero.cli.profiles import parse_profile, read_text

    if (options.file is None) == (options.cluster is None):
        both = "FILE and --cluster are both given" if options.file else "no cluster is given"
        raise ConfigurationError(f"{both}: give either FILE, in TOML, or --cluster paper")
    if options.cluster is not None:
        return options.cluster, parse_profile(_CLUSTERS[options.cluster], options.cluster)
    return options.file, parse_profile(read_text(options.file), options.file)


def describe(name: str, profile: Profile, points: list[ScalePoint], *, built_in: bool) -> str:
    """The report for a person."""
    from hvd_hetero.cli.plan import span, table
    from hvd_hetero.planning.what_if import RingNetwork

    cluster = profile.cluster
    counts = {speed: len(cluster.members(speed)) for speed in cluster.speed_classes}
    cards = ", ".join(f"{count} {speed}" for speed, count in counts.items())
    lines = [
        f"cluster        {cards} ({name})",
        f"global batch   {profile.global_batch_size} x scale",
        f"network        {_network(cluster.network)}"
        if isinstance(cluster.network, RingNetwork)
        else "network        none: the exchange takes no time",
        "",
    ]
    rows = [["scale", "ranks", "batch", "exchange", "even", "optimal", "speed-up", "samples/s"]]
    for point in points:
        result = point.comparison
        seconds = vars(result.exchange).values()
        even = result.samples_per_second(result.even_step_seconds)
        optimal = result.samples_per_second(result.optimal_step_seconds)
        rows.append(
            [
                f"x{point.factor}",
                str(point.ranks),
                str(result.global_batch_size),
                f"{sum(seconds) * 1e3:.1f} ms",
                f"{result.even_step_seconds * 1e3:.1f} ms",
                f"{result.optimal_step_seconds * 1e3:.1f} ms",
                f"{result.speed_up:.2f}",
                f"{even or 0:.0f} -> {optimal or 0:.0f}",
            ]
        )
    lines += [*table(rows), ""]
    last = points[-1]
    shares = []
    for start, (speed, count) in zip(_starts(counts), counts.items(), strict=True):
        # Copies of a rank stand side by side.
        chosen = slice(start * last.factor, (start + count) * last.factor)
        shares.append(f"{speed} {span(last.comparison.optimal_local_batches[chosen])}")
    lines.append(f"local batches at x{last.factor}: {', '.join(shares)}")
    if built_in:
        lines += ["", _ASSUMED]
    return "\n".join(lines)


def to_json(
    name: str, profile: Profile, points: list[ScalePoint], *, built_in: bool
) -> dict[str, Any]:
    """The result as JSON types."""
    return {
        "cluster": name,
        "speeds_are_assumptions": built_in,
        "scales": [
            {
                "scale": point.factor,
                "ranks": point.ranks,
                "global_batch_size": point.comparison.global_batch_size,
                "overlapped_seconds": point.comparison.exchange.overlapped_seconds,
                "final_seconds": point.comparison.exchange.final_seconds,
                "even_step_seconds": point.comparison.even_step_seconds,
                "optimal_step_seconds": point.comparison.optimal_step_seconds,
                "even_samples_per_second": point.comparison.samples_per_second(
                    point.comparison.even_step_seconds
                ),
                "optimal_samples_per_second": point.comparison.samples_per_second(
                    point.comparison.optimal_step_seconds
                ),
                "speed_up": point.comparison.speed_up,
            }
            for point in points
        ],
        "speed_classes": {
            speed: len(profile.cluster.members(speed)) for speed in profile.cluster.speed_classes
        },
    }


def _network(network: RingNetwork) -> str:
    return (
        f"{network.gradient_bytes / 1e6:.1f} MB of gradient over "
        f"{network.bandwidth_bits_per_second / 1e9:g} Gbit/s, "
        f"{network.latency_seconds * 1e6:g} us a message, "
        f"{network.overlapped_share:.0%} of it beside backward"
    )


def _starts(counts: dict[str, int]) -> list[int]:
    """The first rank of each class: a profile's classes follow one another."""
    starts = [0]
    for count in counts.values():
        starts.append(starts[-1] + count)
    return starts[:-1]
