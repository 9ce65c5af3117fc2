"""From local gradients to the aggregated gradient in ``p.grad``, one step at a time.

The life of a step, for every bucket:

1. ``begin_pass`` fixes the weight of a backward pass; hooks add weighted gradients (``add``).
2. A full bucket is launched, in bucket order: a_i = r_i g_i + e_i, select, pack, send.
3. ``synchronize`` launches the rest, waits, and writes the sums into ``p.grad``.
4. ``commit`` once the update was applied: what was sent leaves the residual. ``abandon`` when the
   step is thrown away: residuals are as before, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvd_hetero.compression.gain import energy
from hvd_hetero.compression.sample import GradientSample
from hvd_hetero.compression.topk import k_for
from hvd_hetero.errors import BatchAccountingError, UnsupportedError
from hvd_hetero.exchange.allgather import AllgatherExchange
from hvd_hetero.exchange.collectives import Collectives
from hvd_hetero.exchange.dense import Compressor, DenseExchange
from hvd_hetero.exchange.exchange import Exchange
from hvd_hetero.exchange.in_place import InPlaceExchange
from hvd_hetero.exchange.shared_index import SharedIndexExchange
from hvd_hetero.planning.sparse_bytes import sparse_saves_bytes
from hvd_hetero.planning.step_time import Option
from hvd_hetero.runtime.buckets import Bucket, Member, build_buckets, parts_of
from hvd_hetero.runtime.clock import wait_until
from hvd_hetero.runtime.exchange_clock import ExchangeClock
from hvd_hetero.runtime.timings import StepTimer


@dataclass(frozen=True)
class PassWeight:
    """Weight of one backward pass's gradient, and that pass's part of the step's divisor.

    The aggregated gradient is ``sum over passes (weight * gradient) / sum over passes (divisor)``,
    summed over ranks; the divisor is equal on all ranks. Where all divisors are 0 nothing is
    divided: weights are final already.

    ``own``: what this rank's own gradient counts for, so that ``sum (weight * gradient) / own`` is
    that gradient. It adds up over passes where there are divisors (samples), else it does not.
    ``in_place``: by what ``p.grad`` is multiplied before Horovod averages or sums it where it is.
    """

    weight: float
    divisor: float = 0.0
    own: float = 1.0
    in_place: float = 1.0


@dataclass(frozen=True)
class SparsityMode:
    """How the next steps compress; changed between steps only, alike on all ranks.

    Args:
        cf: compression factor; None sends dense gradients.
        strategy: "allgather" or "shared-index", for buckets in which it sends fewer bytes.
        entries: k of each bucket; k_for(elements, cf) for buckets beyond its end.
        sample: take samples of gradients and residuals for the next decision.
    """

    cf: float | None = None
    strategy: str = "allgather"
    entries: tuple[int, ...] = ()
    sample: bool = False

    @property
    def option(self) -> Option:
        """The factor with the exchange that carries it, as policies name it."""
        return Option(self.cf, "dense" if self.cf is None else self.strategy)

    def k_of(self, bucket: int, elements: int) -> int:
        """Return the entries kept of a bucket, 0 when dense."""
        if self.cf is None:
            return 0
        known = bucket < len(self.entries)
        return self.entries[bucket] if known else k_for(elements, self.cf)


class GradientExchanger:
    """Aggregates the gradients of one optimizer; knows collectives, but not Horovod.

    ``describe_step`` gives the words that errors use for "where" (rank and step). ``average``:
    what Horovod does with uncompressed gradients, average or sum; ``per_pass_weights``: passes of
    one step may count differently (by samples), so that they cannot add up in ``p.grad``.
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
        timer: StepTimer | None = None,
        compressor: Compressor | None = None,
        local_clip_norm: float | None = None,
        values_as: str = "float16",
        average: bool = True,
        per_pass_weights: bool = True,
    ) -> None:
        self._collectives = collectives
        self.prefix = prefix
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._describe_step = describe_step
        self._timer = StepTimer() if timer is None else timer
        self._compressor = compressor
        self._local_clip_norm = local_clip_norm
        self._values_as = values_as
        self._average = average
        self._per_pass_weights = per_pass_weights
        self.mode = SparsityMode()
        self.sample: GradientSample | None = None
        self.passes_per_step = 1
        self.buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, Member]] = {}
        self._pending: dict[int, Exchange] = {}
        self._in_place: dict[int, InPlaceExchange] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._passes: list[PassWeight] = []
        self._next_launch = 0
        self._exchanges = 0
        self._flush_steps_left = 0
        self._flush_asked = False  # by the user
        self._residuals_open = False  # on any rank; decided by what was done, never by values
        self._where_it_lies: bool | None = None
        self.synchronized = False
        self._nonfinite = False
        self.nonfinite_steps = 0
        self.sent_bytes = 0.0
        self.launched_in_backward = 0
        self.clock = ExchangeClock()
        self._strategies: set[str] = set()
        self.add_parameters(named_parameters)

    def add_parameters(self, named_parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Append buckets for parameters that got hooks; between steps, alike on all ranks."""
        added = build_buckets(named_parameters, self._bucket_bytes, len(self.buckets))
        for bucket in added:
            for member in bucket.members:
                self._places[id(member.parameter)] = (bucket, member)
        self.buckets.extend(added)
        self._parts, self._part_shares = parts_of(self.buckets)

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
        started = self._passes or self._pending or self._in_place
        return bool(started) and not self.synchronized

    def begin_pass(self, weight: PassWeight) -> None:
        """Start adding gradients of another backward pass.

        A pass after ``synchronize`` without a step in between starts the step anew: the update
        that was synchronized was thrown away (a skipped mixed-precision step, for example).
        """
        if self.synchronized:
            self.abandon()
        self._passes.append(weight)

    def add(self, parameter: torch.Tensor) -> bool:
        """Add a parameter's gradient of the current pass.

        Returns False when the gradient is to stay, and to add up, in ``p.grad``.
        """
        bucket, member = self._places[id(parameter)]
        if self.where_it_lies:
            bucket.note(member)
            return False
        bucket.add(member, self._passes[-1].weight)
        return True

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

    def mark_ready(self, parameter: torch.Tensor) -> None:
        """The parameter's gradient is complete; launches the buckets that this fills."""
        bucket, member = self._places[id(parameter)]
        if self.where_it_lies:
            self._timer.bucket_ready(self._parts[id(parameter)])
            self._start_in_place(bucket, member)
            self.launched_in_backward += 1
            return
        bucket.mark_ready(member)
        if self._local_clip_norm is not None:
            return  # the norm is known at the end of backward only
        before = self._next_launch
        while self._next_launch < len(self.buckets) and self.buckets[self._next_launch].full:
            self._launch(self.buckets[self._next_launch])
        self._advance()
        self.launched_in_backward += self._next_launch - before

    # ---- end of the step ------------------------------------------------------------------------

    def synchronize(self, gradient_scale: float = 1.0) -> None:
        """Exchange what is left, wait for everything, write ``p.grad`` times ``gradient_scale``.

        Where any rank's gradient was not finite, ``p.grad`` is NaN on all ranks, and ``commit``
        leaves every residual as it was. A second call without a backward pass in between does
        nothing. Raises UnsupportedError when ``p.grad`` was changed after backward: the change
        would be lost.
        """
        if self.synchronized:
            return
        self._refuse_changed_gradients()
        self._launch_rest()
        if self.mode.sample and self.sample is not None:
            self.sample.end_step()  # while the exchange is under way
        for bucket in self.buckets:
            if bucket.index in self._in_place:
                self._await(bucket, self._in_place[bucket.index].done)
                self._in_place[bucket.index].wait()
            else:
                self._finish(bucket, gradient_scale)
        if self._nonfinite:
            for bucket in self.buckets:
                poison = self._scratch_for(bucket).fill_(float("nan"))
                bucket.write_gradients(poison, 1.0)
        self._pending.clear()
        self._in_place.clear()
        self._exchanges += 1
        self.synchronized = True

    def commit(self) -> None:
        """The synchronized gradients were applied."""
        if self._nonfinite:
            self.nonfinite_steps += 1
            for bucket in self.buckets:
                bucket.feedback.drop()
        else:
            for bucket in self.buckets:
                bucket.feedback.commit()
            sent_all = self.mode.cf is None and self._flush_steps_left <= 1
            if self._residuals_open and sent_all and not self.frozen_parameters():
                self._residuals_open = False
            self._flush_steps_left = max(self._flush_steps_left - 1, 0)
            self._flush_asked = self._flush_asked and self._flush_steps_left > 0
        self._reset()

    def abandon(self) -> None:
        """Throw away gradients since the last step; residuals stay as they were.

        Open exchanges are completed first, alike on all ranks: once any rank launched a bucket
        the others wait for theirs.
        """
        if self.pending:
            self._launch_rest()
            self._exchanges += 1
        for bucket in self.buckets:
            if bucket.index in self._in_place:
                self._await(bucket, self._in_place[bucket.index].done)
                self._in_place[bucket.index].wait()
            if bucket.index in self._pending:
                self._await(bucket, self._pending[bucket.index].done)
                self._pending[bucket.index].finish(self._scratch_for(bucket))
            bucket.feedback.drop()
        self._pending.clear()
        self._in_place.clear()
        if self.sample is not None:
            self.sample.drop_step()
        self._reset()

    def forget_residuals(self) -> None:
        """Start again with empty residuals, as after loading another optimizer state."""
        self.abandon()
        for bucket in self.buckets:
            if not bucket.feedback.is_empty:
                bucket.feedback.load(torch.zeros_like(bucket.feedback.residual))
        # What decides about exchanges stays: one rank may do this alone.

    def set_mode(self, mode: SparsityMode, flush_steps: int) -> None:
        """Change how the next steps compress.

        Going dense, the residual is sent in equal parts over ``flush_steps`` steps: all at once
        it can be many gradient norms.
        """
        if mode.cf is not None:
            self._residuals_open = True
            if not self._flush_asked:
                self._flush_steps_left = 0
        elif self.mode.cf is not None and not self._flush_asked:
            self._flush_steps_left = flush_steps
        self.mode = mode

    def flush(self, steps: int) -> None:
        """Send the next ``steps`` steps dense, each with an equal part of the residual.

        A change of mode neither ends nor prolongs that.
        """
        if self._residuals_open:
            self._flush_steps_left = steps
            self._flush_asked = True

    def counters(self) -> dict[str, int]:
        """Return what besides residuals decides the next exchanges, alike on all ranks."""
        return {
            "exchanges": self._exchanges,
            "flush_steps_left": self._flush_steps_left,
            "flush_asked": int(self._flush_asked),
            "residuals_open": int(self._residuals_open),
        }

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from what ``counters`` gave, once mode and residuals are loaded."""
        self._exchanges = int(counters["exchanges"])
        self._residuals_open = bool(counters["residuals_open"]) or self.mode.cf is not None
        self._flush_steps_left = int(counters["flush_steps_left"])
        self._flush_asked = bool(counters["flush_asked"])
        if self.mode.cf is None and self._residuals_open:
            self._flush_steps_left = max(self._flush_steps_left, 1)

    def take_strategy(self) -> str:
        """Return which exchanges ran since the last call: "dense", "allgather" or both."""
        strategies, self._strategies = self._strategies, set()
        return " and ".join(sorted(strategies)) or "none"

    def launch_shares(self, mode: SparsityMode) -> list[float]:
        """Return the share in all elements of each piece that is launched, in that order.

        Pieces are buckets, or parts of the parameters where gradients stay where they lie; [1.0]
        without any.
        """
        if self._may_lie(mode):
            return self._part_shares or [1.0]
        total = sum(bucket.elements for bucket in self.buckets)
        return [bucket.elements / total for bucket in self.buckets] or [1.0]

    def frozen_parameters(self) -> list[str]:
        """Names of parameters frozen since they got their hook."""
        return [
            member.name
            for bucket in self.buckets
            for member in bucket.members
            if not member.parameter.requires_grad
        ]

    # ---- inside ---------------------------------------------------------------------------------

    @property
    def where_it_lies(self) -> bool:
        """Whether this step's gradients are exchanged in ``p.grad`` itself, without a copy.

        Decided once a step, from what is the same on all ranks.
        """
        if self._where_it_lies is None:
            self._where_it_lies = self._may_lie(self.mode)
        return self._where_it_lies

    def _may_lie(self, mode: SparsityMode) -> bool:
        return (
            mode.cf is None
            and not mode.sample
            and not self._residuals_open
            and self._compressor is None
            and self._local_clip_norm is None
            and (self.passes_per_step == 1 or not self._per_pass_weights)
            and all(bucket.can_stay for bucket in self.buckets)
        )

    def _start_in_place(self, bucket: Bucket, member: Member) -> None:
        exchange = self._in_place.get(bucket.index)
        if exchange is None:
            exchange = self._in_place[bucket.index] = InPlaceExchange(
                self._collectives,
                bucket.elements,
                bucket.dense_dtype.itemsize,
                average=self._average,
            )
            self._strategies.add(exchange.strategy)
            self.sent_bytes += exchange.sent_bytes
        factor = self._passes[-1].in_place if self._passes else 1.0
        exchange.start(bucket.gradient_or_zeros(member), factor, f"{self.prefix}.{member.name}")
        bucket.mark_ready(member)

    def _launch_rest(self) -> None:
        if self.where_it_lies:
            for bucket in self.buckets:
                for member in bucket.waiting:
                    self._start_in_place(bucket, member)
            return
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

    def _weight_share(self) -> float | None:
        """Return this rank's part in the weights of this step; over all ranks they add up to 1."""
        if not self._per_pass_weights:
            return None  # all the same
        # Without a backward pass a rank sends of its residual only.
        return min(self._own_weight(), 1.0) if self._passes else 0.0

    def _own_weight(self) -> float:
        """Return what this rank's own gradient counts for in the step's sum."""
        if not any(one.divisor > 0 for one in self._passes):
            return self._passes[0].own
        return sum(one.own for one in self._passes) / self._divisor()

    def _entries(self, bucket: Bucket) -> int:
        """Return k of a bucket, 0 where it travels dense."""
        cf = self.mode.cf
        if cf is None or self._flush_steps_left > 0:
            return 0
        k = self.mode.k_of(bucket.index, bucket.elements)
        saves = sparse_saves_bytes(
            self._collectives.size,
            k,
            bucket.elements,
            bucket.dtype,
            self._values_as,
            self.mode.strategy,
        )
        return k if saves else 0

    def _launch(self, bucket: Bucket) -> None:
        work = bucket.complete(self._divisor())
        sample = self._sample_of(bucket)
        if sample is not None:
            sample.take_gradient(bucket.index, work)
        clear = all([pending.done() for pending in self._pending.values()])
        k = self._entries(bucket)
        self._timer.bucket_ready(bucket.index)
        if k == 0:
            exchange = self._launch_dense(bucket)
        else:
            with self._timer.compressing():
                shared = self.mode.strategy == "shared-index"
                launch = self._launch_shared_index if shared else self._launch_allgather
                exchange = launch(bucket, k)
        self.sent_bytes += exchange.sent_bytes
        self._strategies.add(exchange.strategy)
        self._pending[bucket.index] = exchange
        if k > 0 or self._compressor is None:  # a compressor's bytes are not known here
            self.clock.launched((bucket.index, exchange.strategy, k), clear)
        self._next_launch = bucket.index + 1

    def _launch_dense(self, bucket: Bucket) -> Exchange:
        share = 1.0 / max(self._flush_steps_left, 1)
        values = bucket.feedback.compensate_fraction(share, keep=bucket.frozen_spans())
        bucket.feedback.sent(None)
        self._sample_compensated(bucket)  # before the sum over ranks takes its place
        return DenseExchange(self._collectives, values, self._name(bucket), self._compressor)

    def _launch_allgather(self, bucket: Bucket, k: int) -> Exchange:
        sparse = bucket.feedback.select(k, keep=bucket.frozen_spans())
        self._sample_compensated(bucket)
        exchange = AllgatherExchange(self._collectives, sparse, self._name(bucket), self._values_as)
        bucket.feedback.sent(sparse.indices, exchange.sent_values)
        return exchange

    def _launch_shared_index(self, bucket: Bucket, k: int) -> Exchange:
        leader = (self._exchanges + bucket.index) % self._collectives.size
        indices = None
        if leader == self._collectives.rank:
            indices = bucket.feedback.select(k, keep=bucket.frozen_spans()).indices
        else:
            bucket.feedback.compensate(keep=bucket.frozen_spans())
        self._sample_compensated(bucket)
        return SharedIndexExchange(
            self._collectives,
            bucket.feedback.work,
            k,
            self._name(bucket),
            leader,
            indices,
            self._values_as,
            self._weight_share(),
        )

    def _sample_compensated(self, bucket: Bucket) -> None:
        sample = self._sample_of(bucket)
        if sample is not None:
            sample.take_compensated(bucket.index, bucket.feedback.work)

    def _sample_of(self, bucket: Bucket) -> GradientSample | None:
        """Return the sample, unless it is not wanted or older than the bucket."""
        sample = self.sample if self.mode.sample else None
        known = sample is not None and bucket.index < len(sample.bucket_elements)
        return sample if known else None

    def _name(self, bucket: Bucket) -> str:
        return f"{self.prefix}.{bucket.describe()}"

    def _advance(self) -> None:
        """Launch second stages whose first stage is done; never blocks."""
        for exchange in self._pending.values():
            exchange.advance()

    def _finish(self, bucket: Bucket, gradient_scale: float) -> None:
        exchange = self._pending[bucket.index]

        def done() -> bool:
            self._advance()
            return exchange.done()

        if done():
            self.clock.had_ended(bucket.index)
        else:
            self._await(bucket, done)
            later = [index for index in self._pending if index > bucket.index]
            others = [index for index in later if self._pending[index].done()]
            self.clock.ended(self._exchanges, bucket.index, others)
        total = exchange.finish(self._scratch_for(bucket))
        if isinstance(exchange, SharedIndexExchange):
            bucket.feedback.sent(exchange.indices, exchange.sent_values)
        if exchange.strategy == "dense":
            # The sum is the same on all ranks. Looked at where a residual is at stake.
            if self._residuals_open and not bool(total.sum(dtype=torch.float64).isfinite()):
                self._nonfinite = True
        else:
            self._nonfinite = self._nonfinite or exchange.nonfinite
        bucket.write_gradients(total, gradient_scale)

    def _clip(self, max_norm: float) -> None:
        """Scale this rank's own gradient to at most ``max_norm``, before aggregation."""
        if not self._passes:
            return
        divisor = self._divisor()
        squared = sum(energy(bucket.complete(divisor)) for bucket in self.buckets)
        scale = max_norm * self._own_weight() / max(squared**0.5, torch.finfo(torch.float32).tiny)
        if scale < 1.0:
            for bucket in self.buckets:
                bucket.feedback.work.mul_(scale)

    def _await(self, bucket: Bucket, done: Callable[[], bool]) -> None:
        wait_until(
            done,
            self._timeout_seconds,
            lambda: (
                f"{self._describe_step()}: {self._strategy(bucket)} exchange of {bucket.describe()}"
            ),
        )

    def _strategy(self, bucket: Bucket) -> str:
        exchange = self._pending.get(bucket.index)
        return "dense" if exchange is None else exchange.strategy

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
        self.clock.end_step()
        self._next_launch = 0
        self._where_it_lies = None
        self._nonfinite = False
        self.synchronized = False
