"""How every benchmark here shows its cases: an aligned table, and a JSON list on request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, every cell to the right, under a ruled header."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = (header, ["-" * width for width in widths], *rows)
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``format_table`` of the same and an empty line."""
    print(format_table(header, rows), end="\n\n", flush=True)


def write_json(path: str | Path, cases: Sequence[Mapping[str, Any]]) -> None:
    """Write ``cases`` as a JSON list to ``path``."""
    Path(path).write_text(json.dumps(list(cases), indent=1) + "\n")
