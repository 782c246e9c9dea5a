"""Defines the error for data of a peer that can't be decoded."""

from popgate.domain.errors import PopgateError


class NotUnderstood(PopgateError):
    """The data that a peer sent is not a valid message or answer in a supported version."""

    code = "not_understood"
