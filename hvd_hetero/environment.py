"""The environment variables of this package, in one place."""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "HVD_HETERO_"
LOG = "HVD_HETERO_LOG"
"""File of the records that rank 0 writes, when the option ``log`` is not given."""

KNOWN_VARIABLES = (LOG,)


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return, sorted, the names that look like ours and that nothing reads: typing mistakes."""
    return sorted(name for name in names if name.startswith(PREFIX) and name not in KNOWN_VARIABLES)
