"""From local gradients to the aggregated gradient in ``p.grad``, one step at a time.

The life of a step, for every bucket:

1. ``begin_pass`` fixes the weight of a backward pass; hooks add weighted gradients (``add``).
2. A full bucket is launched, in bucket order: a_i = r_i g_i + e_i, select, pack, send.
3. ``synchronize`` launches the rest, waits, and writes the sums into ``p.grad``.
4. ``commit`` once the update was applied: what was sent leaves the residual. ``abandon`` when the
   step is thrown away: residuals are as before, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvd_hetero.compression.gain import Energies, energy, measure
from hvd_hetero.compression.topk import SparseGradient, k_for, select
from hvd_hetero.errors import BatchAccountingError, UnsupportedError
from hvd_hetero.exchange.allgather import AllgatherExchange, sparse_saves_bytes
from hvd_hetero.exchange.collectives import Collectives
from hvd_hetero.exchange.dense import Compressor, DenseExchange
from hvd_hetero.runtime.buckets import Bucket, Member, build_buckets
from hvd_hetero.runtime.clock import wait_until


@dataclass(frozen=True)
class PassWeight:
    """Weight of one backward pass's gradient, and that pass's part of the step's divisor.

    The aggregated gradient is ``sum over passes (weight * gradient) / sum over passes (divisor)``,
    summed over ranks; the divisor is equal on all ranks. Where all divisors are 0 nothing is
    divided: weights are final already.

    ``own``: what this rank's own gradient counts for, so that ``sum (weight * gradient) / own`` is
    that gradient. It adds up over passes where there are divisors (samples), else it does not.
    """

    weight: float
    divisor: float = 0.0
    own: float = 1.0


@dataclass
class SparsityMode:
    """How the next steps compress; changed between steps only, alike on all ranks."""

    cf: float | None = None
    candidates: tuple[float, ...] = ()
    measure_gain: bool = False


class GradientExchanger:
    """Aggregates the gradients of one optimizer; knows collectives, but not Horovod.

    ``describe_step`` gives the words that errors use for "where" (rank and step).
    """

    def __init__(
        self,
        collectives: Collectives,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        *,
        prefix: str,
        bucket_bytes: int,
        timeout_seconds: float,
        describe_step: Callable[[], str],
        compressor: Compressor | None = None,
        local_clip_norm: float | None = None,
    ) -> None:
        self._collectives = collectives
        self.prefix = prefix
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._describe_step = describe_step
        self._compressor = compressor
        self._local_clip_norm = local_clip_norm
        self.mode = SparsityMode()
        self.buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, Member]] = {}
        self._pending: dict[int, DenseExchange | AllgatherExchange] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._passes: list[PassWeight] = []
        self._next_launch = 0
        self._flush_steps_left = 0
        self.synchronized = False
        self.energies: Energies | None = None
        self.sent_bytes = 0.0
        self.launched_in_backward = 0
        self._strategies: set[str] = set()
        self.add_parameters(named_parameters)

    def add_parameters(self, named_parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Append buckets for parameters that got hooks; between steps, alike on all ranks."""
        added = build_buckets(named_parameters, self._bucket_bytes, len(self.buckets))
        for bucket in added:
            for member in bucket.members:
                self._places[id(member.parameter)] = (bucket, member)
        self.buckets.extend(added)

    def layout(self) -> dict[str, str]:
        """Names, shapes and dtypes by bucket, to be compared between ranks."""
        return {
            f"bucket {bucket.index}": f"{bucket.dtype}: "
            + ", ".join(f"{m.name}{tuple(m.parameter.shape)}" for m in bucket.members)
            for bucket in self.buckets
        }

    # ---- during backward ------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """Backward passes added since the last step."""
        return len(self._passes)

    @property
    def pending(self) -> bool:
        """True when gradients were added or launched and not yet synchronized."""
        return bool(self._passes or self._pending) and not self.synchronized

    def begin_pass(self, weight: PassWeight) -> None:
        """Start adding gradients of another backward pass.

        A pass after ``synchronize`` without a step in between starts the step anew: the update
        that was synchronized was thrown away (a skipped mixed-precision step, for example).
        """
        if self.synchronized:
            self.abandon()
        self._passes.append(weight)

    def add(self, parameter: torch.Tensor) -> None:
        """Add a parameter's gradient of the current pass."""
        bucket, member = self._places[id(parameter)]
        bucket.add(member, self._passes[-1].weight)

    def overlooked(self) -> list[torch.Tensor]:
        """Parameters with a gradient that no hook has seen in this step."""
        return [member.parameter for bucket in self.buckets for member in bucket.overlooked()]

    def add_overlooked(self, parameter: torch.Tensor) -> None:
        """Add a gradient set by hand or gathered before the hook, as the sum over all passes."""
        if len({one.weight for one in self._passes}) > 1:
            _, member = self._places[id(parameter)]
            raise BatchAccountingError(
                f"parameter {member.name!r} has a gradient that came without its hook, and the "
                "backward passes of this step have different weights: unfreeze parameters before "
                "optimizer.zero_grad()"
            )
        self.add(parameter)

    def mark_ready(self, parameter: torch.Tensor) -> bool:
        """The parameter's gradient is complete; return True when this launched something."""
        bucket, member = self._places[id(parameter)]
        bucket.mark_ready(member)
        if self._local_clip_norm is not None:
            return False  # the norm is known at the end of backward only
        before = self._next_launch
        while self._next_launch < len(self.buckets) and self.buckets[self._next_launch].full:
            self._launch(self.buckets[self._next_launch])
        self.launched_in_backward += self._next_launch - before
        return self._next_launch > before

    # ---- end of the step ------------------------------------------------------------------------

    def synchronize(self, gradient_scale: float = 1.0) -> None:
        """Exchange what is left, wait for everything, write ``p.grad`` times ``gradient_scale``.

        A second call without a backward pass in between does nothing. Raises UnsupportedError
        when ``p.grad`` was changed after backward: the change would be lost.
        """
        if self.synchronized:
            return
        self._refuse_changed_gradients()
        self._launch_rest()
        for bucket in self.buckets:
            exchange = self._await(bucket)
            bucket.write_gradients(exchange.finish(self._scratch_for(bucket)), gradient_scale)
        self._pending.clear()
        self.synchronized = True

    def commit(self) -> None:
        """The synchronized gradients were applied."""
        for bucket in self.buckets:
            bucket.feedback.commit()
        if self._flush_steps_left > 0 and self.mode.cf is None:
            self._flush_steps_left -= 1
        self._reset()

    def abandon(self) -> None:
        """Throw away gradients since the last step; residuals stay as they were.

        Open exchanges are completed first, alike on all ranks: once any rank launched a bucket
        the others wait for theirs.
        """
        if self.pending:
            self._launch_rest()
        for bucket in self.buckets:
            if bucket.index in self._pending:
                self._await(bucket).handle.result()
            bucket.feedback.drop()
        self._pending.clear()
        self._reset()

    def forget_residuals(self) -> None:
        """Start again with empty residuals, as after loading another optimizer state."""
        self.abandon()
        for bucket in self.buckets:
            if not bucket.feedback.is_empty:
                bucket.feedback.load(torch.zeros_like(bucket.feedback.residual))

    def set_mode(self, mode: SparsityMode, flush_steps: int) -> None:
        """Change how the next steps compress.

        Going dense, the residual is sent in equal parts over ``flush_steps`` steps: all at once
        it can be many gradient norms.
        """
        if mode.cf is None and self.mode.cf is not None:
            self._flush_steps_left = flush_steps
        self.mode = mode

    def take_energies(self) -> Energies | None:
        """Return what was measured since the last call, summed over steps and buckets."""
        energies, self.energies = self.energies, None
        return energies

    def take_strategy(self) -> str:
        """Return which exchanges ran since the last call: "dense", "allgather" or both."""
        strategies, self._strategies = self._strategies, set()
        return " and ".join(sorted(strategies)) or "none"

    def last_bucket_share(self) -> float:
        """Share of the bucket launched last in all elements, which no backward can hide."""
        return self.buckets[-1].elements / max(sum(b.elements for b in self.buckets), 1)

    # ---- inside ---------------------------------------------------------------------------------

    def _launch_rest(self) -> None:
        if self._local_clip_norm is not None and self._next_launch == 0:
            self._clip(self._local_clip_norm)
        while self._next_launch < len(self.buckets):
            self._launch(self.buckets[self._next_launch])

    def _refuse_changed_gradients(self) -> None:
        for bucket in self.buckets:
            member = bucket.changed_member()
            if member is not None:
                raise UnsupportedError(
                    f"{self._describe_step()}: the gradient of {member.name!r} was changed between "
                    "backward and its exchange, which had begun: call optimizer.synchronize() "
                    "before anything that changes gradients (clipping, GradScaler.unscale_), and "
                    "then step inside `with optimizer.skip_synchronize():`. To clip each rank's "
                    "own gradient use local_clip_norm"
                )

    def _divisor(self) -> float:
        total = sum(one.divisor for one in self._passes)
        return total if total > 0 else 1.0

    def _launch(self, bucket: Bucket) -> None:
        work = bucket.feedback.work
        divisor = self._divisor()
        if divisor != 1.0:
            work.mul_(1.0 / divisor)
        name = f"{self.prefix}.{bucket.describe()}"
        raw = energy(work) if self.mode.measure_gain else 0.0
        cf = self.mode.cf
        if cf is not None and sparse_saves_bytes(
            self._collectives.size, k_for(bucket.elements, cf), bucket.elements, bucket.dtype
        ):
            values = bucket.feedback.compensate(keep=bucket.frozen_spans())
            indices = select(values, k_for(bucket.elements, cf))
            bucket.feedback.sent(indices)
            exchange: DenseExchange | AllgatherExchange = AllgatherExchange(
                self._collectives, SparseGradient.gather(values, indices), name
            )
        else:
            indices = None
            if cf is not None or self._flush_steps_left <= 1:
                values = bucket.feedback.compensate(keep=bucket.frozen_spans())
            else:
                values = bucket.feedback.compensate_fraction(
                    1.0 / self._flush_steps_left, keep=bucket.frozen_spans()
                )
            bucket.feedback.sent(None)
            exchange = DenseExchange(self._collectives, values, name, self._compressor)
        if self.mode.measure_gain:
            energies = measure(values, indices, self.mode.candidates, raw=raw)
            self.energies = energies if self.energies is None else self.energies + energies
        self.sent_bytes += exchange.sent_bytes
        self._strategies.add(exchange.strategy)
        self._pending[bucket.index] = exchange
        self._next_launch = bucket.index + 1

    def _clip(self, max_norm: float) -> None:
        """Scale this rank's own gradient to at most ``max_norm``, before aggregation."""
        if not self._passes:
            return
        by_samples = any(one.divisor > 0 for one in self._passes)
        own = sum(one.own for one in self._passes) if by_samples else self._passes[0].own
        squared = sum(energy(bucket.feedback.work) for bucket in self.buckets)
        scale = max_norm * own / max(squared**0.5, torch.finfo(torch.float32).tiny)
        if scale < 1.0:
            for bucket in self.buckets:
                bucket.feedback.work.mul_(scale)

    def _await(self, bucket: Bucket) -> DenseExchange | AllgatherExchange:
        exchange = self._pending[bucket.index]
        wait_until(
            exchange.handle.done,
            self._timeout_seconds,
            lambda: f"{self._describe_step()}: {exchange.strategy} exchange of {bucket.describe()}",
        )
        return exchange

    def _scratch_for(self, bucket: Bucket) -> torch.Tensor:
        key = (bucket.dtype, bucket.feedback.work.device)
        scratch = self._scratch.get(key)
        if scratch is None or scratch.numel() < bucket.elements:
            largest = max(b.elements for b in self.buckets if b.dtype == bucket.dtype)
            scratch = self._scratch[key] = torch.empty(largest, dtype=key[0], device=key[1])
        return scratch[: bucket.elements]

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._passes.clear()
        self._next_launch = 0
        self.synchronized = False
