"""What a proxy logs at its start about credentials that others could read."""

import logging
from pathlib import Path

import pytest

from popgate.bootstrap.credential_warnings import warn_of_credentials
from popgate.config import serve_options

CLUSTER = {"secret": "hunter2-0123456789-0123456789-0123", "amqp_url": "amqp://host/", "redis_url": "redis://host"}
"""What a cluster needs."""


@pytest.mark.parametrize(
    ("urls", "settings"),
    [
        ({}, []),
        ({"amqp_url": "amqps://host/?no_verify_ssl=0", "redis_url": "rediss://host/0"}, []),
        ({"amqp_url": "amqp://host/?no_verify_ssl=1"}, []),  # without TLS, it has no meaning
        ({"amqp_url": "amqps://one/,amqps://two/?no_verify_ssl=1"}, ["amqp_url"]),
        ({"redis_url": "rediss://host/0?ssl_cert_reqs=none"}, ["redis_url"]),
        ({"redis_url": "rediss+sentinel://one/orders?ssl_check_hostname=no"}, ["redis_url"]),
    ],
)
def test_a_server_whose_certificate_is_not_verified_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, urls: dict[str, str], settings: list[str]
) -> None:
    tmp_path.chmod(0o700)
    options = serve_options({"data_dir": str(tmp_path), **CLUSTER, **urls}, {}, None)
    warn_of_credentials(options, options.secrets)
    assert [(record.levelno, record.__dict__.get("setting")) for record in caplog.records] == [
        (logging.ERROR, setting) for setting in settings
    ]
    assert all("TLS without verification" in record.getMessage() for record in caplog.records)
