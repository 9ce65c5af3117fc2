"""Bounds from what memory has been used."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.bounds import Bounds
from hvd_hetero.balance.memory import GROWTH, USABLE_SHARE, MemoryFit, MemoryUse, within_memory
from hvd_hetero.errors import ConfigurationError

MIB = 2**20


def test_without_a_limit_nothing_is_limited() -> None:
    fit = MemoryFit().observe(8, None)
    assert fit == MemoryFit()
    assert fit.largest_batch() is None
    bounds = Bounds((1, 1), (64, 64))
    assert within_memory(bounds, [fit, fit]) == bounds


def test_growth_is_limited_where_memory_is_plenty() -> None:
    fit = MemoryFit().observe(8, MemoryUse(8 * MIB, 1000 * MIB))
    assert fit.largest_batch() == 12
    assert MemoryFit().observe(1, MemoryUse(MIB, 1000 * MIB)).largest_batch() == 2


def test_two_sizes_tell_what_is_fixed() -> None:
    """40 MiB fixed, 1 MiB a sample, 100 MiB: 50 samples fill 90 %."""

    def use(batch: int) -> MemoryUse:
        return MemoryUse((40 + batch) * MIB, 100 * MIB)

    fit = MemoryFit().observe(32, use(32))
    # With one size all of it is taken to grow: 72 MiB / 32 a sample.
    assert fit.largest_batch() == 32 + int(18 / (72 / 32))
    fit = fit.observe(40, use(40))
    assert fit.largest_batch() == 50


def test_what_ran_may_run_again() -> None:
    """Also beyond 90 %; and a smaller batch later takes nothing back."""
    fit = MemoryFit().observe(32, MemoryUse(95 * MIB, 100 * MIB))
    assert fit.largest_batch() == 32
    assert fit.observe(8, MemoryUse(95 * MIB, 100 * MIB)).largest_batch() == 32
    bounds = within_memory(Bounds((1, 40), (64, 64)), [fit, fit])
    assert bounds == Bounds((1, 40), (32, 40))  # a minimum was asked for


@given(st.integers(0, 50), st.integers(1, 20), st.integers(60, 4000), st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_steps_up_never_overfill(fixed: int, each: int, limit: int, batch: int) -> None:
    """Law: growing as far as allowed again and again stays within 90 %, and gets near it."""
    if fixed + each * batch > USABLE_SHARE * limit:
        return
    fit, sizes = MemoryFit(), [batch]
    for _ in range(40):
        use = MemoryUse((fixed + each * sizes[-1]) * MIB, limit * MIB)
        assert use.peak_bytes <= USABLE_SHARE * use.limit_bytes
        fit = fit.observe(sizes[-1], use)
        sizes.append(fit.largest_batch() or 0)
        assert sizes[-1] <= max(GROWTH * sizes[-2], sizes[-2] + 1)
    # One size does not tell what is fixed.
    per_sample = each if len(set(sizes)) > 1 else (fixed + each * batch) / batch
    assert fixed + each * sizes[-1] + per_sample > USABLE_SHARE * limit


def test_saved_and_read() -> None:
    fit = MemoryFit().observe(8, MemoryUse(8, 100)).observe(9, MemoryUse(9, 100))
    assert MemoryFit.from_dict(fit.to_dict()) == fit
    with pytest.raises(ConfigurationError, match="not a saved fit"):
        MemoryFit.from_dict({"limit_bytes": 3})
    with pytest.raises(ConfigurationError, match="limit_bytes=0"):
        MemoryUse(1, 0)
