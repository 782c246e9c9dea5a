"""Remembers this program's tries of one message, so that its dead letter can say why it died.

The headers are those of ``popgate.domain.dead_letter``, and the rows those of ``popgate.domain.attempts``. Tries of
other programs, and of this one before its connection was lost, are not known.
"""

import json
from collections import deque
from typing import Any

from popgate_client.message import Message, SettleEntry, Verb

TRIES_MAX = 8
"""Maximum number of tries that are remembered: the latest ones."""
ERROR_TYPE, ERROR_TEXT = "x-popgate-dead-error-type", "x-popgate-dead-error-text"
CLIENT, ATTEMPTS = "x-popgate-dead-client", "x-popgate-dead-attempts"
CAUSE_HEADERS = frozenset({ERROR_TYPE, ERROR_TEXT, CLIENT, ATTEMPTS})
"""Headers that say why a message died. A message may have them from an earlier death, if it was moved by hand."""
_OUTCOMES = {Verb.RELEASE: "released", Verb.REJECT: "rejected"}


class Tries:
    """The failed tries of one message by the program `client_id`. `error_texts`: whether to keep exceptions' texts."""

    def __init__(self, client_id: str, *, error_texts: bool) -> None:
        self._client_id = client_id
        self._error_texts = error_texts
        self._rows: deque[dict[str, Any]] = deque(maxlen=TRIES_MAX)

    def note(self, message: Message, verb: Verb, entry: SettleEntry, *, began_at: float, ended_at: float) -> None:
        """Remember a try that did not succeed, with its error. The times are Unix seconds."""
        row = {
            "attempt": message.delivery_count,
            "leased_at": round(began_at, 3),
            "ended_at": round(ended_at, 3),
            "outcome": _OUTCOMES[verb],
            "client": self._client_id,
            "error_type": entry.error_type,
            "error_text": entry.error_text if self._error_texts else None,
            "reason": entry.reason,
        }
        self._rows.append({name: value for name, value in row.items() if value is not None})

    def headers(self) -> dict[str, str]:
        """Return the headers of the dead letter: the last error, the client, and the tries, the oldest first."""
        errors = [row for row in self._rows if "error_type" in row or "error_text" in row]
        failed = errors[-1] if errors else {}
        rows = json.dumps([*self._rows], ensure_ascii=False, separators=(",", ":"))
        headers = {ERROR_TYPE: failed.get("error_type"), ERROR_TEXT: failed.get("error_text"), CLIENT: self._client_id}
        return {name: str(value) for name, value in headers.items() if value} | ({ATTEMPTS: rows} if self._rows else {})
