"""What the options accept, refuse and turn into."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from hvd_hetero.compression.spec import Adaptive, TopK
from hvd_hetero.errors import ConfigurationError, UnsupportedError


@pytest.mark.parametrize("spec", [TopK(cf=100), Adaptive(), Adaptive(cf_min=1, scaling_factor=3)])
def test_options_survive_json(spec: TopK | Adaptive) -> None:
    assert type(spec).from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_whole_numbers_are_as_good_as_floats() -> None:
    assert TopK(10) == TopK(10.0)
    assert Adaptive(cf_min=10, cf_max=10).cf_max == 10.0


def test_defaults_are_the_published_ones() -> None:
    spec = Adaptive()
    assert (spec.cf_min, spec.cf_max, spec.eps, spec.omega) == (10.0, 10000.0, 0.75, 0.05)
    assert (spec.scaling, spec.scaling_factor) == ("geometric", 2.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("policy", "grvac"),
        ("cf_min", 0.5),
        ("cf_max", math.inf),
        ("eps", 0.0),
        ("eps", 1.1),
        ("eps", math.nan),
        ("omega", -0.1),
        ("window", 0),
        ("window", 2.5),
        ("scaling", "linear"),
        ("scaling_factor", 1.0),
        ("critical_change", 0.0),
        ("dense_wait_windows", 0),
        ("dense_margin", -1.0),
        ("flush_steps", 0),
        ("window", True),
    ],
)
def test_the_error_names_the_option_and_the_value(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=option) as caught:
        Adaptive(**{option: value})
    assert repr(value) in str(caught.value)


def test_an_empty_range_of_factors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cf_max=5 is below cf_min=10"):
        Adaptive(cf_min=10, cf_max=5)
    with pytest.raises(ConfigurationError, match="cf="):
        TopK(0.1)


@pytest.mark.parametrize("spec", [TopK(10), Adaptive()])
def test_horovods_own_optimizer_is_told_to_let_go(spec: TopK | Adaptive) -> None:
    """Horovod calls compress() on whatever it is given; it must hear a sentence, at once."""
    with pytest.raises(UnsupportedError, match=r"hvd_hetero\.DistributedOptimizer"):
        spec.compress(torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"hvd_hetero\.DistributedOptimizer"):
        spec.decompress(torch.ones(3), None)
