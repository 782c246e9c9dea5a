"""Defines the settings that concern security: secrets, TLS, API keys, OpenID Connect and the audit log."""

from dataclasses import dataclass, field
from pathlib import Path

from popgate.config import security_values, values
from popgate.config.log_options import LogOptions
from popgate.config.security_values import ScopeAliases
from popgate.config.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions(LogOptions):
    """The options of ``popgate serve`` that concern security."""

    secret: str | None = setting(
        "signs receipt handles, and authenticates proxies to each other; must be the same on every proxy "
        "(prefer --secret-file, or POPGATE_SECRET, to the flag)",
        values.secret_text,
        None,
        "TEXT",
        default_text="generated into the data folder; required with --redis-url",
        hidden=True,
    )
    secret_file: Path | None = setting(
        "file of secrets, one in each line: the first signs, and all are accepted, so that they can be changed "
        "without an interruption (popgate secrets)",
        values.file_path,
        None,
        "FILE",
        default_text="none",
    )
    accept_untagged: bool = setting(
        "accept copy ids on RabbitMQ that have no identity tag: for an upgrade from a popgate that wrote "
        "none, until its messages are consumed. Meanwhile, a publisher can pretend to be popgate",
        values.switch,
        False,
        "BOOL",
        default_text="false",
    )
    keys_file: Path | None = setting(
        "file of principals, and of the API keys that they may use; it is read again when it changes (popgate keys)",
        values.file_path,
        None,
        "FILE",
        default_text="none: every client may do everything",
    )
    tls_certificate_file: Path | None = setting(
        "certificate chain (PEM) with which to serve https; it is read again when it changes",
        values.file_path,
        None,
        "FILE",
        default_text="none: serve http",
    )
    tls_key_file: Path | None = setting(
        "private key (PEM) of the certificate", values.file_path, None, "FILE", default_text="none"
    )
    tls_client_ca_file: Path | None = setting(
        "authorities (PEM) of client certificates; a certificate authenticates the principal of --keys-file that "
        "it names",
        values.file_path,
        None,
        "FILE",
        default_text="none: client certificates are not requested",
    )
    insecure: bool = setting(
        "serve on an address that other machines can reach although authentication or TLS is missing",
        values.switch,
        False,
        "BOOL",
        default_text="false",
    )
    audit_log: str | None = setting(
        "file for the audit log, as JSON lines; - is standard error",
        security_values.file_or_standard_error,
        None,
        "FILE",
        default_text="no audit log is written",
    )
    """The absolute path of the audit log, or ``-`` for standard error. If this is None, no audit log is written."""
    oidc_issuer: str | None = setting(
        "accept tokens of this OpenID Connect provider; needs --oidc-audience, and the extra popgate[oidc]",
        security_values.https_url,
        None,
        "URL",
        default_text="none",
    )
    oidc_audience: str | None = setting(
        "the audience that a token must name", values.text, None, "NAME", default_text="none"
    )
    oidc_jwks_url: str | None = setting(
        "URL of the provider's public keys",
        security_values.https_url,
        None,
        "URL",
        default_text="read from the provider's configuration",
    )
    oidc_ca_file: Path | None = setting(
        "authorities (PEM) that signed the provider's certificate",
        values.file_path,
        None,
        "FILE",
        default_text="the system's authorities",
    )
    oidc_name_claim: str = setting(
        "the claim that contains the name of the principal", security_values.claim_name, "sub", "CLAIM"
    )
    oidc_scopes_claim: str = setting("the claim that contains the scopes", security_values.claim_name, "scope", "CLAIM")
    oidc_scope_prefix: str = setting(
        "the text with which popgate's scopes begin; other scopes are ignored",
        security_values.scope_prefix,
        "",
        "TEXT",
        default_text="none",
    )
    oidc_scope_aliases: ScopeAliases = setting(
        "other names for scopes: ALIAS=SCOPE SCOPE with commas between the aliases",
        security_values.scope_aliases,
        (),
        "LIST",
        default_text="none",
    )
    """Pairs of an alias and the scopes that it stands for."""
    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    """The value of ``secret``, or the secrets in ``secret_file``: the first signs, and all are accepted. It is empty if
    neither is given: then the secret of the data folder applies. This is no setting."""
    exposed_files: tuple[str, ...] = ()
    """Why files with credentials, from which these options were read, are not private, with the remedies. This is no
    setting."""

    @property
    def has_tls(self) -> bool:
        return self.tls_certificate_file is not None

    @property
    def has_authentication(self) -> bool:
        return self.keys_file is not None or self.oidc_issuer is not None
