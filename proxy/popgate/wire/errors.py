"""Defines the errors in data from a peer."""

from popgate.domain.errors import PopgateError


class NotUnderstood(PopgateError):
    """This proxy can't read the bytes of a peer as a message or an answer."""

    code = "not_understood"
