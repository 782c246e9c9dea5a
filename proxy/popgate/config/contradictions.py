"""Finds settings that are valid individually, but contradict or lack others. Each problem names the remedy."""

from collections.abc import Collection, Mapping
from typing import Any

from popgate.config.options import SETTINGS
from popgate.config.values import PORT_MAX, HostPort
from popgate.domain.features import Feature
from popgate.domain.hosts import is_loopback, names_other_machines

KEYS_FLAGS = "--keys-file"
TLS_FLAGS = "TLS (--tls-certificate-file, --tls-key-file)"


def contradictions(values: Mapping[str, Any], *, serves: bool) -> list[str]:
    """Return the problems of values that are valid individually, but not in combination.

    ``values`` contains the values of all settings by name. Those that concern security only matter to a process that
    ``serves`` clients.
    """
    problems: list[str] = []
    with_redis, workers = values["redis_url"] is not None, values["workers"]
    if with_redis and not values["amqp_url"]:
        problems.append("redis_url: needs amqp_url, because the embedded broker keeps its state with its messages")
    if values["owns_queues"] is False and not with_redis:
        problems.append("owns_queues: without redis_url a proxy runs alone, and no other proxy could own the queues")
    if values["replica_keeper"] and not values["amqp_url"]:
        problems.append("replica_keeper: needs amqp_url; the embedded broker has no replicas")
    if workers > 1 and not with_redis:
        problems.append(f"workers: {workers} workers form a cluster; give amqp_url and redis_url, or set it to 1")
    problems += _half_offered(values["features"])
    address: HostPort | None = values["peer_address"]
    if address is not None and address.port and address.port + workers - 1 > PORT_MAX:
        problems.append(
            f"peer_address: each of the {workers} workers needs a port, from this one upwards; give a lower one"
        )
    return problems + (_insecurities(values) if serves else [])


def _half_offered(features: Collection[Feature]) -> list[str]:
    """Return the problems of ``features`` that need other features."""
    if not {Feature.POP, Feature.PULL} & set(features):
        return ["features: without pop and pull no client could consume; name at least one of them"]
    needs = {Feature.CONSUME_MODE: (Feature.POP, Feature.PULL), Feature.LEASE_GROUPS: (Feature.POP,)}
    return [
        f"features: {feature} needs {needed}; name both, or none"
        for feature, many in needs.items()
        for needed in many
        if feature in features and needed not in features
    ]


def _insecurities(values: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    if values["redis_url"] is not None and values["secret"] is None and values["secret_file"] is None:
        problems.append(
            "redis_url: a cluster needs a secret that all proxies share: popgate secrets new FILE, then --secret-file "
            "FILE"
        )
    certificate, key = values["tls_certificate_file"], values["tls_key_file"]
    if (certificate is None) != (key is None):
        given, missing = ("key", "certificate") if certificate is None else ("certificate", "key")
        problems.append(f"tls_{given}_file: needs tls_{missing}_file; give both, or none")
    if values["tls_client_ca_file"] is not None and certificate is None and key is None:
        problems.append(f"tls_client_ca_file: without TLS no client can show a certificate; give {TLS_FLAGS}")
    if values["tls_client_ca_file"] is not None and values["keys_file"] is None:
        problems.append(
            f"tls_client_ca_file: a client certificate names a principal of a file of keys; give {KEYS_FLAGS}"
        )
    return problems + _half_oidc(values) + _openly(values)


def _half_oidc(values: Mapping[str, Any]) -> list[str]:
    if values["oidc_issuer"] is not None:
        missing = values["oidc_audience"] is None
        return ["oidc_issuer: needs oidc_audience, or tokens for other services would be accepted"] if missing else []
    oidc = [setting for setting in SETTINGS if setting.name.startswith("oidc_")]
    given = [setting.name for setting in oidc if values[setting.name] != setting.default]
    return [f"{name}: has no effect without oidc_issuer; give both, or none" for name in given]


def _openly(values: Mapping[str, Any]) -> list[str]:
    """Return the problem of a proxy that other machines can reach without authentication or without TLS."""
    if values["insecure"]:
        return []
    authenticates = values["keys_file"] is not None or values["oidc_issuer"] is not None
    if is_loopback(values["host"]):
        if authenticates or not names_other_machines(values["allowed_hosts"] or ()):
            return []
        remedy = f"give {KEYS_FLAGS}, or --insecure if that server authenticates them"
        return [f"allowed_hosts: a server in front lets other machines in: {remedy}"]
    missing: list[str] = []
    if not authenticates:
        missing.append(KEYS_FLAGS)
    if values["tls_certificate_file"] is None:
        missing.append(TLS_FLAGS)
    if not missing:
        return []
    without = "protection" if len(missing) > 1 else "authentication" if KEYS_FLAGS in missing else "TLS"
    return [
        (
            f"host: {values['host']} can be reached from other machines: give {' and '.join(missing)}, or --insecure "
            f"to serve without {without}"
        )
    ]
