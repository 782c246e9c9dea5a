"""``python -m popgate.cli`` is the ``popgate`` command."""

import sys

from popgate.cli import main

if __name__ == "__main__":
    sys.exit(main())
