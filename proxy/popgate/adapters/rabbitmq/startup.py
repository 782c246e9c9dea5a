"""Explains to an operator, in one line, why RabbitMQ can't be reached. The explanation never contains the password."""

import errno
import socket
import ssl
from collections.abc import Collection, Sequence

from aiormq.exceptions import AuthenticationError, ProbableAuthenticationError
from yarl import URL

from popgate.adapters.rabbitmq.channel_parser import CloseReason
from popgate.adapters.rabbitmq.session import ACCESS_REFUSED, ConnectionRefusedByBrokerError
from popgate.domain.errors import PopgateError, StartupError

DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
NOT_ALLOWED = 530
NO_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG")
"""OpenSSL's reasons for an answer that is not TLS."""
_FILE_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def check_urls(amqp_urls: Sequence[str]) -> None:
    """Check the URLs. Raises: StartupError if there is no URL, or if one of them is not an AMQP URL."""
    if not amqp_urls or not all(map(_is_usable, amqp_urls)):
        raise StartupError("the AMQP URL must look like amqp://user:password@host:5672/vhost, or amqps://... for TLS")


def _is_usable(amqp_url: str) -> bool:
    try:
        url = URL(amqp_url)
        return url.scheme in DEFAULT_PORTS and bool(url.host)
    except ValueError:
        return False


def explain_all(problems: Collection[str]) -> str:
    """Join the explanations for one or several nodes in one line."""
    return "; ".join(problems) if len(problems) == 1 else f"no RabbitMQ node can be used: {'; '.join(problems)}"


def is_timeout(error: BaseException) -> bool:
    """Return whether ``error`` is a timeout. If so, the node may answer another attempt with a longer timeout."""
    return not isinstance(error, PopgateError) and any(isinstance(cause, TimeoutError) for cause in _causes(error))


def explain(error: BaseException, url: URL, connect_seconds: float) -> str:
    """Return why the connection to ``url`` failed, and what the operator should check."""
    place = address(url)
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, ConnectionRefusedByBrokerError):
            return _refused(cause.reason, url, place)
        if isinstance(cause, ProbableAuthenticationError | AuthenticationError):
            return _refused(CloseReason(ACCESS_REFUSED, str(cause)), url, place)
        if isinstance(cause, TimeoutError):
            advice = "" if url.scheme == "amqps" else ", and use amqps:// if it expects TLS"
            return f"RabbitMQ at {place} did not answer within {connect_seconds:g} s: check the address{advice}"
        if isinstance(cause, socket.gaierror):
            return f"the host {url.host!r} is unknown ({cause.strerror}): check the host in the AMQP URL"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the TLS certificate of {place} is not trusted ({cause.verify_message}): "
                "give its authority with ?cafile=... in the AMQP URL"
            )
        if isinstance(cause, ssl.SSLError) and cause.reason in NO_TLS:
            return f"{place} does not speak TLS ({cause.reason}): use amqp://, or RabbitMQ's TLS port, usually 5671"
        if isinstance(cause, ssl.SSLError) or (isinstance(cause, _FILE_ERRORS) and url.scheme == "amqps"):
            return f"no TLS with {place} ({cause.strerror}): check the files in the AMQP URL: cafile, certfile, keyfile"
        if isinstance(cause, OSError) and _is_refused(cause):
            return f"nothing listens on {place}: check that RabbitMQ runs there, and the port in the AMQP URL"
    if any(isinstance(cause, ConnectionResetError) or _is_another_protocol(cause) for cause in causes):
        return f"{place} does not speak AMQP 0-9-1: check the port, and use amqps:// if it expects TLS"
    return f"no connection to RabbitMQ at {place}: {str(error) or type(error).__name__}"


def address(url: URL) -> str:
    return f"{url.host}:{url.port or DEFAULT_PORTS.get(url.scheme, 5672)}"


def _refused(reason: CloseReason, url: URL, place: str) -> str:
    user = url.user or "guest"
    if reason.code == ACCESS_REFUSED:
        local_only = "; the user guest may connect from RabbitMQ's own host only" if user == "guest" else ""
        return f"RabbitMQ at {place} refused the user {user!r}: check user and password in the AMQP URL{local_only}"
    if reason.code == NOT_ALLOWED and "not found" in reason.text:
        return f"RabbitMQ at {place} has no such virtual host ({reason.text}): check the path of the AMQP URL"
    if reason.code == NOT_ALLOWED and "refused" in reason.text:
        return f"RabbitMQ at {place} gives {user!r} no access to the virtual host ({reason.text}): set its permissions"
    if "is down" in reason.text:
        return (
            f"RabbitMQ at {place} has not started the virtual host ({reason.text}): try rabbitmqctl restart_vhost, and "
            'see "A virtual host that is down" in docs/rabbitmq.md'
        )
    return f"RabbitMQ at {place} refused the connection: {reason.text}"


def _is_another_protocol(error: BaseException) -> bool:
    return any(words in str(error) for words in ("malformed frame", "unexpectedly closed"))


def _is_refused(error: OSError) -> bool:
    # If a host has several addresses, as localhost does, asyncio raises one OSError. Only its text contains the errors
    # of all addresses.
    return error.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(error)


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return causes
