"""Defines the ``popgate`` command, which parses the command line, and calls the client library or starts the proxy."""

import sys

INSTALL_HINT = "popgate: the proxy and its command line need more packages: pip install 'popgate[server]'"


def main() -> int:
    """Run the ``popgate`` command, and return its exit code (see ``endings``)."""
    try:
        from popgate.cli.credential_flags import hide_credentials

        hide_credentials()  # before the slower imports
        from popgate.cli.commands import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("popgate", "popgate_client"):
            raise
        print(INSTALL_HINT, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # during the imports; later, `run` handles Ctrl-C
        return 130
