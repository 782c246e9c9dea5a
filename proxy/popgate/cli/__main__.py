"""Runs the ``popgate`` command as ``python -m popgate.cli``."""

import sys

from popgate.cli import main

if __name__ == "__main__":
    code = main()
    # If Ctrl-C came while generated code ran (a dataclass that is imported), Python would end with its signal whatever
    # the code, until it has run other code.
    exec("")
    sys.exit(code)
