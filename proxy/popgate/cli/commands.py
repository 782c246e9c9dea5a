"""The commands of ``popgate`` and what they have in common."""

import argparse
from collections.abc import Sequence

from popgate import __version__
from popgate.cli import serve


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="popgate", description="Pop-mode consumption proxy for RabbitMQ.", allow_abbrev=False
    )
    root.add_argument("--version", action="version", version=f"popgate {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    return root


def run(arguments: Sequence[str]) -> int:
    """Parse and run; argparse exits with 2 on wrong usage."""
    parsed = parser().parse_args(arguments)
    code: int = parsed.run(parsed)
    return code
