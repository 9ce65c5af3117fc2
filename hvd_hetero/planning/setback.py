"""Splits that were predicted to be faster and proved to be slower: taken back, and left alone.

What a model cannot know, as how many messages Horovod fuses under a split, shows in the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_hetero.planning.planner_state import LEARNING_WINDOWS, PlannerConfig, PlannerState

REJECTED_WINDOWS = 10  # for which a split that proved slower is not tried again
NEAR = 0.1  # relative distance on every rank within which two splits count as one


def proved_slower(config: PlannerConfig, state: PlannerState, noise: float) -> bool:
    """Whether the plan in force, just measured, is clearly slower than the one before it.

    Not where a rank or the exchange has changed in that window: then nothing was proved. noise: by
    which the seconds of two windows may differ for no reason, relative.
    """
    effect = state.effect
    if effect is None or effect.measured_seconds is None or state.learning == LEARNING_WINDOWS:
        return False
    before = effect.before_local_batches
    limits = zip(before, config.bounds.lower, config.bounds.upper, strict=False)
    fits = sum(before) == config.global_batch_size and all(a <= b <= c for b, a, c in limits)
    worse = effect.measured_seconds / effect.before_seconds - 1.0 if effect.before_seconds else 0.0
    return fits and worse > max(config.min_gain, noise)


def is_rejected(state: PlannerState, local_batches: Sequence[int]) -> bool:
    """Whether a split is, within NEAR, the one that was taken back not long ago."""
    return state.rejected_windows > 0 and all(
        abs(a - b) <= max(1.0, NEAR * b) for a, b in zip(local_batches, state.rejected, strict=True)
    )
