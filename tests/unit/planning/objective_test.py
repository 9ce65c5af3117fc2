"""The objective: what DESIGN's measurements say, the two members, their meeting point."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_hetero.errors import ConfigurationError
from hvd_hetero.planning.objective import Penalty, default_penalty, objective_seconds


@pytest.mark.parametrize(("rate", "kappa"), [(0.005, 0.002), (0.06, 0.03), (0.12, 0.12)])
def test_sgd_follows_what_was_measured(rate: float, kappa: float) -> None:
    penalty = default_penalty("sgd", rate)
    assert penalty.exponent == 1.0
    assert 1 / 1.4 < penalty.kappa / kappa < 1.4


def test_momentum_counts_as_a_larger_rate() -> None:
    with_momentum = default_penalty("sgd", 0.01, momentum=0.9)
    assert with_momentum.kappa == pytest.approx(default_penalty("sgd", 0.1).kappa)
    assert default_penalty("sgd", 0.0) == Penalty(0.0, 1.0)


@given(st.floats(0.0, 10.0), st.sampled_from(["adam", "other"]))
def test_adam_does_not_depend_on_the_rate(rate: float, family: str) -> None:
    assert default_penalty(family, rate) == Penalty(0.2, 0.7)


@given(
    st.floats(1e-6, 1e3),
    st.floats(1e-6, 1.0),
    st.lists(st.floats(0.0, 1e3), min_size=2, max_size=2),
    st.floats(0.0, 2.0),
    st.floats(0.0, 3.0),
)
def test_dense_is_worth_its_seconds_and_more_residual_is_never_better(
    seconds: float, gain: float, rhos: list[float], kappa: float, exponent: float
) -> None:
    penalty = Penalty(kappa, exponent)
    for objective in ("gain", "residual"):
        assert objective_seconds(seconds, objective, 1.0, 0.0, penalty) == seconds
        assert objective_seconds(seconds, objective, gain, 1.0, penalty) >= seconds
    low, high = (objective_seconds(seconds, "residual", gain, rho, penalty) for rho in sorted(rhos))
    assert low <= high


def test_gravac_is_the_member_with_kappa_one_and_square() -> None:
    """Under noise alone 1 / gain = 1 + rho**2."""
    gain, rho = 0.2, 2.0
    as_residual = objective_seconds(3.0, "residual", gain, rho, Penalty(1.0, 2.0))
    assert objective_seconds(3.0, "gain", gain, rho, Penalty(9.0, 9.0)) == pytest.approx(15.0)
    assert as_residual == pytest.approx(15.0)


def test_nothing_sent_is_worth_nothing() -> None:
    assert objective_seconds(1.0, "gain", 0.0, 1.0, Penalty(1, 1)) == math.inf


def test_nonsense_is_refused() -> None:
    for kappa, exponent in ((-1.0, 1.0), (1.0, math.nan)):
        with pytest.raises(ConfigurationError):
            Penalty(kappa, exponent)
    with pytest.raises(ConfigurationError, match="family"):
        default_penalty("lion", 0.1)
    with pytest.raises(ConfigurationError, match="momentum"):
        default_penalty("sgd", 0.1, momentum=1.0)
    with pytest.raises(ConfigurationError, match="objective"):
        objective_seconds(1.0, "loss", 1.0, 0.0, Penalty(1, 1))
