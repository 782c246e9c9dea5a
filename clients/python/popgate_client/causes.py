"""Describes an exception by texts that a server accepts: why a client gives a message back."""

from typing import NamedTuple

REASON_LENGTH_MAX = 256
"""Maximum number of characters of a reason."""
ERROR_TYPE_LENGTH_MAX, ERROR_TEXT_LENGTH_MAX = 128, 500
"""The server keeps no more characters of an exception's type and text."""


class ErrorTexts(NamedTuple):
    """The type and the text of an exception; None if there is none."""

    type: str | None = None
    text: str | None = None


def error_texts(error: BaseException | None) -> ErrorTexts:
    """Return the type and the text of an exception, shortened to what the server keeps. Never raises."""
    if error is None:
        return ErrorTexts()
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error)
    except Exception as unprintable:
        text = f"it can't be shown: {type(unprintable).__name__}"
    return ErrorTexts(shortened(name, ERROR_TYPE_LENGTH_MAX), shortened(text, ERROR_TEXT_LENGTH_MAX))


def shortened(text: str, length_max: int) -> str | None:
    """Return the beginning of a text in a form that can be sent; None if the text is empty."""
    # A text that can't be encoded would block every settlement in its batch.
    return text[:length_max].encode("utf-8", "replace").decode("utf-8") or None
