"""k of every bucket: bounds, the sum, and equality with one top-k of the whole model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.compression.allocation import allocate
from hvd_hetero.compression.topk import k_for
from hvd_hetero.errors import ConfigurationError

_BUCKETS = st.lists(
    st.tuples(st.integers(0, 2000), st.one_of(st.just(0.0), st.floats(1e-6, 1e6))),
    min_size=1,
    max_size=8,
)


@given(_BUCKETS, st.floats(1.0, 5000.0))
@settings(deadline=None, max_examples=300)
def test_bounds_and_sum(buckets: list[tuple[int, float]], cf: float) -> None:
    elements = [size for size, _ in buckets]
    entries = [seen if size else 0.0 for size, seen in buckets]
    ks = allocate(entries, elements, cf)
    for size, k in zip(elements, ks, strict=True):
        assert (k == 0) if size == 0 else 1 <= k <= size
    if sum(entries) > 0:
        filled = sum(size > 0 for size in elements)
        assert sum(ks) == min(sum(elements), max(k_for(sum(elements), cf), filled))
    assert ks == allocate([8.0 * seen for seen in entries], elements, cf)  # only ratios count


def test_equals_one_top_k_of_the_whole_model() -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(1200, generator=random) * torch.tensor([1.0, 3.0, 0.1]).repeat_interleave(
        400
    )
    for cf in (2.0, 10.0, 100.0):
        top = torch.topk(values.abs(), k_for(1200, cf)).indices // 400
        seen = torch.bincount(top, minlength=3).tolist()
        ks = allocate(seen, [400] * 3, cf)
        assert all(abs(k - max(1, n)) <= 2 for k, n in zip(ks, seen, strict=True))


def test_a_full_bucket_hands_the_rest_on() -> None:
    assert allocate([900.0, 50.0, 50.0], [10, 500, 490], 10) == (10, 45, 45)
    assert allocate([5.0, 0.0], [3, 100], 2) == (3, 49)


def test_nothing_seen_yet() -> None:
    assert allocate(None, [1000, 3, 0], 100) == (10, 1, 0)
    assert allocate([0.0, 0.0, 0.0], [1000, 3, 0], 100) == (10, 1, 0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 numbers of entries for 3 buckets"):
        allocate([1.0, 2.0], [1, 2, 3], 10)
    with pytest.raises(ConfigurationError, match="entries_by_bucket"):
        allocate([2.0, -1.0], [1, 2], 10)
    with pytest.raises(ConfigurationError, match="cf="):
        allocate(None, [1, 2], 0.5)
