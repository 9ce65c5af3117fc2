"""Settings that hold for every test of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch or numpy are imported anywhere: tests share few cores with each other's ranks, and
# one thread makes sums come out the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A developer's own settings must not steer the tests.
for _name in [name for name in os.environ if name.startswith("HVD_HETERO_")]:
    del os.environ[_name]

_PARALLEL = Path(__file__).parent / "parallel"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under tests/parallel as ``parallel``: ``-m 'not parallel'`` skips it."""
    for item in items:
        if _PARALLEL in item.path.parents:
            item.add_marker(pytest.mark.parallel)
