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
from hvd_hetero.planning.cost_curve import CostCurve
from hvd_hetero.planning.cost_model import COLLECTIVES, CostModel, LocalCosts
from hvd_hetero.runtime.clock import now_seconds, wait_until

_FIRST_BYTES = (1 << 10, 1 << 16)
_LARGEST_BYTES = 1 << 24
_GROWTHS = (8, 4, 2)
_VISIBLE_RATIO = 3.0  # of the seconds of the largest and the smallest size
_WARM_UP_SECONDS = 0.05  # what takes longer is not warmed up: little changes beside it
_MOST_PASSES = 15
_GROWING_SHARE = 0.9  # of the budget; the rest repeats

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
    collectives: Collectives,
    timeout_seconds: float,
    budget_seconds: float = 0.8,
    prefix: str = "hvd_hetero",
) -> CostModel:
    """Time collectives of growing sizes and return their costs, the same model on every rank.

    Every rank calls it at the same place; it blocks for about ``budget_seconds``, longer only
    where the cost of a byte does not show before. All that is decided rests on numbers that were
    exchanged, so no rank can run one collective more than another.

    1. Two sizes of each collective show latency and, maybe, the cost of a byte.
    2. Sizes grow until the cost of a byte shows; those of the allreduce, which has the largest
       messages to predict, as long as the next one still fits into the budget.
    3. What is left of it repeats all sizes, or the smaller ones; medians count.

    prefix: of the collectives' names.

    Raises ExchangeTimeoutError when a collective takes longer than ``timeout_seconds``,
    ConfigurationError for a budget that is not positive.
    """
    check_float("budget_seconds", budget_seconds, minimum=0.0, exclusive_minimum=True)
    if collectives.size == 1:
        return CostModel.free()
    session = _Session(collectives, timeout_seconds, prefix)
    probes = {kind: [session.probe(kind, bytes) for bytes in _FIRST_BYTES] for kind in COLLECTIVES}
    session.run(_in_order(probes), warm_up=True)
    elapsed = session.run(_in_order(probes))
    for kind in reversed(COLLECTIVES):  # the allreduce takes what the others leave
        bytes: int | None = _FIRST_BYTES[-1]
        while bytes is not None:
            left_seconds = _GROWING_SHARE * budget_seconds - elapsed
            bytes, warm_up = _next_bytes(bytes, probes[kind], left_seconds)
            if bytes is not None:
                larger = session.probe(kind, bytes)
                if warm_up:
                    session.run([larger], warm_up=True)
                elapsed = session.run([larger])
                probes[kind].append(larger)
    elapsed = session.run(_in_order(probes, len(_FIRST_BYTES)))
    for _ in range(_MOST_PASSES):
        fitting = _fitting(probes, budget_seconds - elapsed)
        if not fitting:
            break
        elapsed = session.run(fitting)
    return CostModel(collectives.size, *(_curve(probes[kind]) for kind in COLLECTIVES))


def _next_bytes(bytes: int, probes: list[_Probe], left_seconds: float) -> tuple[int | None, bool]:
    """Return the next size to measure, None when no larger one fits, and whether to warm up."""
    first, before, last = (median(probes[index].seconds) for index in (0, -2, -1))
    # As long as bytes cost little beside latency, a slope from here would be noise.
    hidden = last < _VISIBLE_RATIO * first and left_seconds > 0.0
    for growth in _GROWTHS:
        # Straight on in bytes; the last size was at least twice the one before it.
        expected = last + growth * max(last - before, 0.0)
        warm_up = expected < _WARM_UP_SECONDS
        fits = expected * (2 if warm_up else 1) <= left_seconds
        wanted = hidden or (fits and probes[0].kind == "allreduce")
        if wanted and bytes * growth <= _LARGEST_BYTES:
            return bytes * growth, warm_up
    return None, False


def _in_order(probes: dict[str, list[_Probe]], sizes: int | None = None) -> list[_Probe]:
    """Return the probes of the smallest sizes (None: of all), kind by kind, sizes ascending.

    So whatever one leaves behind, ranks that are ahead of others, is small beside the next one.
    """
    return [probe for kind in COLLECTIVES for probe in probes[kind][:sizes]]


def _fitting(probes: dict[str, list[_Probe]], left_seconds: float) -> list[_Probe]:
    """Return the probes of as many sizes as can run within ``left_seconds``."""
    for sizes in range(max(map(len, probes.values())), 0, -1):
        fitting = _in_order(probes, sizes)
        if sum(median(probe.seconds) for probe in fitting) <= left_seconds:
            return fitting
    return []


def _curve(probes: list[_Probe]) -> CostCurve:
    return CostCurve(
        tuple(float(probe.bytes) for probe in probes),
        tuple(median(probe.seconds) for probe in probes),
    )


class _Session:
    """Runs probes and agrees on their seconds."""

    def __init__(self, collectives: Collectives, timeout_seconds: float, prefix: str) -> None:
        self._collectives = collectives
        self._timeout_seconds = timeout_seconds
        self._prefix = prefix
        self._start = now_seconds()

    def probe(self, kind: str, bytes: int) -> _Probe:
        """Return a probe that moves about ``bytes`` over a link, fewer for indices."""
        ranks = self._collectives.size
        share = {"allreduce": bytes, "allgather": bytes // ranks, "broadcast": bytes // 4}[kind]
        return _Probe(kind, torch.zeros(max(share // 4, 1)))

    def run(self, probes: list[_Probe], warm_up: bool = False) -> float:
        """Run each probe once and add its seconds to it, if not to warm up.

        Returns the seconds since the start of the session on the rank where they are most.

        An allreduce ends on all ranks about together, so the mean over ranks is what it takes: who
        starts early waits as much longer as who starts late waits shorter. The other two end
        earlier on some ranks: the most count.
        """
        own = [self._seconds(probe) for probe in probes]
        own.append(now_seconds() - self._start)
        by_rank = self._gather(own)
        mean, most = by_rank.mean(dim=0).tolist(), by_rank.amax(dim=0).tolist()
        if not warm_up:
            for index, probe in enumerate(probes):
                probe.seconds.append(mean[index] if probe.kind == "allreduce" else most[index])
        return float(most[-1])

    def _gather(self, own: list[float]) -> torch.Tensor:
        """Return the numbers of all ranks, float64 [ranks, len(own)]."""
        name = f"{self._prefix}.probe.agree.{len(own)}"
        message = torch.tensor(own, dtype=torch.float64)
        gathered = self._wait(self._collectives.allgather_async(message, name), name)
        return gathered.view(self._collectives.size, -1)

    def _seconds(self, probe: _Probe) -> float:
        name = f"{self._prefix}.probe.{probe.kind}.{probe.bytes}"
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
