"""Defines ``popgate config``, which checks the settings of a proxy, shows them, and prints a file with all of them."""

import argparse
from pathlib import Path
from typing import Any

from popgate import config
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, Parser, add_output_flags, add_plain_command
from popgate.cli.printing import Column, Printer, complain, field, is_quiet, output_of, print_change
from popgate.config.options import SETTINGS
from popgate.config.sample import sample
from popgate.domain.errors import StartupError

EPILOG = """\
The settings of 'popgate serve' come from flags, POPGATE_* variables, and a TOML file.

examples:
  popgate config sample > popgate.toml
  popgate config check popgate.toml
  popgate config show popgate.toml
"""
CHECK_EPILOG = """\
Reads the file and the POPGATE_* variables as 'popgate serve' does, and the files with secrets, URLs, keys and TLS that
they name. Each wrong setting is reported with its line and what to do. Nothing is started, and no server is asked.

Exit codes: 0 everything is right, 2 something is wrong.

examples:
  popgate config check popgate.toml
  POPGATE_PORT=9000 popgate config check
"""
SHOW_EPILOG = """\
Shows the value of each setting that 'popgate serve' would use, and where it comes from. Credentials are not shown.

examples:
  popgate config show popgate.toml
  popgate config show popgate.toml --changed
"""
SAMPLE_EPILOG = """\
examples:
  popgate config sample > popgate.toml
"""
CHECK_COLUMNS = (Column("GIVEN", field("given")), Column("DEFAULT", field("default")))
COLUMNS = (Column("SETTING", field("setting")), Column("VALUE", field("value")), Column("FROM", field("source")))


def add_parser(commands: Commands) -> None:
    parser = add_plain_command(commands, "config", "check, show and write the settings of a proxy", EPILOG)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = add_plain_command(actions, "check", "check the settings", CHECK_EPILOG)
    _add_file(action)
    add_output_flags(action, "text")
    action.set_defaults(run=check)
    action = add_plain_command(actions, "show", "show the settings in force", SHOW_EPILOG)
    _add_file(action)
    action.add_argument("--changed", action="store_true", help="leave out the settings that have their default")
    add_output_flags(action)
    action.set_defaults(run=show)
    action = add_plain_command(actions, "sample", "print a file with every setting", SAMPLE_EPILOG)
    action.set_defaults(run=write_sample)


def _add_file(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", help="TOML file with settings (POPGATE_CONFIG)")


def check(arguments: argparse.Namespace) -> int:
    """Check the settings. Raises: CommandFailed that lists everything that is wrong."""
    file = _file(arguments)
    options = _options(file)
    for reason in options.exposed_files:
        complain(f"other users can read credentials: {reason}")
    problems = _problems_of_files(options)
    if problems:
        raise CommandFailed("the configuration is wrong:\n" + "\n".join(f"  {one}" for one in problems), ExitCode.USAGE)
    given = config.sources(config.environment(), file)
    row = {"given": len(given), "default": len(SETTINGS) - len(given)}
    if getattr(arguments, "output", None) is not None:
        print_change(arguments, CHECK_COLUMNS, [row])
    elif not is_quiet(arguments):
        print(f"the configuration is right: {row['given']} settings are given, {row['default']} have their default")
    return ExitCode.OK


def show(arguments: argparse.Namespace) -> int:
    """Show the settings. Raises: CommandFailed if they are wrong."""
    file = _file(arguments)
    options = _options(file)
    sources = config.sources(config.environment(), file)
    rows = [
        {
            "setting": setting.name,
            "value": _shown(getattr(options, setting.option_name), hidden=setting.hidden),
            "source": sources.get(setting.name, "default"),
        }
        for setting in SETTINGS
        if setting.name in sources or not arguments.changed
    ]
    Printer(COLUMNS, output_of(arguments)).print(rows)
    return ExitCode.OK


def write_sample(arguments: argparse.Namespace) -> int:
    print(sample(), end="")
    return ExitCode.OK


def _file(arguments: argparse.Namespace) -> Path | None:
    name: str | None = arguments.file or config.environment().get("POPGATE_CONFIG")
    return Path(name) if name else None


def _options(file: Path | None) -> config.ServeOptions:
    try:
        return config.serve_options({}, config.environment(), file)
    except StartupError as error:
        raise CommandFailed(error.detail.replace("--config ", ""), ExitCode.USAGE) from error


def _problems_of_files(options: config.ServeOptions) -> list[str]:
    """Return what is wrong with the files of keys and TLS that the settings name."""
    from popgate.auth.key_file import parse_key_file
    from popgate.bootstrap.tls import server_tls
    from popgate.runtime.private_files import read_private

    problems: list[str] = []
    if options.keys_file is not None:
        try:
            parse_key_file(read_private(options.keys_file))
        except ValueError as error:  # a KeyFileError or a PrivateFileError
            problems.append(f"keys_file: {error}")
    try:
        server_tls(options)
    except StartupError as error:
        problems.append(f"tls_certificate_file: {error.detail}")
    return problems


def _shown(value: Any, *, hidden: bool) -> str:
    """Return a value as text. A list or a set is shown as in the file, with commas. A value that may contain a
    credential is not shown, also if it is derived from another setting."""
    if hidden and value:
        return "(hidden)"
    if isinstance(value, tuple | frozenset):
        items: list[Any] = sorted(value) if isinstance(value, frozenset) else list(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]  # of any setting
        return ",".join(map(str, items)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
