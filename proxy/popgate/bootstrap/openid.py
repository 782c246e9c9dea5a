"""Starts to accept tokens of an OpenID provider if the settings name one."""

from typing import TYPE_CHECKING

from popgate.config import ServeOptions
from popgate.domain.errors import StartupError
from popgate.runtime.background import Background

if TYPE_CHECKING:
    from popgate.auth.tokens import TokenVerifier


def token_verifier(options: ServeOptions, background: Background) -> "TokenVerifier | None":
    """Return what verifies the tokens of the configured provider, and let ``background`` keep its keys.

    Return None if no provider is configured. The provider need not answer yet. Raises: StartupError.
    """
    if options.oidc_issuer is None:
        return None
    assert options.oidc_audience is not None, "the settings need both"
    try:
        # These modules need an optional extra.
        from popgate.auth.provider_client import Provider, ProviderClient
        from popgate.auth.provider_keys import ProviderKeys
        from popgate.auth.scopes import ScopeRules
        from popgate.auth.tokens import TokenRules, TokenVerifier
    except ImportError as error:
        raise StartupError(
            f"--oidc-issuer needs packages that are not installed ({error}): pip install 'popgate[server,oidc]'"
        ) from error
    provider = Provider(issuer=options.oidc_issuer, jwks_url=options.oidc_jwks_url, ca_file=options.oidc_ca_file)
    keys = ProviderKeys(ProviderClient(provider).key_set)
    rules = TokenRules(
        issuer=options.oidc_issuer,
        audience=options.oidc_audience,
        name_claim=options.oidc_name_claim,
        scopes_claim=options.oidc_scopes_claim,
        scopes=ScopeRules(prefix=options.oidc_scope_prefix, aliases=options.oidc_scope_aliases),
    )
    background.keep(keys.run, name="renew the keys of the OpenID provider")
    return TokenVerifier(keys, rules)
