"""What a cluster would do, computed before anything is trained; pure functions.

Cannikin (Nie, Maghakian, Liu; Middleware 2024, arXiv 2402.05302): the step of section 4.2 and the
optimal split of section 4.3 (``balance.optperf``), compared with the even split, with one rank
more, and with many times the ranks. The exchange is either given in seconds or that of a ring:

    allreduce (ring)        2 (n-1)/n * bytes / bandwidth + 2 (n-1) * latency

A rank is one worker of the training job: as a rule, one accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hvd_hetero.balance.lines import Line, RankModel, TimingPoint
from hvd_hetero.balance.optperf import Bounds, solve, step_seconds
from hvd_hetero.balance.perf_model import RankModelFit
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError, check_float, check_int

BITS_PER_BYTE = 8
ALIKE = 0.1  # ranks whose seconds differ by no more than this share are of one speed class


@dataclass(frozen=True)
class ExchangeSeconds:
    """T_o and T_u of a step: exchange of all gradient buckets but the last, and of the last.

    As a network of its own: seconds measured or assumed, the same for every number of ranks.
    """

    overlapped_seconds: float = 0.0
    final_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_float("overlapped_seconds", self.overlapped_seconds, minimum=0.0)
        check_float("final_seconds", self.final_seconds, minimum=0.0)

    def exchange(self, ranks: int) -> ExchangeSeconds:
        """Return the seconds given; 0 for one rank, which has nobody to exchange with."""
        return self if ranks > 1 else ExchangeSeconds()


@dataclass(frozen=True)
class RingNetwork:
    """A ring allreduce of the whole gradient; see the module docstring.

    gradient_bytes: of one rank's gradient. bandwidth_bits_per_second: of a rank's slowest link,
    one direction. latency_seconds: of one message. overlapped_share: the part of the exchange
    that may run beside backward (T_o); the rest follows backward (T_u).
    """

    gradient_bytes: float
    bandwidth_bits_per_second: float
    latency_seconds: float = 0.0
    overlapped_share: float = 0.0

    def __post_init__(self) -> None:
        check_float("gradient_bytes", self.gradient_bytes, minimum=0.0)
        bandwidth = self.bandwidth_bits_per_second
        check_float("bandwidth_bits_per_second", bandwidth, minimum=0.0, exclusive_minimum=True)
        check_float("latency_seconds", self.latency_seconds, minimum=0.0)
        check_float("overlapped_share", self.overlapped_share, minimum=0.0, maximum=1.0)

    def allreduce_seconds(self, ranks: int) -> float:
        """Return the seconds of the whole exchange among ``ranks`` ranks; 0 for one."""
        ranks = check_int("ranks", ranks, minimum=1)
        bits = BITS_PER_BYTE * self.gradient_bytes
        transfer = 2 * (ranks - 1) / ranks * bits / self.bandwidth_bits_per_second
        return transfer + 2 * (ranks - 1) * self.latency_seconds

    def exchange(self, ranks: int) -> ExchangeSeconds:
        """Return T_o and T_u among ``ranks`` ranks."""
        whole = self.allreduce_seconds(ranks)
        overlapped = self.overlapped_share * whole
        return ExchangeSeconds(overlapped, whole - overlapped)


@dataclass(frozen=True)
class Rank:
    """One rank: its speed, the samples it may take, and the name of its speed class.

    max_local_batch: None where only the global batch is a limit.
    """

    model: RankModel
    speed_class: str
    min_local_batch: int = 1
    max_local_batch: int | None = None

    def __post_init__(self) -> None:
        low = check_int("min_local_batch", self.min_local_batch, minimum=1)
        if self.max_local_batch is not None:
            check_int("max_local_batch", self.max_local_batch, minimum=low)


@dataclass(frozen=True)
class Cluster:
    """Ranks, in rank order, and the network between them. ConfigurationError without ranks."""

    ranks: tuple[Rank, ...]
    network: ExchangeSeconds | RingNetwork = ExchangeSeconds()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ConfigurationError("ranks=(): a cluster needs at least one rank")

    @property
    def speed_classes(self) -> tuple[str, ...]:
        """Names of the speed classes, in the order of their first rank."""
        return tuple(dict.fromkeys(rank.speed_class for rank in self.ranks))

    def members(self, speed_class: str) -> tuple[int, ...]:
        """Return the ranks of ``speed_class``."""
        return tuple(i for i, rank in enumerate(self.ranks) if rank.speed_class == speed_class)

    def scaled(self, factor: int) -> Cluster:
        """Return the cluster with every rank ``factor`` times."""
        factor = check_int("factor", factor, minimum=1)
        return replace(self, ranks=tuple(rank for rank in self.ranks for _ in range(factor)))

    def with_one_more(self, speed_class: str) -> Cluster:
        """Return the cluster with one rank more: a copy of the class's median rank, put last.

        Raises ConfigurationError when there is no such class.
        """
        members = [self.ranks[i] for i in self.members(speed_class)]
        if not members:
            raise ConfigurationError(
                f"speed_class={speed_class!r}: must be one of {', '.join(self.speed_classes)}"
            )
        members.sort(key=lambda rank: (rank.model.done.slope_seconds, rank.model.done(1)))
        return replace(self, ranks=(*self.ranks, members[len(members) // 2]))


@dataclass(frozen=True)
class Comparison:
    """The even and the optimal split of one global batch, samples of each rank in rank order.

    even_*: as even as bounds and granule allow. optimal_*: OptPerf. exchange: T_o and T_u in both.
    """

    global_batch_size: int
    even_local_batches: tuple[int, ...]
    even_step_seconds: float
    optimal_local_batches: tuple[int, ...]
    optimal_step_seconds: float
    exchange: ExchangeSeconds

    @property
    def lost_seconds(self) -> float:
        """Seconds of a step that the even split loses."""
        return self.even_step_seconds - self.optimal_step_seconds

    @property
    def lost_share(self) -> float:
        """``lost_seconds`` as a share of the even split's step, in [0, 1)."""
        return self.lost_seconds / self.even_step_seconds if self.even_step_seconds else 0.0

    @property
    def speed_up(self) -> float:
        """Even over optimal step seconds, at least 1."""
        best = self.optimal_step_seconds
        return self.even_step_seconds / best if best else 1.0

    def samples_per_second(self, step_seconds: float) -> float | None:
        """Throughput with steps of ``step_seconds``; None where a step takes no time."""
        return self.global_batch_size / step_seconds if step_seconds else None


