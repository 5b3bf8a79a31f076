"""``python -m tierkv``: the same as the command ``tierkv``."""

from __future__ import annotations

import sys

from tierkv.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
