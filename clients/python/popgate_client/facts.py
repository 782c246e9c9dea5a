"""Puts the facts of a log message into its text: most programs do not show the `extra` of a record.

    the handler failed: topic=orders group=billing message_id=7f3c delivery_count=3 url=http://127.0.0.1:8080

The facts are also in `extra`, and the constant part of the message is in `record.msg`. A consumer adds to its messages
where it consumes (`about`).
"""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

TEXT_LENGTH_MAX = 500
"""Maximum number of characters of one fact in the text."""


class _About:
    """The facts of the present context. It can be pickled, because a Spark job may send this module along by value."""

    def __init__(self) -> None:
        self._facts: ContextVar[Mapping[str, Any]] = ContextVar("popgate_about")

    def __reduce__(self) -> tuple[type["_About"], tuple[()]]:
        return _About, ()

    def get(self) -> Mapping[str, Any]:
        return self._facts.get({})

    def set(self, facts: Mapping[str, Any]) -> Token[Mapping[str, Any]]:
        return self._facts.set(facts)

    def reset(self, token: Token[Mapping[str, Any]]) -> None:
        self._facts.reset(token)


_about = _About()


class FactLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that appends the `extra` of each message to its text."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message. `args` are not used: the facts are in `extra`."""
        if not self.isEnabledFor(level):
            return
        given: Mapping[str, Any] = kwargs.pop("extra", None) or {}
        facts = {**_about.get(), **given}
        text = " ".join(f"{name}={_shown(value)}" for name, value in facts.items())
        words, values = (f"{msg}: %s", (text,)) if text else (msg, ())
        self.logger.log(level, words, *values, extra=facts, stacklevel=2, **kwargs)


@contextmanager
def about(**facts: object) -> Generator[None]:
    """Within the context, and in the tasks that begin in it, all messages have these facts."""
    token = _about.set({**_about.get(), **facts})
    try:
        yield
    finally:
        _about.reset(token)


def cause_of(error: BaseException) -> str:
    """Return the type and the text of an error."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown(value: object) -> str:
    """Return a value on one line, in quotes unless it is one word."""
    text = str(value)[:TEXT_LENGTH_MAX]
    return text if text.isprintable() and text and " " not in text else repr(text)