@dataclass(frozen=True)
class Addition:
    """One rank more of a speed class, with the same global batch, split optimally.

    optimal_step_seconds: None when no split obeys the bounds then. saved_seconds: of the optimal
    step as it is; negative where the exchange among more ranks costs more than the rank brings.
    """

    speed_class: str
    optimal_step_seconds: float | None
    saved_seconds: float | None
    saved_share: float | None


@dataclass(frozen=True)
class ScalePoint:
    """A cluster with every rank ``factor`` times, and a global batch as many times larger."""

    factor: int
    ranks: int
    comparison: Comparison


def compare(cluster: Cluster, global_batch_size: int, *, granule: int = 1) -> Comparison:
    """Return the even and the optimal split of ``global_batch_size`` samples over ``cluster``.

    granule: local batches are multiples of it, but for one rank, see ``optperf.solve``.
    Raises InfeasibleBatchError with the numbers when no split obeys the bounds.
    """
    total = check_int("global_batch_size", global_batch_size, minimum=1)
    least = [rank.min_local_batch for rank in cluster.ranks]
    most = [rank.max_local_batch or max(total, rank.min_local_batch) for rank in cluster.ranks]
    bounds = Bounds.build(len(least), total, least, most)
    exchange = cluster.network.exchange(len(least))
    overlapped, final = exchange.overlapped_seconds, exchange.final_seconds
    same = [RankModel(Line(1.0, 0.0), Line(1.0, 0.0))] * len(least)
    even = solve(same, total, bounds=bounds, granule=granule).local_batches
    models = [rank.model for rank in cluster.ranks]
    best = solve(
        models,
        total,
        bounds=bounds,
        granule=granule,
        overlapped_seconds=overlapped,
        final_seconds=final,
    )
    return Comparison(
        global_batch_size=total,
        even_local_batches=even,
        even_step_seconds=step_seconds(models, even, overlapped, final),
        optimal_local_batches=best.local_batches,
        optimal_step_seconds=best.step_seconds,
        exchange=exchange,
    )


