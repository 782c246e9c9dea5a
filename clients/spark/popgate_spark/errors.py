"""What a user of the source and the sink is told: one line that names the option or the message, and the remedy.

Spark shows the traceback of its Python workers unless it is told not to; on the driver, where the errors of options and
of proxies come up, this asks for the message alone.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

from popgate_client.errors import PopgateError


class SparkSourceError(Exception):
    """The root of what source, reader and sink raise. The message is one line."""


class OptionInvalid(SparkSourceError):
    """An option is wrong, missing or unknown."""

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(option, complaint)
        self.option = option
        self.complaint = complaint

    def __str__(self) -> str:
        return f"popgate: option {self.option}: {self.complaint}"


class BatchUnavailable(SparkSourceError):
    """A batch that Spark asks for again can't be given again as it was."""


class NotPublished(SparkSourceError):
    """Messages were not published; the task fails, and its repeat publishes only what is missing."""


@contextmanager
def told_in_one_line() -> Generator[None]:
    """For the driver's processes, which serve this data source alone: no traceback around our own errors, and errors
    of proxies become ours."""
    try:
        yield
    except PopgateError as error:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise SparkSourceError(f"popgate: {error}") from None
    except SparkSourceError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
