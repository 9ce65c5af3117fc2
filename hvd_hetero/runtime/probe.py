"""What exchanges cost here: real collectives, and a rank's own work, timed at start-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from hvd_hetero.compression.topk import Selector, k_for, value_dtype
from hvd_hetero.compression.wire import pack, unpack
from hvd_hetero.errors import check_float
from hvd_hetero.exchange.collectives import Collectives, Handle
from hvd_hetero.planning.cost_model import COLLECTIVES, CostCurve, CostModel, LocalCosts
from hvd_hetero.runtime.clock import now_seconds, wait_until

_SMALLEST_BYTES = 1 << 10
_LARGEST_BYTES = 1 << 24
_FIRST_GROWTH = 64
_GROWTHS = (8, 4, 2)
_VISIBLE_RATIO = 3.0  # of the seconds of the largest and the smallest size
_WARM_UP_SECONDS = 0.05  # what takes longer is not warmed up: little changes beside it
_MOST_PASSES = 15

_LOCAL_ELEMENTS = 1 << 20
_LOCAL_CFS = (10.0, 1000.0)
_LOCAL_REPEATS = 9


@dataclass
class _Probe:
    """One collective at one size: the seconds of each use, alike on all ranks."""

    kind: str
    tensor: torch.Tensor
    seconds: list[float] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def measure_collectives(
    collectives: Collectives, timeout_seconds: float, budget_seconds: float = 0.8
) -> CostModel:
    """Time collectives of growing sizes and return their costs, the same model on every rank.

    Every rank calls it at the same place; it blocks for about ``budget_seconds``, longer only
    where the cost of a byte does not show before. All that is decided rests on numbers that were
    exchanged, so no rank can run one collective more than another.

    1. Sizes grow as long as the next one still fits into the budget.
    2. What is left of it repeats them, the smaller ones more often; medians count.

    Raises ExchangeTimeoutError when a collective takes longer than ``timeout_seconds``,
    ConfigurationError for a budget that is not positive.
    """
    check_float("budget_seconds", budget_seconds, minimum=0.0, exclusive_minimum=True)
    if collectives.size == 1:
        return CostModel.free()
    session = _Session(collectives, timeout_seconds)
    start = now_seconds()
    sizes: list[list[_Probe]] = []
    next_size: tuple[int, bool] | None = _SMALLEST_BYTES, True
    while next_size is not None:
        bytes, warm_up = next_size
        size = session.probes_of(bytes)
        if warm_up:  # the first use of a name costs Horovod another round
            session.run(size)
            for probe in size:
                probe.seconds.clear()
        elapsed = session.run(size, since=start)
        sizes.append(size)
        next_size = _next_size(bytes, sizes, budget_seconds - elapsed)
    for _ in range(_MOST_PASSES):
        fitting = _fitting(sizes, budget_seconds - elapsed)
        if not fitting:
            break
        elapsed = session.run(fitting, since=start)
    probes = [probe for size in sizes for probe in size]
    return CostModel(
        collectives.size, *(_curve([p for p in probes if p.kind == kind]) for kind in COLLECTIVES)
    )


def _next_size(
    bytes: int, sizes: list[list[_Probe]], left_seconds: float
) -> tuple[int, bool] | None:
    """Return the next bytes to measure, and whether to warm up; None when no more fit."""
    if len(sizes) == 1:
        return bytes * _FIRST_GROWTH, True
    times = [_seconds_of(size) for size in sizes]
    for growth in _GROWTHS:
        # Straight on in bytes; the last size was at least twice the one before it.
        expected = times[-1] + growth * max(times[-1] - times[-2], 0.0)
        warm_up = expected < _WARM_UP_SECONDS
        # As long as bytes cost little beside latency, a slope from here would be noise.
        hidden = times[-1] < _VISIBLE_RATIO * times[0] and left_seconds > 0.0
        if bytes * growth > _LARGEST_BYTES:
            continue
        if hidden or expected * (2 if warm_up else 1) <= left_seconds:
            return bytes * growth, warm_up
    return None


def _fitting(sizes: list[list[_Probe]], left_seconds: float) -> list[_Probe]:
    """Return the probes of the smaller sizes, as many as can run within ``left_seconds``."""
    probes: list[_Probe] = []
    for size in sizes:
        left_seconds -= _seconds_of(size)
        if left_seconds < 0.0:
            break
        probes += size
    return probes


def _seconds_of(size: list[_Probe]) -> float:
    return sum(median(probe.seconds) for probe in size)


def _curve(probes: list[_Probe]) -> CostCurve:
    return CostCurve(
        tuple(float(probe.bytes) for probe in probes),
        tuple(median(probe.seconds) for probe in probes),
    )


class _Session:
    """Runs probes and agrees on their seconds."""

    def __init__(self, collectives: Collectives, timeout_seconds: float) -> None:
        self._collectives = collectives
        self._timeout_seconds = timeout_seconds

    def probes_of(self, bytes: int) -> list[_Probe]:
        """Return a probe of each kind that moves about ``bytes`` over a link."""
        # A rank contributes little to a gather of packets, and indices are few beside values.
        sizes = {
            "allreduce": bytes,
            "allgather": max(bytes // self._collectives.size, 4),
            "broadcast": max(bytes // 8, 4),
        }
        return [_Probe(kind, torch.zeros(sizes[kind] // 4)) for kind in COLLECTIVES]

    def run(self, probes: list[_Probe], since: float | None = None) -> float:
        """Run each probe once and add its seconds to it.

        Returns the seconds since ``since`` on the rank where they are most.

        An allreduce ends on all ranks about together, so the mean over ranks is what it takes: who
        starts early waits as much longer as who starts late waits shorter. The other two end
        earlier on some ranks: the most count, and all ranks meet before the next probe.
        """
        own = []
        for probe in probes:
            own.append(self._seconds(probe))
            if probe.kind != "allreduce":
                self._gather([0.0])
        own.append(0.0 if since is None else now_seconds() - since)
        by_rank = self._gather(own)
        mean, most = by_rank.mean(dim=0).tolist(), by_rank.amax(dim=0).tolist()
        for index, probe in enumerate(probes):
            probe.seconds.append(mean[index] if probe.kind == "allreduce" else most[index])
        return float(most[-1])

    def _gather(self, own: list[float]) -> torch.Tensor:
        """Return the numbers of all ranks, float64 [ranks, len(own)]."""
        name = f"hvd_hetero.probe.agree.{len(own)}"
        message = torch.tensor(own, dtype=torch.float64)
        gathered = self._wait(self._collectives.allgather_async(message, name), name)
        return gathered.view(self._collectives.size, -1)

    def _seconds(self, probe: _Probe) -> float:
        name = f"hvd_hetero.probe.{probe.kind}.{probe.bytes}"
        start = now_seconds()
        if probe.kind == "allreduce":
            handle = self._collectives.allreduce_async(probe.tensor, name)
        elif probe.kind == "allgather":
            handle = self._collectives.allgather_async(probe.tensor, name)
        else:
            handle = self._collectives.broadcast_async(probe.tensor, 0, name)
        self._wait(handle, name)
        return now_seconds() - start

    def _wait(self, handle: Handle, name: str) -> torch.Tensor:
        wait_until(
            handle.done,
            self._timeout_seconds,
            lambda: f"rank {self._collectives.rank}: start-up measurement {name!r}",
        )
        return handle.result()


def measure_local(
    elements: int, dtype: torch.dtype, device: torch.device | str, budget_seconds: float = 0.1
) -> LocalCosts:
    """Time selection and packing, unpacking and adding, for buckets of about ``elements``.

    On random numbers, at most a million, at two compression factors, which tell the part that goes
    with the elements from the part that goes with the entries. Nothing is exchanged.

    Raises ConfigurationError for a budget that is not positive.
    """
    check_float("budget_seconds", budget_seconds, minimum=0.0, exclusive_minimum=True)
    elements = min(max(elements, 1), _LOCAL_ELEMENTS)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(elements, generator=generator).to(device, value_dtype(dtype))
    output = torch.empty_like(gradient)
    few, many = (k_for(elements, cf) for cf in sorted(_LOCAL_CFS, reverse=True))
    timers = {k: _LocalTimer(gradient, output, k) for k in (few, many)}
    select: dict[int, list[float]] = {few: [], many: []}
    decode: dict[int, list[float]] = {few: [], many: []}
    end = now_seconds() + budget_seconds
    for repeat in range(_LOCAL_REPEATS):
        if repeat > 1 and now_seconds() > end:
            break
        for k, timer in timers.items():
            selecting, decoding = timer.measure()
            if repeat > 0:  # the first has no threshold to start from
                select[k].append(selecting)
                decode[k].append(decoding)
    return LocalCosts(
        *_line(elements, few, many, select), *reversed(_line(elements, few, many, decode))
    )


class _LocalTimer:
    """Selects, packs, unpacks and adds ``k`` entries of a bucket."""

    def __init__(self, gradient: torch.Tensor, output: torch.Tensor, k: int) -> None:
        self._gradient = gradient
        self._residual = torch.zeros_like(gradient)
        self._output = output
        self._k = k
        self._selector = Selector()

    def measure(self) -> tuple[float, float]:
        """Return the seconds of selecting and packing, and of unpacking and adding."""
        elements, dtype = self._gradient.numel(), self._gradient.dtype
        packets = []

        def compress() -> None:
            sparse = self._selector.select(self._gradient, self._k, add=self._residual)
            packets.append(pack(sparse, "float16").data)

        def decode() -> None:
            sparse = unpack(packets[0], self._k, elements, dtype, "float16").sparse
            self._output.zero_()
            self._output.index_add_(0, sparse.indices, sparse.values)

        return self._seconds(compress), self._seconds(decode)

    def _seconds(self, work: Callable[[], None]) -> float:
        start = now_seconds()
        work()
        if self._gradient.is_cuda:
            torch.cuda.synchronize(self._gradient.device)
        return now_seconds() - start


def _line(
    elements: int, few: int, many: int, seconds: dict[int, list[float]]
) -> tuple[float, float]:
    """Return (seconds per element, seconds per entry), neither negative."""
    at_few, at_many = median(seconds[few]), median(seconds[many])
    per_entry = max(at_many - at_few, 0.0) / max(many - few, 1)
    return max(at_few - per_entry * few, 0.0) / elements, per_entry
