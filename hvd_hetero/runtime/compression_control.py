"""How the next steps compress: once a window rank 0 chooses, and all ranks apply what it chose."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_hetero.balance.timing import WindowTiming
from hvd_hetero.compression.allocation import allocate
from hvd_hetero.compression.gain import Curves
from hvd_hetero.compression.sample import GradientSample
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.exchange.collectives import Collectives
from hvd_hetero.planning import policy
from hvd_hetero.planning.cost_model import LocalCosts
from hvd_hetero.planning.objective import Penalty, default_penalty
from hvd_hetero.planning.sparse_bytes import repeatable_exchange
from hvd_hetero.planning.step_time import (
    Option,
    RankTimes,
    predict_options,
)
from hvd_hetero.runtime.agreement import Channel, Message
from hvd_hetero.runtime.clock import wait_until
from hvd_hetero.runtime.exchange_costs import ExchangeCosts
from hvd_hetero.runtime.exchanger import GradientExchanger, SparsityMode
from hvd_hetero.runtime.probe import measure_local

logger = logging.getLogger("hvd_hetero")

_TYPICAL_ELEMENTS = 1 << 20
_ADAM_LIKE = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
)


class CompressionControl:
    """Owns the policy of one optimizer and what it needs: samples, costs and rates.

    ``choice`` is the decision in force as a message, ``curves`` what the last sampled window
    showed (rank 0 only). Where it only ``follows``, as in a replay, nothing is measured and no
    policy started: ``apply`` is told from outside.
    """

    def __init__(
        self,
        spec: Adaptive,
        *,
        exchanger: GradientExchanger,
        collectives: Collectives,
        channel: Channel,
        optimizer: torch.optim.Optimizer,
        timeout_seconds: float,
        costs: ExchangeCosts | None,
        follows: bool = False,
    ) -> None:
        self.spec = spec
        self._follows = follows
        self._exchanger = exchanger
        self._collectives = collectives
        self._channel = channel
        self._optimizer = optimizer
        self._timeout_seconds = timeout_seconds
        self._costs = costs
        self._local: LocalCosts | None = None
        self._state: policy.PolicyState | None = None
        self.curves: Curves | None = None
        self._begun = False  # alike on all ranks
        self.reason = f"dense for the first {spec.dense_steps} steps" if spec.dense_steps else ""
        if costs is not None:
            self._measure_own_costs()
        if spec.dense_steps == 0 and not follows:
            self._begin()

    # ---- windows --------------------------------------------------------------------------------

    def due(self, steps: int) -> bool:
        """Whether a window ends after ``steps`` steps; windows begin after the dense steps."""
        begun = steps - self.spec.dense_steps
        return self._begun and begun > 0 and begun % self.spec.window == 0

    def after_step(self, steps: int) -> bool:
        """Start compressing once the dense steps are over; return whether that was now."""
        if self._begun or self._follows or steps < self.spec.dense_steps:
            return False
        self._begin()
        return True

    def go_on_from(self, steps: int) -> None:
        """Count on from ``steps`` without a saved state; on all ranks."""
        if self._begun and steps < self.spec.dense_steps:
            self._begun = False
            self._exchanger.set_mode(SparsityMode(), flush_steps=1)
        self.after_step(steps)

    def collect(self) -> torch.Tensor | None:
        """Sum what was sampled over ranks; None when nothing was asked for. Blocks."""
        sample = self._exchanger.sample
        if sample is None or not self._exchanger.mode.sample:
            return None
        name = f"{self._exchanger.prefix}.window.samples"
        handle = self._collectives.allreduce_async(sample.sums(), name)
        wait_until(
            handle.done,
            self._timeout_seconds,
            lambda: f"rank {self._collectives.rank}: sum of gradient samples {name!r}",
        )
        return handle.result()

    def decide(
        self,
        sums: torch.Tensor | None,
        windows: Sequence[WindowTiming | None],
        samples_per_step: float,
    ) -> Message:
        """Return the choice for the next window; rank 0 only."""
        if sums is not None and self._exchanger.sample is not None:
            self.curves = self._exchanger.sample.read(sums)
        mode = self._exchanger.mode
        state = self._state
        if state is None:
            raise AssertionError("decide: no policy was started")
        timed = [window for window in windows if window is not None]
        if len(timed) < len(windows):
            reason = "kept: no typical step in this window"
            return self._message(mode.cf, mode.strategy, mode.sample, reason)
        typical = [window.typical for window in timed]
        step_seconds = max(window.step_seconds for window in timed)
        rank_times = [RankTimes(point.ready_seconds, point.done_seconds) for point in typical]
        done = [point.done_seconds + point.compress_seconds for point in typical]
        observation = policy.Observation(
            option=mode.option,
            step_seconds=step_seconds,
            exposed_seconds=max(step_seconds - max(done), 0.0),
            samples_per_step=samples_per_step,
            curves=self.curves if sums is not None else None,
            predicted=self._predict(rank_times),
            penalty=self._penalty(),
        )
        self._state, decision = policy.advance(self.spec, state, observation)
        return self._message(decision.cf, decision.strategy, decision.measure, decision.reason)

    def apply(self, choice: Message) -> bool:
        """Compress as rank 0 chose from the next step on; return whether the factor changed."""
        self.reason = choice["reason"]
        mode = SparsityMode(
            cf=choice["cf"],
            strategy=choice["strategy"],
            entries=tuple(choice["entries"]),
            sample=choice["sample"],
        )
        before = self._exchanger.mode
        if mode.sample and not self._follows:  # a step takes the same way without a sample
            self._prepare_sample()
        self._exchanger.set_mode(mode, self.spec.flush_steps)
        changed = mode.option != before.option
        looked_in_vain = mode.cf is None and before.sample and not mode.sample
        if changed or looked_in_vain:
            logger.info("compression: %s: %s", mode.option, choice["reason"])
        return changed

    # ---- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors; policy and costs are rank 0's."""
        sample = self._exchanger.sample
        mode = self._exchanger.mode
        return {
            "spec": self.spec.to_dict(),
            "layout": self._exchanger.layout(),
            "mode": [mode.cf, mode.strategy, list(mode.entries), mode.sample],
            "reason": self.reason,
            "follows": self._follows,
            "policy": None if self._state is None else self._state.to_dict(),
            "costs": None if self._costs is None else self._costs.model.to_dict(),
            "sample": None if sample is None else sample.state_dict(),
            "sample_layout": None if sample is None else list(sample.bucket_elements),
        }

    def load_state_dict(self, state: Mapping[str, Any], steps: int, same_ranks: bool) -> None:
        """Go on from a saved state.

        What belongs to the number of ranks (costs) or to the layout of buckets (entries, samples)
        is measured anew where that has changed.

        Raises:
            ConfigurationError: the state was saved under other compression options.
        """
        if state["spec"] != self.spec.to_dict():
            differing = [
                f"{name} {state['spec'].get(name)!r} -> {value!r}"
                for name, value in self.spec.to_dict().items()
                if state["spec"].get(name) != value
            ]
            raise ConfigurationError(
                "the state was saved under other compression options: "
                f"{', '.join(differing)}; use the same options, or take state['compression'] "
                "out to keep the residuals alone"
            )
        self._begun = steps >= self.spec.dense_steps and not self._follows
        cf, strategy, entries, sample = state["mode"]
        same_layout = state["layout"] == self._exchanger.layout()
        self.reason = state["reason"]
        if state["policy"] is not None:
            self._state = policy.PolicyState.from_dict(state["policy"])
        if same_ranks and self._costs is not None and state["costs"] is not None:
            self._costs.load(state["costs"])
        if sample and not self._follows:
            self._prepare_sample()
            new = self._exchanger.sample
            saved = state["sample"]
            if new is not None and saved and state["sample_layout"] == list(new.bucket_elements):
                new.load_state_dict(saved)
        mode = SparsityMode(cf, strategy, tuple(entries) if same_layout else (), sample)
        self._exchanger.set_mode(mode, self.spec.flush_steps)
        if state.get("follows") and not self._follows:  # no policy was saved: it starts here
            self._begun = False
            self.after_step(steps)

    # ---- inside ---------------------------------------------------------------------------------

    def _measure_own_costs(self) -> None:
        largest = max(self._exchanger.buckets, key=lambda bucket: bucket.elements, default=None)
        if largest is None:  # all frozen as yet
            own = measure_local(_TYPICAL_ELEMENTS, torch.float32, torch.device("cpu"))
        else:
            own = measure_local(largest.elements, largest.dtype, largest.feedback.work.device)
        everyone = self._channel.allgather({"local": own.to_dict()}, "costs")
        all_costs = [one["local"] for one in everyone]
        slowest = {name: max(one[name] for one in all_costs) for name in all_costs[0]}
        self._local = LocalCosts.from_dict(slowest)

    def _begin(self) -> None:
        self._begun = True
        decision: Message | None = None
        if self._collectives.rank == 0:
            idle = [RankTimes(0.0, 0.0)] * self._collectives.size
            predicted = self._predict(idle)
            self._state, first = policy.start(self._resolved_spec(), predicted)
            decision = self._message(first.cf, first.strategy, first.measure, first.reason)
        self.apply(self._channel.broadcast(decision, "first"))

    def _resolved_spec(self) -> Adaptive:
        """Return the spec, for a fixed factor with its exchange decided once and for all."""
        spec = self.spec
        if spec.policy != "fixed" or spec.exchange != "auto":
            return spec
        how = repeatable_exchange(self._collectives.size, spec.min_cf, spec.values)
        return replace(spec, exchange=how)

    def _prepare_sample(self) -> None:
        """Have a sample of the buckets as they are now."""
        elements = [bucket.elements for bucket in self._exchanger.buckets]
        sample = self._exchanger.sample
        if not elements:
            return
        if sample is None or list(sample.bucket_elements) != elements:
            self._exchanger.sample = GradientSample(
                elements, self.spec.ladder(), device=self._exchanger.buckets[0].feedback.work.device
            )

    def _message(self, cf: float | None, strategy: str, sample: bool, reason: str) -> Message:
        used = self._exchanger.mode.cf
        gain: float | None = 1.0
        rho: float | None = 0.0
        if used is not None:
            seen = self.curves
            gain = None if seen is None else seen.momentary.get(used)
            rho = None if seen is None else seen.residual_ratio
        return {
            "cf": cf,
            "strategy": strategy,
            "entries": [] if cf is None else list(self._entries(cf)),
            "sample": sample,
            "reason": reason,
            "gain": gain,
            "rho": rho,
        }

    def _entries(self, cf: float) -> tuple[int, ...]:
        elements = [bucket.elements for bucket in self._exchanger.buckets]
        known = None if self.curves is None else self.curves.bucket_entries.get(cf)
        if known is not None and len(known) != len(elements):
            known = None  # buckets have joined since
        return allocate(known, elements, cf)

    def _predict(self, rank_times: Sequence[RankTimes]) -> dict[Option, float]:
        if self._costs is None or self._local is None:
            return {}
        spec = self.spec
        strategies = ("allgather", "shared-index") if spec.exchange == "auto" else (spec.exchange,)
        return predict_options(
            spec.ladder(),
            strategies,
            [bucket.elements for bucket in self._exchanger.buckets],
            self._collectives.size,
            {cf: self._entries(cf) for cf in spec.ladder()},
            self._costs.model,
            self._local,
            spec.values,
            rank_times,
            dtypes=[bucket.dense_dtype for bucket in self._exchanger.buckets],
        )

    def _penalty(self) -> Penalty:
        groups = self._optimizer.param_groups
        rate = max((float(group.get("lr", 0.0)) for group in groups), default=0.0)
        momentum = max((float(group.get("momentum", 0.0)) for group in groups), default=0.0)
        own = default_penalty(optimizer_family(self._optimizer), rate, min(momentum, 0.9999))
        kappa, exponent = self.spec.kappa, self.spec.rho_exponent
        return Penalty(
            own.kappa if kappa is None else kappa,
            own.exponent if exponent is None else exponent,
        )


def optimizer_family(optimizer: torch.optim.Optimizer) -> str:
    """Return "sgd", "adam" (all that divide by a running size of the gradient) or "other"."""
    names = {one.__name__ for one in type(optimizer).__mro__}
    if names & {"SGD", "ASGD"}:
        return "sgd"
    return "adam" if names & set(_ADAM_LIKE) else "other"
