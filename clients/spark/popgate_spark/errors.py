"""The errors of the source and the sink: each is one line that names the option or the message, and the remedy.

By default Spark shows the traceback of its Python workers. On the driver, where errors of options and of proxies are
raised, this module makes it show only the message.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

from popgate_client.errors import PopgateError


class SparkSourceError(Exception):
    """The root of the errors of source, reader and sink. The message is one line."""


class OptionInvalid(SparkSourceError):
    """An option is wrong, missing or unknown."""

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(option, complaint)
        self.option = option
        self.complaint = complaint

    def __str__(self) -> str:
        return f"popgate: option {self.option}: {self.complaint}"


class BatchUnavailable(SparkSourceError):
    """Spark requests a batch again that can't be returned unchanged."""


class NotPublished(SparkSourceError):
    """Messages were not published; the task fails, and its repeat publishes only the missing ones."""


@contextmanager
def told_in_one_line() -> Generator[None]:
    """Hide tracebacks of this package's errors, and turn errors of proxies into them, while the block runs. For the
    driver's processes, which serve only this data source."""
    try:
        yield
    except PopgateError as error:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise SparkSourceError(f"popgate: {error}") from None
    except SparkSourceError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
