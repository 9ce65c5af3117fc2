"""Makes the modules of ``examples/`` importable, as they are for the scripts there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
