"""What is wrong with what a peer has sent, in one line each."""

from popgate.domain.errors import PopgateError


class NotUnderstood(PopgateError):
    """The bytes of a peer are no message, or no answer, that this proxy can read."""

    code = "not_understood"
