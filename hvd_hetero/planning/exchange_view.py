"""The exchange as the planner sees it: two numbers of seconds, by how gradients travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ExchangeView:
    """How gradients travelled in a window, and how they will in the next.

    now, then: names of the exchanges, equal where nothing changes. modelled: (T_o, T_u) of
    exchanges by their names, from a cost model; may be empty.
    """

    now: str = ""
    then: str = ""
    modelled: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def expected(self, measured: tuple[float, float]) -> tuple[float, float]:
        """Return (T_o, T_u) of ``then``, given those measured of ``now``.

        The cost model's ratio between the two is taken; without one they are taken to be alike.
        """
        old, new = self.modelled.get(self.now), self.modelled.get(self.then)
        if self.now == self.then or old is None or new is None:
            return measured
        if sum(old) <= 0.0 or sum(measured) <= 0.0:
            return new
        correction = min(max(sum(measured) / sum(old), 0.5), 2.0)
        return new[0] * correction, new[1] * correction
