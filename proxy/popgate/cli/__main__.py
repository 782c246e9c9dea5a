"""Runs the ``popgate`` command as ``python -m popgate.cli``."""

import sys

from popgate.cli import main

if __name__ == "__main__":
    sys.exit(main())
