"""How many entries each bucket sends at a compression factor (CF) of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_hetero.compression.topk import k_for
from hvd_hetero.errors import ConfigurationError, check_int

_HALVINGS = 100


def allocate(
    entries_by_bucket: Sequence[float] | None, elements_by_bucket: Sequence[int], cf: float
) -> tuple[int, ...]:
    """Return k of every bucket, close to what one top-k of the whole model would take of it.

    Args:
        entries_by_bucket: entries that the whole model's top-k was seen to take from each bucket,
            up to a common scale (``Curves.bucket_entries``); None, or all zero, when nothing was
            seen: then every bucket gets its own ``k_for``.
        elements_by_bucket: length of each bucket.
        cf: compression factor, at least 1.

    Returns:
        Each at least 1 (0 for an empty bucket) and at most the bucket's length, and proportional
        to what was seen between these bounds. They add up to ``k_for`` of all elements, unless
        there are more buckets than that. The same numbers give the same result on every rank.

    Raises:
        ConfigurationError: the lengths differ, a number is negative, or ``cf`` is below 1.
    """
    elements = [check_int("elements_by_bucket", one, minimum=0) for one in elements_by_bucket]
    if entries_by_bucket is None or sum(entries_by_bucket) <= 0.0:
        return tuple(k_for(one, cf) if one else 0 for one in elements)
    if len(entries_by_bucket) != len(elements):
        raise ConfigurationError(
            f"{len(entries_by_bucket)} numbers of entries for {len(elements)} buckets: give one "
            "for each"
        )
    if min(entries_by_bucket) < 0.0:
        raise ConfigurationError(f"entries_by_bucket={list(entries_by_bucket)}: must be at least 0")
    k = min(sum(elements), max(k_for(sum(elements), cf), sum(one > 0 for one in elements)))

    def shares(scale: float) -> list[float]:
        return [
            min(float(most), max(1.0, scale * entries)) if most else 0.0
            for entries, most in zip(entries_by_bucket, elements, strict=True)
        ]

    low, high = 0.0, float(k) / min(entries for entries in entries_by_bucket if entries > 0.0)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if sum(shares(middle)) < k:
            low = middle
        else:
            high = middle
    exact = shares(high)
    whole = [int(share) for share in exact]
    # The largest fractions are rounded up; of equal ones those of the first buckets. Buckets
    # nothing was taken from may have to make up for what the others have no room for.
    order = sorted(range(len(whole)), key=lambda bucket: (whole[bucket] - exact[bucket], bucket))
    while (missing := k - sum(whole)) > 0:
        for bucket in [one for one in order if whole[one] < elements[one]][:missing]:
            whole[bucket] += 1
    return tuple(whole)
