"""The ``popgate`` command: parses the command line and calls the command. It has no behaviour of its own."""

import sys

INSTALL_HINT = "popgate: the proxy and its command line need more packages: pip install 'popgate[server]'"


def main() -> int:
    """Entry point of the ``popgate`` command; ``endings`` lists the exit codes."""
    try:
        from popgate.cli.commands import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("popgate", "popgate_client"):
            raise
        print(INSTALL_HINT, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # during the imports. After that, the commands handle it
        return 130
