"""The ``popgate`` command: parses the command line and hands over; owns no behaviour of its own."""

import sys

INSTALL_HINT = "popgate: the proxy and its command line need more packages: pip install 'popgate[server]'"


def main() -> int:
    """Entry point of the ``popgate`` command; the exit code is 0 for success, 1 for failure, 2 for wrong usage."""
    try:
        from popgate.cli.commands import run
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "popgate":
            raise
        print(INSTALL_HINT, file=sys.stderr)
        return 2
    return run(sys.argv[1:])
