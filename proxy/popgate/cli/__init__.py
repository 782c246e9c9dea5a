"""The ``popgate`` command: parses the command line and hands over; owns no behaviour of its own."""

import sys

INSTALL_HINT = "popgate: the proxy and its command line need more packages: pip install 'popgate[server]'"


def main() -> int:
    """Entry point of the ``popgate`` command; ``endings`` tells the exit codes."""
    try:
        from popgate.cli.commands import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("popgate", "popgate_client"):
            raise
        print(INSTALL_HINT, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while the imports run; later ones are the commands' business
        return 130
