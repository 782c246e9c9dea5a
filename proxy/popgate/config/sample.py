"""Writes a configuration file with every setting, from the descriptions of the settings."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from popgate.config.options import SETTINGS
from popgate.config.setting import Setting

WIDTH = 100
HEAD = """\
# popgate's settings. Each one is shown with its default, or with an example if it has none; remove the # to change it.
# A flag of 'popgate serve' overrides a POPGATE_* variable, and a variable overrides this file, which --config or
# POPGATE_CONFIG names. After a change: popgate config check FILE
#
# This file is generated: popgate config sample
"""
EXAMPLES: Mapping[str, object] = MappingProxyType(
    {
        "allowed_hosts": "popgate.example.com",
        "amqp_url": "amqps://popgate:password@rabbit-1:5671/,amqps://popgate:password@rabbit-2:5671/",
        "amqp_url_file": "/etc/popgate/amqp-url",
        "audit_log": "/var/log/popgate/audit.log",
        "auto_create": False,
        "data_dir": "/var/lib/popgate",
        "features": "pop,settle_on_pop",
        "journal": "/var/lib/popgate-journal",
        "keys_file": "/etc/popgate/keys.toml",
        "management_url": "https://popgate:password@rabbit-1:15671",
        "management_url_file": "/etc/popgate/management-url",
        "oidc_audience": "popgate",
        "oidc_ca_file": "/etc/popgate/oidc-ca.crt",
        "oidc_issuer": "https://login.example.com/realms/main",
        "oidc_jwks_url": "https://login.example.com/realms/main/keys",
        "oidc_scope_aliases": "orders-app=publish:orders consume:orders:*",
        "peer_address": "10.0.0.7:0",
        "redis_url": "rediss://popgate:password@redis:6379/0",
        "redis_url_file": "/etc/popgate/redis-url",
        "replica_commands": "ssh rabbit-1",
        "replica_forget_after_seconds": 86400,
        "replica_groups_url": "https://popgate:8080",
        "replica_policies": "orders*=5",
        "replica_zones": "rabbit@rabbit-1=a,rabbit@rabbit-2=b",
        "report_folder": "/var/lib/popgate-reports",
        "secret": "0123456789abcdef0123456789abcdef",
        "secret_file": "/etc/popgate/secret",
        "tls_certificate_file": "/etc/popgate/tls.crt",
        "tls_client_ca_file": "/etc/popgate/clients.crt",
        "tls_key_file": "/etc/popgate/tls.key",
    }
)
"""Example values of the settings whose default can't be written in the file."""


def sample() -> str:
    """Return the text of the file."""
    return "\n".join([HEAD, *(_described(setting) for setting in SETTINGS)])


def sample_value(setting: Setting) -> object:
    """Return the value that the file shows for a setting: its default, or an example."""
    return EXAMPLES.get(setting.name, setting.default)


def _described(setting: Setting) -> str:
    words = f"{setting.help[0].upper()}{setting.help[1:]}."
    names = f"{setting.flag} {setting.metavar}, {setting.variable}; default: {setting.shown_default()}"
    comments = [*textwrap.wrap(words, WIDTH), *textwrap.wrap(names, WIDTH, break_on_hyphens=False)]
    lines = [f"# {line}" for line in comments]
    return "\n".join([*lines, f"#{setting.name} = {_toml(sample_value(setting))}", ""])


def _toml(value: object) -> str:
    """Return a value as TOML. The settings are flat, so there are no tables and no lists."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(int(value) if value == int(value) else value)
    if isinstance(value, str | Path):
        text = str(value)
        assert '"' not in text, "no default has a quotation mark"
        assert "\\" not in text, "no default has a backslash"
        return f'"{text}"'
    raise TypeError(f"EXAMPLES needs a value in place of {value!r}")
