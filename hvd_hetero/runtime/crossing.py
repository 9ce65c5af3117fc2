"""Layers that talk across ranks in forward, known by the backward of Horovod's collectives.

The gradient of such a layer holds parts of the losses of other ranks, so that weighing it after
backward by this rank's samples is wrong; weighing every loss before backward is exact. Only what
goes through autograd functions of Horovod is seen, not a function of the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from horovod.torch import mpi_ops, sync_batch_norm

# By what power of the ranks Horovod's own backward differs from the derivative of a sum over
# ranks of their losses: some average where they would have to add, or the other way round.
_MISSING_POWER = {
    "HorovodAllgather": 1,
    "HorovodGroupedAllgather": 1,
    "HorovodBroadcast": 1,
    "HorovodReducescatter": -1,
    "HorovodGroupedReducescatter": -1,
}
_watched: set[type] = set()
_latest_graph_task = -1  # ids of backward calls ascend; one inside another has a later one
_exact = False


def watch_collectives(exact: bool) -> None:
    """From now on notice the backward of Horovod's differentiable collectives in this process.

    exact: from now on also let all of them give the derivative of the sum of the ranks' losses.
    For good, as autograd keeps the hooks of a wrapped optimizer.
    """
    global _exact
    _exact = _exact or exact
    for function in _functions():
        if function not in _watched and function is not torch.autograd.Function:
            _watched.add(function)
            _watch(function)


def has_crossed() -> bool:
    """Whether a collective was differentiated in the backward call that is running now."""
    return 0 <= _graph_task() <= _latest_graph_task


def _functions() -> Iterator[Any]:
    for module in (mpi_ops, sync_batch_norm):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                yield value


def _watch(function: Any) -> None:
    original, power = function.backward, _MISSING_POWER.get(function.__name__, 0)

    def backward(ctx: Any, *gradients: Any) -> Any:
        global _latest_graph_task
        _latest_graph_task = max(_latest_graph_task, _graph_task())
        results = original(ctx, *gradients)
        if not _exact or power == 0:
            return results
        factor = float(ctx.process_set.size()) ** power
        return tuple(one * factor if isinstance(one, torch.Tensor) else one for one in results)

    # torch looks it up on the class whenever a node of the graph runs.
    function.backward = staticmethod(backward)


def _graph_task() -> int:
    return int(torch._C._current_graph_task_id())
