"""Seconds and bytes of an exchange: what the planner compares strategies by.

Bytes are those of one rank, step and direction. Seconds rest on measured collectives of a few
sizes (``runtime/probe.py``), corrected by what training steps show; between and beyond the ranks
they were measured with they follow

    allreduce (ring)        2 (n-1) alpha + 2 (n-1)/n * bytes * beta
    allgather (ring)        (n-1) alpha + (n-1) * bytes * beta        bytes: of each rank
    broadcast (binomial)    ceil(log2 n) * (alpha + bytes * beta)

with alpha the seconds of a round, beta the seconds of a byte, n the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_hetero.compression.fixed_point import field_bits, fields_in_word
from hvd_hetero.errors import ConfigurationError, check_choice, check_float, check_int
from hvd_hetero.planning.cost_curve import CostCurve

COLLECTIVES = ("allreduce", "allgather", "broadcast")


@dataclass(frozen=True)
class CollectiveCall:
    """One of COLLECTIVES with a message of ``bytes``: of each rank, for an allgather.

    Raises ConfigurationError for another kind or negative bytes.
    """

    kind: str
    bytes: float

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, COLLECTIVES)
        check_float("bytes", self.bytes, minimum=0.0)


def dense_bytes(ranks: int, elements: int, itemsize: int = 4) -> float:
    """Return the bytes a rank sends in a ring allreduce of ``elements`` values.

    2 (n-1)/n * itemsize * d: reduce-scatter and allgather, each (n-1) chunks of d/n values.
    Raises ConfigurationError for ranks < 1, elements < 0 or itemsize < 1.
    """
    ranks = check_int("ranks", ranks, minimum=1)
    elements = check_int("elements", elements, minimum=0)
    itemsize = check_int("itemsize", itemsize, minimum=1)
    return 2 * (ranks - 1) * elements * itemsize / ranks


def allgather_bytes(ranks: int, packed_bytes: int) -> float:
    """Return the bytes a rank receives in an allgather of ``packed_bytes`` from each rank.

    (n-1) * packed_bytes, headers included when ``packed_bytes`` includes them.
    Raises ConfigurationError for ranks < 1 or packed_bytes < 0.
    """
    ranks = check_int("ranks", ranks, minimum=1)
    packed_bytes = check_int("packed_bytes", packed_bytes, minimum=0)
    return float((ranks - 1) * packed_bytes)


def shared_index_bytes(ranks: int, index_bytes: int, k: int, itemsize: float = 4) -> float:
    """Return the bytes a rank receives when a leader broadcasts indices and all add values there.

    index_bytes + 2 (n-1)/n * itemsize * k, as counted at a rank that does not lead; 0 for one rank.
    itemsize: see ``shared_value_bytes``.
    Raises ConfigurationError for ranks < 1, itemsize < 1 or negative sizes.
    """
    ranks = check_int("ranks", ranks, minimum=1)
    index_bytes = check_int("index_bytes", index_bytes, minimum=0)
    k = check_int("k", k, minimum=0)
    itemsize = check_float("itemsize", itemsize, minimum=1.0)
    return (index_bytes if ranks > 1 else 0) + 2 * (ranks - 1) * k * itemsize / ranks


def shared_value_bytes(ranks: int, itemsize: int, values_as: str) -> float:
    """Return the bytes of a value that is summed on its way in a shared-index exchange.

    With ``values_as="float16"``, float32 gradients (itemsize 4) and a number of ranks whose sums
    fit, values are fixed-point numbers, 3 to 6 of them in 8 bytes; else a value is ``itemsize``.
    """
    if values_as == "float16" and itemsize == 4 and field_bits(ranks) is not None:
        return 8 / fields_in_word(ranks)
    return float(itemsize)


@dataclass(frozen=True)
class CostModel:
    """Seconds of the collectives among ``ranks`` ranks.

    allreduce and broadcast by the bytes of the message, allgather by the bytes that each rank
    contributes. Without local work: see LocalCosts.

    Raises ConfigurationError for ranks < 1.
    """

    ranks: int
    allreduce: CostCurve
    allgather: CostCurve
    broadcast: CostCurve

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", check_int("ranks", self.ranks, minimum=1))

    @classmethod
    def free(cls, ranks: int = 1) -> CostModel:
        """Return a model in which nothing takes time, as in a world of one rank."""
        nothing = CostCurve((0.0,), (0.0,))
        return cls(ranks, nothing, nothing, nothing)

    def seconds(self, calls: Iterable[CollectiveCall]) -> float:
        """Return the seconds of collectives that follow each other."""
        return sum((self._curve(call).seconds_for(call.bytes) for call in calls), 0.0)

    def refined(self, calls: Sequence[CollectiveCall], seconds: float) -> CostModel:
        """Return the model after ``calls``, one after the other, took ``seconds`` in a step.

        Where there are several, each is taken to be wrong by the same factor.
        Raises ConfigurationError for seconds that are negative or not finite.
        """
        check_float("seconds", seconds, minimum=0.0)
        predicted = self.seconds(calls)
        if predicted <= 0.0:
            return self
        curves: dict[str, CostCurve] = {kind: getattr(self, kind) for kind in COLLECTIVES}
        for call in calls:
            own = self._curve(call).seconds_for(call.bytes)
            curves[call.kind] = curves[call.kind].refined(call.bytes, own * seconds / predicted)
        return CostModel(self.ranks, **curves)

    def _curve(self, call: CollectiveCall) -> CostCurve:
        curve: CostCurve = getattr(self, call.kind)
        return curve

    def at_ranks(self, ranks: int) -> CostModel:
        """Return the model continued to another number of ranks by the formulas above.

        The measured latency holds what Horovod needs to agree on a collective too. It is taken to
        grow with the rounds, so that predictions for many ranks rather err to the slow side.
        Raises ConfigurationError for ranks < 1, and when measured among one rank.
        """
        ranks = check_int("ranks", ranks, minimum=1)
        if ranks == self.ranks:
            return self
        if ranks == 1:
            return CostModel.free()
        if self.ranks == 1:
            raise ConfigurationError(
                "a cost model of one rank says nothing of others: measure it among two or more"
            )
        rounds = (ranks - 1) / (self.ranks - 1)
        share = rounds * self.ranks / ranks
        depth = _tree_depth(ranks) / _tree_depth(self.ranks)
        return CostModel(
            ranks,
            self.allreduce.reshaped(rounds, share),
            self.allgather.reshaped(rounds, rounds),
            self.broadcast.reshaped(depth, depth),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        curves: dict[str, CostCurve] = {kind: getattr(self, kind) for kind in COLLECTIVES}
        return {"ranks": self.ranks} | {kind: curve.to_dict() for kind, curve in curves.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Build a model from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            curves = [CostCurve.from_dict(data[kind]) for kind in COLLECTIVES]
            return cls(data["ranks"], *curves)
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"cost model={data!r}: not a saved cost model ({error!r}); pass the dict that "
                "CostModel.to_dict() gave"
            ) from error


@dataclass(frozen=True)
class LocalCosts:
    """Seconds of a rank's own work around a sparse exchange: a part of d and a part of k.

    select_*: the residual added, k of d entries selected and packed. decode_*: an output of d
    elements cleared, and entries unpacked and added to it.

    Raises ConfigurationError for negative numbers.
    """

    select_seconds_per_element: float
    select_seconds_per_entry: float
    decode_seconds_per_entry: float
    decode_seconds_per_element: float

    def __post_init__(self) -> None:
        for name in _LOCAL_COSTS:
            object.__setattr__(self, name, check_float(name, getattr(self, name), minimum=0.0))

    def compress_seconds(self, elements: int, k: int) -> float:
        """Return the seconds to select ``k`` of ``elements`` and pack them."""
        return self.select_seconds_per_element * elements + self.select_seconds_per_entry * k

    def decode_seconds(self, elements: int, entries: int) -> float:
        """Return the seconds to add ``entries`` (over all ranks) into ``elements`` zeros."""
        return self.decode_seconds_per_element * elements + self.decode_seconds_per_entry * entries

    def to_dict(self) -> dict[str, float]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {name: getattr(self, name) for name in _LOCAL_COSTS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LocalCosts:
        """Build costs from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            return cls(**{name: data[name] for name in _LOCAL_COSTS})
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"local costs={data!r}: not saved local costs ({error!r}); pass the dict that "
                "LocalCosts.to_dict() gave"
            ) from error


_LOCAL_COSTS: Sequence[str] = tuple(LocalCosts.__dataclass_fields__)


def _tree_depth(ranks: int) -> int:
    """Rounds of a binomial broadcast: ceil(log2(ranks))."""
    return (ranks - 1).bit_length()
