"""Runs several pieces of work one after the other, so that one that fails does not keep the others from being done."""

from collections.abc import Awaitable, Callable, Iterable

from popgate.domain.errors import RetryLater


async def in_turn(works: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Call each of ``works``, and raise the first error at the end.

    An error that says that something is unavailable ends the series at once, because the rest would fail, too.
    """
    first: Exception | None = None
    for work in works:
        try:
            await work()
        except RetryLater:
            raise
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
