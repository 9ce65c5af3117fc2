"""What happens around the steps of one wrapped optimizer: passes, exchange, agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_hetero.errors import UnsupportedError
from hvd_hetero.runtime.balancer import Balancer
from hvd_hetero.runtime.coordinator import Coordinator
from hvd_hetero.runtime.exchanger import GradientExchanger, PassWeight
from hvd_hetero.runtime.timings import StepTimer


@dataclass(frozen=True)
class WeightRule:
    """How a backward pass is weighted.

    ``rank_weight`` is used without a balancer: 1 / ranks for Horovod's Average, 1 for Sum.
    ``gradient_scale`` of mixed precision is taken out of what is exchanged, so that residuals stay
    right while it moves, and put back into ``p.grad``.
    """

    rank_weight: float
    loss_reduction: str
    loss_divided_by_passes: bool
    passes_per_step: int
    gradient_scale: float = 1.0

    def weigh(self, batch: tuple[float, float] | None) -> PassWeight:
        """Return the weight for (own samples, samples of all ranks), None without a balancer."""
        if batch is None:
            return PassWeight(self.rank_weight / self.gradient_scale, own=self.rank_weight)
        own, total = batch
        weight = (own if self.loss_reduction == "mean" else 1.0) / self.gradient_scale
        if self.passes_per_step == 1:
            return PassWeight(weight / total, own=own / total)
        if self.loss_divided_by_passes:
            weight *= self.passes_per_step
        return PassWeight(weight, total, own)


class OptimizerEngine:
    """Drives the exchange for one wrapped optimizer; the seam in ``optimizer.py`` calls it.

    ``optimizer``: the instance Horovod built; its hooks count passes in ``_allreduce_delay``.
    """

    def __init__(
        self,
        optimizer: Any,
        exchanger: GradientExchanger,
        coordinator: Coordinator,
        timer: StepTimer,
        weight_rule: Callable[[], WeightRule],
        balancer: Balancer | None,
    ) -> None:
        self._optimizer = optimizer
        self.exchanger = exchanger
        self._coordinator = coordinator
        self._timer = timer
        self._weight_rule = weight_rule
        self._balancer = balancer
        self._pass_open = False
        self._pass_batch: tuple[float, float] | None = None
        self._step_batches: list[tuple[float, float] | None] = []

    def adopt(self, named_parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take in parameters that got Horovod's hook just now, on all ranks alike."""
        self.exchanger.add_parameters(named_parameters)
        for _, parameter in named_parameters:
            self.listen(parameter)

    # ---- hooks, called by autograd --------------------------------------------------------------

    def listen(self, parameter: torch.Tensor) -> None:
        """Have this parameter's gradients added as each backward pass accumulates them."""
        parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        # Runs before Horovod's own hook of this parameter, which counts the pass.
        optimizer: Any = self._optimizer
        passes_left = optimizer._allreduce_delay[parameter]
        if passes_left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._enter_pass(optimizer.backward_passes_per_step - passes_left)
        self._refuse_sparse(parameter)
        self.exchanger.add(parameter)
        if passes_left > 1 and parameter.grad is not None:
            parameter.grad.zero_()  # the next pass adds its own gradient alone

    def _enter_pass(self, passes_seen_by_parameter: int) -> None:
        """Open a backward pass when this gradient is the first of one.

        A parameter that was in every pass so far opens the next. After the end of a pass so does
        a new batch; the same batch does not, as parts of one pass may end apart (reentrant
        activation checkpointing).
        """
        if self.exchanger.synchronized:
            self.abandon_step()  # synchronized but not applied: a skipped mixed-precision step
        opens = passes_seen_by_parameter == self.exchanger.passes
        if opens or (not self._pass_open and self._current_batch() is not self._pass_batch):
            self._open_pass()
        if not self._pass_open:
            self._pass_open = True
            engine: Any = torch.autograd.Variable._execution_engine  # as torch's own DDP does
            engine.queue_callback(self._on_backward_end)

    def _open_pass(self) -> None:
        self._pass_batch = self._current_batch()
        self._step_batches.append(self._pass_batch)
        self.exchanger.begin_pass(self._weight_rule().weigh(self._pass_batch))

    def _current_batch(self) -> tuple[float, float] | None:
        return None if self._balancer is None else self._balancer.batch_of_pass()

    def _on_backward_end(self) -> None:
        self._pass_open = False
        self._timer.backward_ended()

    def _refuse_sparse(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and not self._optimizer.sparse_as_dense:
            name = self._optimizer._parameter_names[parameter]
            raise UnsupportedError(
                f"parameter {name!r} has a sparse gradient, which compression and balancing do "
                "not handle as such: pass sparse_as_dense=True, or build the layer with "
                "sparse=False"
            )

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """All passes of this parameter are done (from Horovod's hook): launch full buckets."""
        if self.exchanger.mark_ready(parameter):
            self._timer.bucket_ready()

    # ---- the step, on the main thread -----------------------------------------------------------

    def synchronize(self) -> None:
        """Exchange and write ``p.grad``; the second call of a step does nothing."""
        self._pass_open = False
        if self.exchanger.synchronized:
            return
        self._timer.synchronize_begins()
        for parameter in self.exchanger.overlooked():
            self._refuse_sparse(parameter)
            if not self.exchanger.passes:
                self._open_pass()
            self.exchanger.add_overlooked(parameter)
        self.exchanger.synchronize(self._weight_rule().gradient_scale)
        self._coordinator.record(self._timer.exchange_ended(self._typical_batch()))

    def applied(self) -> None:
        """The optimizer has applied the gradients of this step."""
        self.exchanger.commit()
        self._close_step()
        if self._balancer is not None:
            self._balancer.step_done()
        self._coordinator.after_step()

    def abandon_step(self) -> None:
        """Throw away the gradients since the last step."""
        if self.exchanger.pending or self.exchanger.synchronized:
            self._timer.discard()
        self.exchanger.abandon()
        self._close_step()

    def forget_residuals(self) -> None:
        """Start from empty residuals, as after loading another optimizer state."""
        self.exchanger.forget_residuals()
        self._close_step()

    def _close_step(self) -> None:
        self._pass_open = False
        self._pass_batch = None
        self._step_batches = []

    def _typical_batch(self) -> int:
        """Samples of this rank in each pass of the step; 0 when passes differ or are missing."""
        if self._balancer is None:
            return 1
        sizes = {batch[0] for batch in self._step_batches if batch is not None}
        expected = self._optimizer.backward_passes_per_step
        if len(sizes) != 1 or len(self._step_batches) != expected:
            return 0
        return round(sizes.pop())
