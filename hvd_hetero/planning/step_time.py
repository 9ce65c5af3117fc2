"""Seconds of a step under every option, before trying it (Cannikin, arXiv 2402.05302).

    T = max( max_i done_i + compress,  max_i ready_i + T_o ) + T_u + decode

ready_i: seconds of rank i's own work until its first bucket is ready; done_i: until the end of
backward; T_o: exchange of all buckets but the last; T_u: of the last. Both are without
compression's own seconds, which come from ``LocalCosts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_hetero.compression.topk import value_dtype
from hvd_hetero.compression.wire import index_bytes, packed_bytes
from hvd_hetero.errors import ConfigurationError, check_choice, check_float
from hvd_hetero.planning.cost_model import (
    CollectiveCall,
    CostModel,
    LocalCosts,
    shared_value_bytes,
)
from hvd_hetero.planning.sparse_bytes import sparse_saves_bytes

STRATEGIES = ("dense", "allgather", "shared-index")


@dataclass(frozen=True)
class Option:
    """A compression factor with the exchange that carries it; ``DENSE`` sends everything.

    Raises:
        ConfigurationError: a factor without, or with, a dense exchange.
    """

    cf: float | None
    strategy: str

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        if self.cf is not None:
            object.__setattr__(self, "cf", check_float("cf", self.cf, minimum=1.0))
        if (self.cf is None) != (self.strategy == "dense"):
            raise ConfigurationError(
                f"cf={self.cf} with strategy={self.strategy!r}: dense has no factor, and every "
                "other exchange needs one"
            )

    def __str__(self) -> str:
        return "dense" if self.cf is None else f"CF {self.cf:g} {self.strategy}"

    def to_list(self) -> list[Any]:
        """Return JSON-able values; ``Option(*values)`` undoes it."""
        return [self.cf, self.strategy]


DENSE = Option(None, "dense")


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a rank's own work in a step, without compression's; see the module docstring."""

    ready_seconds: float
    done_seconds: float

    def __post_init__(self) -> None:
        check_float("ready_seconds", self.ready_seconds, minimum=0.0)
        check_float("done_seconds", self.done_seconds, minimum=0.0)


def predict_step_seconds(
    rank_times: Sequence[RankTimes],
    exchange_seconds: Sequence[float],
    compress_seconds: float,
    decode_seconds: float,
) -> float:
    """Return T of the module docstring.

    Args:
        rank_times: one per rank.
        exchange_seconds: of each bucket, in the order in which they are launched.
        compress_seconds: a rank's own, of all buckets together.
        decode_seconds: a rank's own, of all buckets together.

    Raises:
        ConfigurationError: there are no ranks.
    """
    if not rank_times:
        raise ConfigurationError("rank_times=(): a step needs at least one rank")
    *early, last = exchange_seconds or (0.0,)
    done = max(rank.done_seconds for rank in rank_times) + compress_seconds
    exchanged = max(rank.ready_seconds for rank in rank_times) + sum(early)
    return max(done, exchanged) + last + decode_seconds


def predict_options(
    ladder: Sequence[float],
    strategies: Sequence[str],
    bucket_elements: Sequence[int],
    ranks: int,
    ks_by_cf: Mapping[float, Sequence[int]],
    cost_model: CostModel,
    local_costs: LocalCosts,
    values_as: str,
    rank_times: Sequence[RankTimes],
    *,
    dtypes: Sequence[torch.dtype] | None = None,
) -> dict[Option, float]:
    """Return predicted step seconds of dense and of every factor with every strategy.

    A bucket that would not save bytes goes dense under every option, as the exchange does it.

    Args:
        ladder: compression factors.
        strategies: "allgather", "shared-index" or both.
        bucket_elements: length of each bucket, in the order in which they are launched.
        ranks: n.
        ks_by_cf: for each factor, the entries of each bucket (``allocation.allocate``).
        cost_model: seconds of the collectives.
        local_costs: of the slowest rank.
        values_as: as in ``wire.pack``.
        rank_times: one per rank, in seconds of a step without compression's own work.
        dtypes: in which each bucket would travel dense; None: all float32.

    Raises:
        ConfigurationError: numbers do not fit together.
    """
    types = [torch.float32] * len(bucket_elements) if dtypes is None else list(dtypes)

    def exchange(option: Option, ks: Sequence[int]) -> list[float]:
        return bucket_seconds(option, bucket_elements, types, ks, ranks, cost_model, values_as)

    dense = exchange(DENSE, bucket_elements)
    result = {DENSE: predict_step_seconds(rank_times, dense, 0.0, 0.0)}
    for cf in ladder:
        for strategy in strategies:
            option, compress, decode = Option(cf, strategy), 0.0, 0.0
            for k, elements, dtype in zip(ks_by_cf[cf], bucket_elements, types, strict=True):
                if not sparse_saves_bytes(ranks, k, elements, dtype, values_as, strategy):
                    continue
                compress += local_costs.compress_seconds(elements, k)
                entries = ranks * k if strategy == "allgather" else k
                decode += local_costs.decode_seconds(elements, entries)
            result[option] = predict_step_seconds(
                rank_times, exchange(option, ks_by_cf[cf]), compress, decode
            )
    return result


def bucket_seconds(
    option: Option,
    bucket_elements: Sequence[int],
    dtypes: Sequence[torch.dtype],
    ks: Sequence[int],
    ranks: int,
    cost_model: CostModel,
    values_as: str,
) -> list[float]:
    """Return the seconds of each bucket's exchange under ``option``, in order of launch.

    A bucket that would not save bytes goes dense, as the exchange does it. ``ks``: entries kept
    of each bucket, of no meaning for dense; the rest as in ``predict_options``.
    """
    seconds = []
    for k, elements, dtype in zip(ks, bucket_elements, dtypes, strict=True):
        sparse = option.cf is not None and sparse_saves_bytes(
            ranks, k, elements, dtype, values_as, option.strategy
        )
        how = option.strategy if sparse else "dense"
        calls = collective_calls(how, ranks, k, elements, dtype, values_as)
        seconds.append(cost_model.seconds(calls))
    return seconds


def collective_calls(
    strategy: str, ranks: int, k: int, elements: int, dtype: torch.dtype, values_as: str
) -> tuple[CollectiveCall, ...]:
    """Return the collectives by which ``strategy`` exchanges a bucket, one after the other.

    Args:
        strategy: one of STRATEGIES.
        ranks: n.
        k: entries kept; of no meaning for "dense".
        elements: d, the length of the bucket.
        dtype: in which it would travel dense.
        values_as: as in ``wire.pack``.

    Raises:
        ConfigurationError: an argument is out of range.
    """
    check_choice("strategy", strategy, STRATEGIES)
    if strategy == "dense":
        return (CollectiveCall("allreduce", elements * dtype.itemsize),)
    if strategy == "allgather":
        return (CollectiveCall("allgather", packed_bytes(k, elements, dtype, values_as)),)
    width = shared_value_bytes(ranks, value_dtype(dtype).itemsize, values_as)
    return (
        CollectiveCall("broadcast", index_bytes(k, elements)),
        CollectiveCall("allreduce", k * width),
    )
