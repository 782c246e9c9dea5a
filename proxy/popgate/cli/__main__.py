"""Runs the ``popgate`` command as ``python -m popgate.cli``."""

import sys

from popgate.cli import main

if __name__ == "__main__":
    code = main()
    # If Ctrl-C came while generated code ran (the import of a dataclass), Python remembers the interrupt, and would end
    # with its signal in place of the code. It forgets the interrupt when it runs other generated code.
    exec("")
    sys.exit(code)
