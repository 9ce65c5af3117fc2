"""What a job has learnt of its ranks' speed, for the next job on the same hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_hetero.balance.perf_model import RankModelFit
from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.plan import Plan
from hvd_hetero.planning.planner import (
    PlannerConfig,
    PlannerState,
    best_split,
    first_plan,
)
from hvd_hetero.planning.prediction import models_of

VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Fits of all ranks, the host of each, and T_o, T_u (see ``PlannerState``).

    Raises ConfigurationError when hosts and fits differ in number.
    """

    hosts: tuple[str, ...]
    fits: tuple[RankModelFit, ...]
    exchange_seconds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if len(self.hosts) != len(self.fits):
            raise ConfigurationError(f"{len(self.hosts)} hosts for {len(self.fits)} fits")

    @classmethod
    def of(cls, hosts: Sequence[str], state: PlannerState) -> Profile:
        """Return what is worth keeping of a planner's state."""
        return cls(tuple(hosts), state.fits, state.exchange_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of JSON types; ``from_dict`` reads it back."""
        return {
            "version": VERSION,
            "hosts": list(self.hosts),
            "fits": [fit.to_dict() for fit in self.fits],
            "exchange_seconds": self.exchange_seconds and list(self.exchange_seconds),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """Build a profile from ``to_dict``'s result; ConfigurationError if it is none."""
        try:
            if data["version"] != VERSION:
                raise ConfigurationError(
                    f"a profile of version {data['version']!r}: this is for version {VERSION}; "
                    "delete the file to learn anew"
                )
            times = data["exchange_seconds"]
            return cls(
                tuple(str(host) for host in data["hosts"]),
                tuple(RankModelFit.from_dict(fit) for fit in data["fits"]),
                None if times is None else (float(times[0]), float(times[1])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"no profile of ranks' speeds ({error!r}); delete the file to learn anew"
            ) from error

    def on(self, hosts: Sequence[str]) -> Profile | None:
        """Return the profile of a job whose ranks lie on ``hosts``; None if any rank is new.

        The first rank on a host is taken for the first one there before, and so on.
        """
        known: dict[str, list[RankModelFit]] = {}
        for host, fit in zip(self.hosts, self.fits, strict=True):
            known.setdefault(host, []).append(fit)
        try:
            fits = tuple(known[host].pop(0) for host in hosts)
        except (KeyError, IndexError):
            return None
        same = len(hosts) == len(self.hosts)
        return Profile(tuple(hosts), fits, self.exchange_seconds if same else None)


def first_state(config: PlannerConfig, profile: Profile | None) -> PlannerState:
    """Return the state in which a job begins: with the profile's models, and a plan by them.

    profile: of as many ranks as the bounds have; None: nothing is known.
    """
    state = PlannerState(first_plan(config, config.bounds.ranks))
    if profile is None:
        return state
    state = replace(state, fits=profile.fits, exchange_seconds=profile.exchange_seconds)
    models, basis = models_of(state)
    if models is None or config.fixed_local_batches is not None:
        return state
    best = best_split(config, models, profile.exchange_seconds)
    reason = f"{basis}, by the profile of an earlier job"
    plan = Plan(0, best.local_batches, reason, best.step_seconds)
    return replace(state, plan=plan, reason=reason)
