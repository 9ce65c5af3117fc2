"""What the options accept, refuse and turn into."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from hvd_hetero.compression.spec import Adaptive
from hvd_hetero.errors import ConfigurationError, UnsupportedError

FIXED = Adaptive(policy="fixed", min_cf=100, max_cf=100)


@pytest.mark.parametrize(
    "spec", [FIXED, Adaptive(), Adaptive(min_cf=1, scaling_factor=3, kappa=0.1, rho_exponent=1)]
)
def test_options_survive_json(spec: Adaptive) -> None:
    assert Adaptive.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_whole_numbers_are_as_good_as_floats() -> None:
    spec = Adaptive(min_cf=10, max_cf=10, kappa=1, max_rho=7)
    assert (spec.max_cf, spec.kappa, spec.max_rho) == (10.0, 1.0, 7.0)
    assert isinstance(spec.kappa, float)


def test_defaults_of_the_search_are_the_published_ones() -> None:
    spec = Adaptive()
    assert (spec.min_cf, spec.max_cf, spec.eps, spec.omega) == (10.0, 10000.0, 0.75, 0.05)
    assert (spec.scaling, spec.scaling_factor) == ("geometric", 2.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("policy", "grvac"),
        ("min_cf", 0.5),
        ("max_cf", math.inf),
        ("window", 0),
        ("window", 2.5),
        ("window", True),
        ("dense_steps", -1),
        ("values", "bfloat16"),
        ("exchange", "ring"),
        ("do_no_harm", 1),
        ("objective", "rho"),
        ("kappa", -0.1),
        ("rho_exponent", math.nan),
        ("max_rho", 0.0),
        ("max_rho", None),
        ("eps", 0.0),
        ("eps", 1.1),
        ("eps", math.nan),
        ("omega", -0.1),
        ("scaling", "linear"),
        ("scaling_factor", 1.0),
        ("critical_change", 0.0),
        ("dense_wait_windows", 0),
        ("dense_margin", -1.0),
        ("flush_steps", 0),
    ],
)
def test_the_error_names_the_option_and_the_value(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=option) as caught:
        Adaptive(**{option: value})
    assert repr(value) in str(caught.value)


def test_an_empty_range_of_factors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_cf=5 is below min_cf=10"):
        Adaptive(min_cf=10, max_cf=5)


def test_a_fixed_factor_is_one_number() -> None:
    assert FIXED.ladder() == (100.0,)
    with pytest.raises(ConfigurationError, match=r"min_cf=10 and max_cf=100: a fixed.*topk"):
        Adaptive(policy="fixed", min_cf=10, max_cf=100)


@pytest.mark.parametrize("spec", [FIXED, Adaptive()])
def test_horovods_own_optimizer_is_told_to_let_go(spec: Adaptive) -> None:
    """Horovod calls compress() on whatever it is given; it must hear a sentence, at once."""
    with pytest.raises(UnsupportedError, match=r"hvd_hetero\.DistributedOptimizer"):
        spec.compress(torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"hvd_hetero\.DistributedOptimizer"):
        spec.decompress(torch.ones(3), None)
