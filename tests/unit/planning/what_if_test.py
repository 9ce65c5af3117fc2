"""Plans without training: laws of the optimal split, the ring, and lines fitted to windows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_hetero.balance.lines import Line, RankModel
from hvd_hetero.errors import ConfigurationError, InfeasibleBatchError
from hvd_hetero.planning.what_if import (
    Cluster,
    ExchangeSeconds,
    Rank,
    RingNetwork,
    additions,
    classes_by_speed,
    compare,
    fit_models,
    scale_factors,
    simulate,
)


def model(seconds_per_sample: float, fixed_seconds: float = 0.0, share: float = 0.5) -> RankModel:
    done = Line(seconds_per_sample, fixed_seconds)
    return RankModel(Line(share * seconds_per_sample, share * fixed_seconds), done)


def cluster(*speeds: float, network: ExchangeSeconds | RingNetwork | None = None) -> Cluster:
    ranks = tuple(Rank(model(speed), f"{speed:g}") for speed in speeds)
    return Cluster(ranks, network or ExchangeSeconds())


MODELS = st.builds(
    model,
    st.floats(1e-5, 1e-1),
    st.floats(0.0, 0.1),
    st.one_of(st.just(0.0), st.floats(1e-3, 1.0)),
)
NETWORKS = st.one_of(
    st.builds(ExchangeSeconds, st.floats(0.0, 0.5), st.floats(0.0, 0.5)),
    st.builds(
        RingNetwork,
        st.floats(0.0, 1e9),
        st.floats(1e8, 1e11),
        st.floats(0.0, 1e-3),
        st.floats(0, 1),
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(MODELS, min_size=1, max_size=12), NETWORKS, st.integers(12, 600), st.integers(1, 4))
def test_optimal_is_never_worse_than_even(
    models: list[RankModel], network: ExchangeSeconds | RingNetwork, total: int, granule: int
) -> None:
    """Both splits give out the whole batch, and the optimal one is the shorter step."""
    ranks = tuple(Rank(one, "all") for one in models)
    total = max(total, granule * len(ranks))
    found = compare(Cluster(ranks, network), total, granule=granule)
    assert sum(found.even_local_batches) == sum(found.optimal_local_batches) == total
    assert max(found.even_local_batches) - min(found.even_local_batches) < 2 * granule
    assert found.optimal_step_seconds <= found.even_step_seconds
    assert found.lost_seconds >= 0.0
    assert 0.0 <= found.lost_share < 1.0
    assert found.speed_up >= 1.0


@settings(max_examples=50, deadline=None)
@given(MODELS, st.integers(1, 12), st.integers(12, 600), NETWORKS)
def test_equal_speeds_give_the_even_split(
    one: RankModel, ranks: int, total: int, network: ExchangeSeconds | RingNetwork
) -> None:
    """With nothing to balance, nothing is unbalanced and nothing is won."""
    found = compare(Cluster((Rank(one, "all"),) * ranks, network), total)
    if one.ready.slope_seconds > 0.0 or not found.exchange.overlapped_seconds:
        assert sorted(found.optimal_local_batches) == sorted(found.even_local_batches)
    assert found.lost_seconds == 0.0


@settings(max_examples=100, deadline=None)
@given(st.lists(MODELS, min_size=1, max_size=8), st.integers(40, 400))
def test_one_more_rank_never_slows_down_without_a_network(
    models: list[RankModel], total: int
) -> None:
    """A copy of a rank at hand takes samples off the others."""
    ranks = tuple(Rank(one, f"class {index}") for index, one in enumerate(models))
    bare = Cluster(ranks)
    now = compare(bare, total)
    more = additions(bare, now)
    assert [one.speed_class for one in more] == list(bare.speed_classes)
    for one in more:
        assert one.optimal_step_seconds is not None and one.saved_seconds is not None
        assert one.optimal_step_seconds <= now.optimal_step_seconds
        assert one.saved_seconds >= 0.0


def test_by_hand() -> None:
    """Speeds 1 : 1/2 : 1/2 : 1/4 share 18 samples as 8 4 4 2."""
    found = compare(cluster(0.01, 0.02, 0.02, 0.04, network=ExchangeSeconds(0.0, 0.005)), 18)
    assert found.optimal_local_batches == (8, 4, 4, 2)
    assert found.optimal_step_seconds == pytest.approx(0.085)
    assert found.even_step_seconds == pytest.approx(0.04 * max(found.even_local_batches[3:]) + 5e-3)
    assert found.samples_per_second(found.optimal_step_seconds) == pytest.approx(18 / 0.085)


def test_a_slow_network_makes_one_more_rank_a_loss() -> None:
    """The latency of a ring grows with the ranks, and that is said, not hidden."""
    slow = RingNetwork(1e6, 1e9, latency_seconds=0.1)
    base = cluster(0.001, 0.001, network=slow)
    (one,) = additions(base, compare(base, 64))
    assert one.saved_seconds is not None and one.saved_seconds < 0.0


def test_an_addition_that_does_not_fit_is_told() -> None:
    """Two ranks with a least batch of 32 fill a batch of 64."""
    ranks = (Rank(model(0.001), "all", min_local_batch=32),) * 2
    full = Cluster(ranks)
    (one,) = additions(full, compare(full, 64))
    assert one.optimal_step_seconds is None
    with pytest.raises(InfeasibleBatchError, match="global_batch_size=63"):
        compare(full, 63)


def test_ring_allreduce() -> None:
    """2 (n-1)/n bytes / bandwidth, and 2 (n-1) messages; one rank exchanges nothing."""
    ring = RingNetwork(1e9, 8e9, latency_seconds=0.001, overlapped_share=0.75)
    assert ring.allreduce_seconds(1) == 0.0
    assert ring.allreduce_seconds(4) == pytest.approx(2 * 3 / 4 + 6 * 0.001)
    exchange = ring.exchange(4)
    assert exchange.overlapped_seconds == pytest.approx(0.75 * 1.506)
    assert exchange.final_seconds == pytest.approx(0.25 * 1.506)
    with pytest.raises(ConfigurationError, match="bandwidth_bits_per_second=0"):
        RingNetwork(1.0, 0)
    with pytest.raises(ConfigurationError, match="overlapped_share"):
        RingNetwork(1.0, 1.0, overlapped_share=1.5)


def test_scales() -> None:
    """Powers of two up to 4096 ranks, or up to the last one asked for, which is shown."""
    assert scale_factors(16, None) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert scale_factors(3, None, most_ranks=10) == (1, 2)
    assert scale_factors(5000, None) == (1,)
    assert scale_factors(16, 6) == (1, 2, 4, 6)
    assert scale_factors(16, 8) == (1, 2, 4, 8)
    with pytest.raises(ConfigurationError, match="scale=0"):
        scale_factors(16, 0)


def test_without_a_network_a_cluster_scales_perfectly() -> None:
    """Twice the ranks for twice the batch take the same step."""
    points = list(simulate(cluster(0.001, 0.002, 0.004), 210, (1, 4, 16)))
    assert [point.ranks for point in points] == [3, 12, 48]
    assert [point.comparison.global_batch_size for point in points] == [210, 840, 3360]
    assert len({point.comparison.optimal_step_seconds for point in points}) == 1


def test_thousands_of_ranks() -> None:
    """4096 ranks of three speeds: every rank of one speed gets the same, give or take one."""
    (point,) = simulate(cluster(0.001, 0.002, 0.004, 0.004), 256, [1024])
    batches = point.comparison.optimal_local_batches
    assert sum(batches) == 256 * 1024
    for start in range(0, 4096, 1024):
        assert max(batches[start : start + 1024]) - min(batches[start : start + 1024]) <= 1


def test_classes_by_speed() -> None:
    """Alike within a tenth of the fastest of the class; numbered from the fastest."""
    models = [model(speed) for speed in (0.002, 0.001, 0.00105, 0.004, 0.00215)]
    assert classes_by_speed(models, 32) == (1, 0, 0, 2, 1)
    with pytest.raises(ConfigurationError, match="local_batch=0"):
        classes_by_speed(models, 0)


def test_lines_are_found_again() -> None:
    """Windows of two sizes give slope and fixed seconds."""
    truth = [model(0.001, 0.01), model(0.003, 0.01)]
    splits = [(32, 32), (48, 16), (48, 16)]
    windows = [(s, [m.done(b) for m, b in zip(truth, s, strict=True)]) for s in splits]
    models, fitted = fit_models(windows)
    assert fitted == 2
    for found, true in zip(models, truth, strict=True):
        for batch in (16, 32, 48):
            assert found.done(batch) == pytest.approx(true.done(batch), rel=0.05)
        assert found.ready == found.done


def test_one_size_goes_through_the_origin() -> None:
    """Without a second size fixed costs are not known: in proportion to speed, as in training."""
    models, fitted = fit_models([((32, 32), (0.32, 0.64))] * 3)
    assert fitted == 0
    assert [one.done.intercept_seconds for one in models] == [0.0, 0.0]
    assert [one.done.slope_seconds for one in models] == pytest.approx([0.01, 0.02])


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        fit_models([])
    with pytest.raises(ConfigurationError, match="no time"):
        fit_models([((32,), (0.0,))])
    with pytest.raises(ConfigurationError, match="at least one rank"):
        Cluster(())
    with pytest.raises(ConfigurationError, match="speed_class='H100'"):
        cluster(0.001).with_one_more("H100")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster(0.001).ranks = ()  # type: ignore[misc]
