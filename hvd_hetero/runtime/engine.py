"""What happens around the steps of one wrapped optimizer: passes, exchange, agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_hetero.errors import ConfigurationError, UnsupportedError
from hvd_hetero.runtime.agreement import Channel, verify_alike
from hvd_hetero.runtime.balancer import Balancer
from hvd_hetero.runtime.batches import Batch
from hvd_hetero.runtime.checkpoint import (
    VERSION,
    State,
    put_residuals,
    residuals_by_name,
    state_for,
)
from hvd_hetero.runtime.coordinator import Coordinator
from hvd_hetero.runtime.crossing import has_crossed
from hvd_hetero.runtime.exchanger import GradientExchanger, PassWeight
from hvd_hetero.runtime.timings import StepTimer


@dataclass(frozen=True)
class WeightRule:
    """How a backward pass is weighted.

    ``rank_weight`` is used without a balancer: 1 / ranks for Horovod's Average, 1 for Sum.
    ``ranks``: with a balancer, what Horovod's Average divides by.
    ``gradient_scale`` of mixed precision is taken out of what is exchanged, so that residuals stay
    right while it moves, and put back into ``p.grad``.
    ``loss_weighted``: each loss was multiplied by its part in the batch of its pass already.
    """

    rank_weight: float
    loss_reduction: str
    loss_divided_by_passes: bool
    passes_per_step: int
    gradient_scale: float = 1.0
    ranks: int = 1
    loss_weighted: bool = False

    def weigh(self, batch: Batch | None) -> PassWeight:
        """Return the weight for a pass over ``batch``, None without a balancer."""
        if batch is None:
            return PassWeight(self.rank_weight / self.gradient_scale, own=self.rank_weight)
        own, total = batch.own, batch.total
        if self.loss_weighted:
            weight = total / self.gradient_scale
        elif self.loss_reduction == "mean":
            weight = own / self.gradient_scale
        else:
            weight = (1.0 if own > 0.0 else 0.0) / self.gradient_scale
        if self.passes_per_step == 1:
            in_place = self.ranks * (weight * self.gradient_scale) / total
            return PassWeight(weight / total, own=own / total, in_place=in_place)
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
        self._pass_batch: Batch | None = None
        self._step_batches: list[Batch | None] = []
        self._collectives_refused = balancer is not None and coordinator.ranks > 1

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
        if self._collectives_refused and has_crossed():
            self._refuse_crossing(parameter)
        self._refuse_sparse(parameter)
        taken = self.exchanger.add(parameter)
        if taken and passes_left > 1 and parameter.grad is not None:
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
            if self._balancer is not None:
                self._balancer.pass_begins()
            self._open_pass()
        if not self._pass_open:
            self._pass_open = True
            self._timer.backward_begins()
            engine: Any = torch.autograd.Variable._execution_engine  # as torch's own DDP does
            engine.queue_callback(self._on_backward_end)

    def _open_pass(self) -> None:
        self._coordinator.before_pass()
        self._pass_batch = self._current_batch()
        self._step_batches.append(self._pass_batch)
        self.exchanger.passes_per_step = self._optimizer.backward_passes_per_step
        self.exchanger.begin_pass(self._weight_rule().weigh(self._pass_batch))

    def _current_batch(self) -> Batch | None:
        return None if self._balancer is None else self._balancer.batch_of_pass()

    def _on_backward_end(self) -> None:
        self._pass_open = False
        self._timer.backward_ended()

    def _refuse_crossing(self, parameter: torch.Tensor) -> None:
        if self._weight_rule().loss_weighted:
            return
        raise UnsupportedError(
            f"rank {self._coordinator.rank}: the gradient of parameter "
            f"{self._optimizer._parameter_names[parameter]!r} comes through a collective of "
            "Horovod (a synced norm, a gathered loss), so it holds parts of other ranks' losses "
            "and must not be weighted by this rank's samples. Weigh the losses instead: "
            "DistributedOptimizer(..., loss_weighted=True) and "
            "balancer.weigh_loss(loss).backward()"
        )

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
        self.exchanger.mark_ready(parameter)

    # ---- the step, on the main thread -----------------------------------------------------------

    def synchronize(self) -> None:
        """Exchange and write ``p.grad``; the second call of a step does nothing."""
        self._pass_open = False
        if self.exchanger.synchronized:
            return
        self._timer.synchronize_begins()
        self.exchanger.passes_per_step = self._optimizer.backward_passes_per_step
        for parameter in self.exchanger.overlooked():
            self._refuse_sparse(parameter)
            if not self.exchanger.passes:
                self._open_pass()
            self.exchanger.add_overlooked(parameter)
        self.exchanger.synchronize(self._weight_rule().gradient_scale)
        for timing in self._timer.exchange_ended(self._typical_batch()):
            self._coordinator.record(timing)

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

    # ---- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save besides the state of model and optimizer.

        Residuals by parameter name, the compression policy and the balancer with what they have
        measured, the position in the balancer's loader, and the number of steps; plain values and
        tensors, loadable with ``weights_only=True``. Every rank saves its own, between two steps.
        """
        self._refuse_open_step("hetero_state_dict")
        return {
            "version": VERSION,
            "rank": self._coordinator.rank,
            "ranks": self._coordinator.ranks,
            "steps": self._coordinator.steps,
            "exchange": self.exchanger.counters(),
            "residuals": residuals_by_name(self.exchanger),
            "compression": self._coordinator.compression_state(),
            "balancer": None if self._balancer is None else self._balancer.state_dict(),
        }

    def load_state_dict(self, states: State | Sequence[State], channel: Channel) -> None:
        """Go on from what ``hetero_state_dict`` gave; on all ranks, after ``load_state_dict``.

        With as many ranks as saved, every rank passes its own state, and at a fixed compression
        factor training goes on bit for bit. With another number of ranks every rank passes the
        list of all states: residuals are shared out, so that none of the gradient is lost.

        Args:
            states: a state, or those of all ranks that saved, in any order.

        Raises:
            ConfigurationError: states are missing or do not fit this model or these options.
            RankMismatchError: ranks loaded different checkpoints.
        """
        self._refuse_open_step("load_hetero_state_dict")
        self.abandon_step()
        ranks = self._coordinator.ranks
        state, residuals = state_for(states, self._coordinator.rank, ranks)
        saved = state.get("balancer") or {}
        verify_alike(
            channel.allgather(
                {
                    "loaded state": {
                        "steps": int(state["steps"]),
                        "ranks": int(state["ranks"]),
                        "data": saved.get("data"),
                        "plan": saved.get("plan"),
                    }
                },
                "load",
            ),
            "Load states of one checkpoint on all ranks",
        )
        put_residuals(self.exchanger, residuals)
        self._coordinator.load_compression_state(
            state.get("compression"), int(state["steps"]), int(state["ranks"]) == ranks
        )
        self.exchanger.set_counters(state["exchange"])
        if self._balancer is not None and state.get("balancer") is not None:
            self._balancer.load_state_dict(state["balancer"])
        self._coordinator.state_loaded()

    def flush_residuals(self, steps: int, channel: Channel) -> None:
        """Have everything that was held back sent with the next ``steps`` steps; on all ranks.

        These steps travel dense, each with an equal part of the residuals; after the last of them
        no rank holds anything back, so that a checkpoint of model and optimizer alone loses
        nothing. Then compression goes on. What was held back can be many gradients' worth: with
        few steps and a large learning rate that is a jolt.

        Raises:
            ConfigurationError: called between backward and step.
            RankMismatchError: ranks differ in ``steps``.
            ExchangeTimeoutError: not all ranks call it.
        """
        self._refuse_open_step("flush_residuals")
        verify_alike(
            channel.allgather(
                {"flush_residuals": {"steps": steps, "after step": self._coordinator.steps}},
                "flush",
            ),
            "Call optimizer.flush_residuals() with the same steps on all ranks",
        )
        self.exchanger.flush(steps)

    def _refuse_open_step(self, name: str) -> None:
        # A step that was exchanged and not applied (skipped by a GradScaler) has changed nothing.
        if self.exchanger.pending:
            raise ConfigurationError(
                f"{name}() was called between backward and the end of optimizer.step(): call it "
                "after step(), or after zero_grad()"
            )

    def _close_step(self) -> None:
        self._pass_open = False
        self._pass_batch = None
        self._step_batches = []

    def _typical_batch(self) -> int:
        """Samples of this rank in each pass of the step; 0 when passes differ or are missing."""
        if self._balancer is None:
            return 1
        sizes = {batch.samples for batch in self._step_batches if batch is not None}
        expected = self._optimizer.backward_passes_per_step
        if len(sizes) != 1 or len(self._step_batches) != expected:
            return 0
        return sizes.pop()
