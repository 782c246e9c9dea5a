"""Assembles what proves callers and records what they change: keys, tokens of a provider, and the audit log."""

import contextlib
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from popgate.api.metrics import AccessFigures
from popgate.auth.audit_log import AuditEvent, AuditEventKind, AuditLog
from popgate.auth.credentials import Credentials
from popgate.auth.denial_log import DenialLog
from popgate.auth.watched_keys import KeyChanges, WatchedKeys
from popgate.bootstrap.endings import stop_in_time
from popgate.bootstrap.openid import token_verifier
from popgate.bootstrap.tls import ServerTls
from popgate.config import ServeOptions
from popgate.runtime.background import Background


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessControl:
    """What proves who callers are, and records their changes.

    ``credentials`` is None if the proxy does not authenticate callers. ``keys`` and ``audit`` are None if there is no
    keys file, and no audit log, respectively. ``denials`` logs refusals, and passes all events to ``audit``.
    """

    credentials: Credentials | None
    keys: WatchedKeys | None
    audit: AuditLog | None
    denials: DenialLog

    def untrusted(self, error: ssl.SSLError, address: str) -> None:
        """Record a client whose TLS handshake has failed, if the reason is its certificate."""
        if isinstance(error, ssl.SSLCertVerificationError):
            self.denials.note(
                AuditEvent(
                    event=AuditEventKind.DENIED,
                    operation="tls_handshake",
                    reason=error.verify_message,
                    address=address,
                )
            )

    def figures(self, tls: ServerTls | None, *, is_insecure: bool) -> AccessFigures:
        keys, audit = self.keys, self.audit
        return AccessFigures(
            is_insecure=is_insecure,
            keys_are_stale=None if keys is None else lambda: keys.is_stale,
            tls_is_stale=None if tls is None else lambda: tls.is_stale,
            certificate_ends_at=None if tls is None else lambda: tls.ends_at,
            audit_dropped=None if audit is None else lambda: audit.dropped,
        )


@contextlib.asynccontextmanager
async def access_control(
    options: ServeOptions, background: Background, *, records_keys: bool
) -> AsyncGenerator[AccessControl]:
    """Read the keys and open the audit log, and follow their changes in the context. Raises: StartupError.

    Of several workers, one ``records_keys``: it writes changes of the keys to the audit log.
    """
    async with contextlib.AsyncExitStack() as stack:
        audit = None
        if options.audit_log is not None:
            audit = AuditLog(options.audit_log)
            stack.push_async_callback(stop_in_time, "audit log", audit.stop)
            audit.start()

        def changed(changes: KeyChanges) -> None:
            if audit is not None and records_keys:
                audit.note(AuditEvent(event=AuditEventKind.KEYS, **changes._asdict()))

        keys = None
        if options.keys_file is not None:
            keys = WatchedKeys(options.keys_file, changed=changed)
            keys.load()
            background.keep(keys.run, name="watch the keys file")
        tokens = token_verifier(options, background)
        credentials = None if keys is None and tokens is None else Credentials(keys, tokens)
        yield AccessControl(credentials=credentials, keys=keys, audit=audit, denials=DenialLog(audit))
