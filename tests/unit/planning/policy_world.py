"""A toy world for policies: known curves and step times, seen through noise and a wrong model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from hvd_hetero.compression.allocation import allocate
from hvd_hetero.compression.gain import Curves, Worth
from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.planning.cost_curve import CostCurve
from hvd_hetero.planning.cost_model import CostModel, LocalCosts
from hvd_hetero.planning.objective import Penalty
from hvd_hetero.planning.policy import Decision, Observation, PolicyState, advance, start
from hvd_hetero.planning.step_time import DENSE, Option, RankTimes, predict_options
from hvd_hetero.planning.worth import cost

MEGABIT = 1e6 / 8


@dataclass
class World:
    """``bandwidth``: bytes a second of each link. ``model_error``: factor by which the predicted
    seconds of (allreduce, allgather, broadcast) differ from the true ones. ``noise``: relative
    standard deviation of a window's median step. ``compute_seconds``: ready and done."""

    spec: Adaptive
    bandwidth: float
    ranks: int = 4
    elements: int = 10_000_000
    compute_seconds: float = 0.05
    compress_scale: float = 1.0
    model_error: tuple[float, float, float] = (1.0, 1.0, 1.0)
    noise: float = 0.0
    penalty: Penalty = field(default_factory=lambda: Penalty(0.2, 0.7))
    rho_at_10: float = 0.4
    runaway_rho: Callable[[float | None], float] | None = None
    raw_energy: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._predictions: dict[object, dict[Option, float]] = {}
        self.random = np.random.default_rng(self.seed)
        self.strategies = (
            ("allgather", "shared-index") if self.spec.exchange == "auto" else (self.spec.exchange,)
        )

    def rho(self, cf: float) -> float:
        return self.rho_at_10 * (cf / 10) ** 0.75

    def gain(self, cf: float) -> float:
        return 1 / (1 + self.rho(cf) ** 2)

    def step_seconds(self, *, seen_by_model: bool = False) -> dict[Option, float]:
        """True or predicted seconds of every option."""
        key = (self.bandwidth, self.compress_scale, seen_by_model)
        if key not in self._predictions:
            self._predictions[key] = self._step_seconds(seen_by_model)
        return self._predictions[key]

    def _step_seconds(self, seen_by_model: bool) -> dict[Option, float]:
        n, beta, alpha = self.ranks, 1 / self.bandwidth, 1e-4
        big = 1e9
        errors = self.model_error if seen_by_model else (1.0, 1.0, 1.0)
        reduce, gather, cast = (
            CostCurve(
                (0.0, big), (rounds * alpha * error, (rounds * alpha + share * beta * big) * error)
            )
            for rounds, share, error in zip(
                (2 * (n - 1), n - 1, 2), (2 * (n - 1) / n, n - 1, 2), errors, strict=True
            )
        )
        local = LocalCosts(2e-9 * self.compress_scale, 2e-8 * self.compress_scale, 1e-8, 2e-10)
        buckets = [self.elements // 4] * 4
        return predict_options(
            self.spec.ladder(),
            self.strategies,
            buckets,
            n,
            {cf: allocate(None, buckets, cf) for cf in self.spec.ladder()},
            CostModel(n, reduce, gather, cast),
            local,
            "float16",
            [RankTimes(self.compute_seconds * 0.5, self.compute_seconds)] * n,
        )

    def curves(self, option: Option) -> Curves:
        ladder = self.spec.ladder()
        ratio = 0.0 if option.cf is None else self.rho(option.cf)
        if self.runaway_rho is not None:
            ratio = self.runaway_rho(option.cf)
        # All factors are seen on the same gradients: most of the noise is common to them.
        common = self.random.standard_normal()
        jitter = {
            cf: 1 + self.noise * (common + 0.25 * self.random.standard_normal()) for cf in ladder
        }
        return Curves(
            cfs=ladder,
            gain={cf: min(1.0, self.gain(cf) * jitter[cf]) for cf in ladder},
            momentary={cf: min(1.0, self.gain(cf) * jitter[cf]) for cf in ladder},
            rho={cf: self.rho(cf) / jitter[cf] for cf in ladder},
            coherence=dict.fromkeys(ladder, 1 / self.ranks),
            residual_ratio=ratio,
            raw_energy=self.raw_energy,
            total_energy=self.raw_energy * (1 + ratio**2),
            measurements=10,
            bucket_entries={cf: (1.0,) * 4 for cf in ladder},
        )

    def observe(self, decision: Decision) -> Observation:
        option = decision.option
        true = self.step_seconds()
        step = true[option] * float(np.exp(self.noise * self.random.standard_normal()))
        return Observation(
            option=option,
            step_seconds=step,
            exposed_seconds=max(0.0, step - self.compute_seconds),
            samples_per_step=64.0,
            curves=self.curves(option) if decision.measure else None,
            predicted=self.step_seconds(seen_by_model=True),
            penalty=self.penalty,
        )

    def costs(self) -> dict[Option, float]:
        """True J of every option."""
        ladder = self.spec.ladder()
        worth = {cf: Worth(self.gain(cf), self.rho(cf), 1 / self.ranks) for cf in ladder}
        state = replace(start(self.spec)[0], worth=worth)
        true = self.step_seconds()
        seen = Observation(DENSE, true[DENSE], 0.0, 64.0, None, true, self.penalty)
        return {option: cost(self.spec, state, seen, option) for option in true}


def run(
    world: World, windows: int, state: PolicyState | None = None, decision: Decision | None = None
) -> tuple[PolicyState, list[Decision]]:
    """Return the last state and all decisions, the one in force at the start first."""
    if state is None or decision is None:
        state, decision = start(world.spec, world.step_seconds(seen_by_model=True))
    decisions = [decision]
    for _ in range(windows):
        state, decision = advance(world.spec, state, world.observe(decision))
        decisions.append(decision)
    return state, decisions
