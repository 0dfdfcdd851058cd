"""``python -m hostward``: the command line, where no script is installed."""

from __future__ import annotations

import sys

from hostward._cli import main

if __name__ == "__main__":
    sys.exit(main())