def additions(
    cluster: Cluster, comparison: Comparison, *, granule: int = 1
) -> tuple[Addition, ...]:
    """Return what one rank more of each speed class would bring.

    comparison: of ``cluster``, whose global batch is kept.
    """
    names = cluster.speed_classes
    return tuple(_addition(cluster, name, comparison, granule) for name in names)


def _addition(cluster: Cluster, name: str, now: Comparison, granule: int) -> Addition:
    try:
        more = compare(cluster.with_one_more(name), now.global_batch_size, granule=granule)
    except InfeasibleBatchError:
        return Addition(name, None, None, None)
    saved = now.optimal_step_seconds - more.optimal_step_seconds
    share = saved / now.optimal_step_seconds if now.optimal_step_seconds else 0.0
    return Addition(name, more.optimal_step_seconds, saved, share)


def scale_factors(ranks: int, last: int | None, *, most_ranks: int = 4096) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to ``last``, which is included.

    Without a ``last`` the greatest is that with at most ``most_ranks`` ranks in all; ``ranks``:
    of the cluster as it is.
    """
    ranks = check_int("ranks", ranks, minimum=1)
    end = check_int("scale", max(1, most_ranks // ranks) if last is None else last, minimum=1)
    powers = [1 << power for power in range(end.bit_length())]
    return tuple(powers) if last is None or powers[-1] == end else (*powers, end)


def simulate(
    cluster: Cluster, global_batch_size: int, factors: Sequence[int], *, granule: int = 1
) -> Iterator[ScalePoint]:
    """Yield the comparison at every scale: ranks and global batch both ``factor`` times as many."""
    for factor in factors:
        larger = cluster.scaled(factor)
        result = compare(larger, global_batch_size * factor, granule=granule)
        yield ScalePoint(factor, len(larger.ranks), result)


def classes_by_speed(models: Sequence[RankModel], local_batch: int) -> tuple[int, ...]:
    """Return a class for each rank, 0 the fastest: ranks alike within ALIKE share one.

    Ranks are compared by their seconds for ``local_batch`` samples; a class begins where a rank
    takes more than 1 + ALIKE times the seconds of the fastest rank of the class before.
    """
    seconds = [model.done(check_int("local_batch", local_batch, minimum=1)) for model in models]
    result = [0] * len(models)
    current, fastest = 0, min(seconds, default=0.0)
    for rank in sorted(range(len(models)), key=lambda rank: seconds[rank]):
        if seconds[rank] > (1.0 + ALIKE) * fastest:
            current, fastest = current + 1, seconds[rank]
        result[rank] = current
    return tuple(result)


def fit_models(
    windows: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[tuple[RankModel, ...], int]:
    """Return a line for each rank, and how many ranks have been seen with two sizes or more.

    windows: local batches and compute seconds, both one for each rank, oldest first. As in
    training (``perf_model``, ``planner``): newer windows count more, a rank seen with one size
    only gets the usual share of fixed seconds, and when that is true of all ranks (the number
    returned is 0) the lines go straight through the origin. When the first bucket is ready is not
    known: as late as the end of backward. Raises ConfigurationError when there is no window.
    """
    if not windows:
        raise ConfigurationError("windows=(): lines need at least one measured window")
    fits = [RankModelFit()] * len(windows[0][0])
    for batches, seconds in windows:
        for rank, (batch, done) in enumerate(zip(batches, seconds, strict=True)):
            # One step: the spread within the window is not known.
            fits[rank] = fits[rank].observe([TimingPoint(batch, done, done, 0.0, 1)])
    fitted = sum(fit.model() is not None for fit in fits)
    return tuple(_line(fit, through_origin=not fitted) for fit in fits), fitted


def _line(fit: RankModelFit, *, through_origin: bool) -> RankModel:
    estimate = fit.estimate()
    if estimate is None:
        raise ConfigurationError("compute_seconds=0: a rank that needs no time cannot be planned")
    if through_origin:
        done = Line(fit.points[0].done_seconds / fit.points[0].batch, 0.0)
        return RankModel(ready=done, done=done)
    return estimate
