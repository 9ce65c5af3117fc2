"""Layers that talk across ranks in forward, known by the backward of Horovod's collectives.

The gradient of such a layer holds parts of the losses of other ranks, so that weighing it after
backward by this rank's samples is wrong; weighing every loss before backward is exact. Only what
goes through autograd functions of Horovod is seen, not a function of the user's own.

They also make fast ranks wait for slow ones in the middle of a step, which is no work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from horovod.torch import mpi_ops, sync_batch_norm

from hvd_hetero.runtime.timings import StepTimer

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
_timers: WeakSet[StepTimer] = WeakSet()
_inside = False


def watch_collectives(timer: StepTimer, exact: bool) -> None:
    """From now on notice the backward of Horovod's differentiable collectives in this process.

    timer: is told how long they take. exact: from now on also let all of them give the derivative
    of the sum of the ranks' losses. For good, as autograd keeps the hooks of a wrapped optimizer.
    """
    global _exact
    _exact = _exact or exact
    _timers.add(timer)
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
    stock_forward, stock_backward = function.forward, function.backward
    power = _MISSING_POWER.get(function.__name__, 0)

    def forward(ctx: Any, *inputs: Any) -> Any:
        with _waiting():
            return stock_forward(ctx, *inputs)

    def backward(ctx: Any, *gradients: Any) -> Any:
        global _latest_graph_task
        _latest_graph_task = max(_latest_graph_task, _graph_task())
        with _waiting():
            results = stock_backward(ctx, *gradients)
        if not _exact or power == 0:
            return results
        factor = float(ctx.process_set.size()) ** power
        return tuple(one * factor if isinstance(one, torch.Tensor) else one for one in results)

    # torch looks both up on the class whenever it runs one.
    function.forward = staticmethod(forward)
    function.backward = staticmethod(backward)


@contextmanager
def _waiting() -> Iterator[None]:
    """Count the block as waiting; the backward of one collective calls another."""
    global _inside
    if _inside:
        yield
        return
    _inside = True
    try:
        with ExitStack() as stack:
            for timer in list(_timers):
                stack.enter_context(timer.waiting())
            yield
    finally:
        _inside = False


def _graph_task() -> int:
    return int(torch._C._current_graph_task_id())
