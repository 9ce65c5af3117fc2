"""``python -m hvd_hetero.cli``."""

from __future__ import annotations

import sys

from hvd_hetero.cli import main

if __name__ == "__main__":
    sys.exit(main())
