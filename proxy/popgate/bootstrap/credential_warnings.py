"""Warns at the start of a proxy about credentials that others can read or guess. They do not prevent the start."""

import logging
from collections.abc import Sequence

from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.config import ServeOptions
from popgate.runtime.data_folder import SECRET_FILE
from popgate.runtime.private_files import exposure

_log = logging.getLogger(__name__)

STRONG_SECRET_BYTES_MIN = 32
"""Minimum length of a secret without a warning: 128 random bits as hexadecimal digits."""


def warn_of_credentials(options: ServeOptions, secrets: Sequence[bytes]) -> None:
    """Log an error for each file or folder with credentials that is not private, and for each server that gets them
    although its certificate is not verified. Log a warning if a secret is short.

    ``secrets`` are the secrets that this proxy uses. The data folder exists, and so does its secret if it is used.
    """
    if any(len(secret) < STRONG_SECRET_BYTES_MIN for secret in secrets):
        _log.warning(
            "a secret is short, so clients could guess it from their receipt handles: 'popgate secrets new FILE' "
            "makes a strong one",
            extra={"bytes_min": STRONG_SECRET_BYTES_MIN},
        )
    folder = options.data_dir
    places = [folder] if options.secrets else [folder, folder / SECRET_FILE]
    found = [exposure(place, place.stat()) for place in places]
    for reason in [*options.exposed_files, *found]:
        if reason is not None:
            _log.error("other users can read credentials", extra={"reason": reason})
    for setting in _unverified(options):
        _log.error(
            "TLS without verification: a machine in the network can pretend to be the server, and read the password "
            "and all messages",
            extra={"setting": setting},
        )


def _unverified(options: ServeOptions) -> list[str]:
    """Return the settings whose URLs switch the verification of a server's certificate off."""
    found = ["amqp_url"] if RabbitOptions(amqp_urls=options.amqp_urls).is_unverified else []
    if options.redis_url is not None:
        from popgate.adapters.redis.address import is_unverified, parse_address  # slow to load

        found += ["redis_url"] if is_unverified(parse_address(options.redis_url)) else []
    return found
