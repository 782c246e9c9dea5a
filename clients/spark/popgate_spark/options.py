"""Reads the options of source, reader and sink once, on the driver, into frozen values (docs/spark.md).

Owns names, defaults and limits. An unknown or invalid option is rejected with its name and the valid values.
"""

import difflib
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from popgate_client.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, TokenSource, token_in
from popgate_client.transport import URL_DEFAULT, URL_VARIABLE, url_complaint
from popgate_spark.errors import OptionInvalid

URLS_MAX = 16
MESSAGES_MAX, MESSAGES_DEFAULT = 100_000, 10_000
PARTITIONS_MAX, PARTITIONS_DEFAULT = 1_024, 4
INVISIBILITY_SECONDS_MAX = 43_200.0
STREAM_INVISIBILITY_SECONDS = 300.0
BATCH_INVISIBILITY_SECONDS = 3_600.0
"""Default lease of a batch read in seconds; longer than a stream's, because no heartbeat renews it."""
HOLD_SECONDS_DEFAULT, HOLD_SECONDS_MAX = 43_200.0, 30 * 86_400.0
RETRY_SECONDS_DEFAULT, RETRY_SECONDS_MAX = 60.0, 3_600.0
NAME_LENGTH_MAX = 64

COMMON = ("url", "token", "tokenFile", "topic", "retrySeconds")
LEASED = (*COMMON, "group", "partitions", "maxMessagesPerBatch", "invisibilitySeconds")
STREAM = (*LEASED, "streamId", "onUnknownGroup", "holdSecondsMax")
BATCH = (*LEASED, "batchId")
SINK = (*COMMON, "idColumn")
BATCH_SINK = (*SINK, "writeId")
EVERY = tuple(dict.fromkeys((*STREAM, *BATCH, *BATCH_SINK)))
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname", "outputmode"})
"""Options that Spark passes to every sink in addition to the sink's."""
_ASYNC = "asyncprogresstrackingenabled"

OnUnknownGroup: TypeAlias = Literal["fail", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The proxies and the topic. `retry_seconds`: how long a request is repeated while no proxy answers.

    `token_file` is read where a request is sent: also on the executors' machines.

    Its `repr` contains neither token nor passwords, because it may appear in a traceback.
    """

    urls: Sequence[str] = field(repr=False)
    token: str | None = field(repr=False)
    topic: str
    retry_seconds: float
    token_file: str | None = None

    @property
    def token_source(self) -> TokenSource:
        """What supplies the token; empty if there is none."""
        return token_in(self.token_file) if self.token_file is not None else self.token or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedOptions:
    """The options about leases, common to both readers."""

    place: Place
    group: str
    partitions: int
    messages_max: int
    invisibility_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of `spark.readStream`. An empty `stream_id` is replaced by a random one at the first batch."""

    leased: LeasedOptions
    stream_id: str
    on_unknown_group: OnUnknownGroup
    hold_seconds_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of `spark.read`."""

    leased: LeasedOptions
    batch_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Options of `writeStream` and `write`. `write_id` identifies a batch write, also among several of one
    `foreachBatch`; it is empty for a stream, which uses its query's id."""

    place: Place
    id_column: str | None
    write_id: str


class Options:
    """The options as Spark passes them; their names are case-insensitive."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """Raises: OptionInvalid for a name that no reader or writer of popgate has."""
        self._given = {name.lower(): value for name, value in given.items()}
        if self._given.get(_ASYNC, "false").strip().lower() == "true":
            raise OptionInvalid(
                "asyncProgressTrackingEnabled",
                "popgate can't be used with it: a batch is acked once Spark's commit log has it, which is then written "
                "asynchronously; remove the option",
            )
        known = {name.lower(): name for name in EVERY}
        for lowered in self._given:
            if lowered not in known and lowered not in _SPARKS_OWN and lowered != _ASYNC:
                near = difflib.get_close_matches(lowered, known, n=1)
                hint = f"did you mean {known[near[0]]}?" if near else f"known are {', '.join(EVERY)}"
                raise OptionInvalid(lowered, f"is not known; {hint}")

    def stream(self) -> StreamOptions:
        """Read the options of a streaming read. Raises: OptionInvalid."""
        self._refuse_others(STREAM, "readStream")
        on_unknown_group = self._text("onUnknownGroup", "fail")
        if on_unknown_group not in get_args(OnUnknownGroup):
            raise OptionInvalid("onUnknownGroup", f"must be fail or empty, not {on_unknown_group!r}")
        return StreamOptions(
            leased=self._leased(STREAM_INVISIBILITY_SECONDS),
            stream_id=self._name("streamId", ""),
            on_unknown_group="fail" if on_unknown_group == "fail" else "empty",
            hold_seconds_max=self._seconds("holdSecondsMax", HOLD_SECONDS_DEFAULT, 1.0, HOLD_SECONDS_MAX),
        )

    def batch(self, unnamed: str) -> BatchOptions:
        """Read the options of a batch read. `unnamed`: the id if the user gives none. Raises: OptionInvalid."""
        self._refuse_others(BATCH, "read")
        batch_id = self._name("batchId", "") or unnamed
        return BatchOptions(leased=self._leased(BATCH_INVISIBILITY_SECONDS), batch_id=batch_id)

    def check_leased(self) -> None:
        """Check the options common to all readers. Raises: OptionInvalid."""
        self._leased(STREAM_INVISIBILITY_SECONDS)

    def sink(self, *, streaming: bool) -> SinkOptions:
        """Read the options of a sink. Raises: OptionInvalid."""
        self._refuse_others(SINK if streaming else BATCH_SINK, "writeStream" if streaming else "write")
        return SinkOptions(
            place=self._place(),
            id_column=self._text("idColumn", "") or None,
            write_id="" if streaming else self._name("writeId", "") or uuid.uuid4().hex,
        )

    # -- values -------------------------------------------------------------------------------------------------------

    def _refuse_others(self, names: Sequence[str], where: str) -> None:
        for name in EVERY:
            if name.lower() in self._given and name not in names:
                raise OptionInvalid(name, f"is not an option of {where}, which has {', '.join(names)}")

    def _leased(self, invisibility_seconds: float) -> LeasedOptions:
        return LeasedOptions(
            place=self._place(),
            group=self._name("group"),
            partitions=self._whole("partitions", PARTITIONS_DEFAULT, PARTITIONS_MAX),
            messages_max=self._whole("maxMessagesPerBatch", MESSAGES_DEFAULT, MESSAGES_MAX),
            invisibility_seconds=self._seconds(
                "invisibilitySeconds", invisibility_seconds, 1.0, INVISIBILITY_SECONDS_MAX
            ),
        )

    def _place(self) -> Place:
        text = self._text("url", os.environ.get(URL_VARIABLE, ""))
        urls = [url.strip() for url in text.split(",") if url.strip()]
        if not urls:
            raise OptionInvalid(
                "url", f"is missing; set the proxy's address, or several separated by commas ({URL_DEFAULT})"
            )
        if len(urls) > URLS_MAX:
            raise OptionInvalid("url", f"names {len(urls)} proxies; at most {URLS_MAX} are used")
        for number, url in enumerate(urls, start=1):
            complaint = url_complaint(url)
            if complaint is not None and "@" in text and "@" not in url:  # it may be part of a password
                complaint = f"address {number} of {len(urls)} is not a URL; write a comma of a password as %2C"
            if complaint is not None:
                raise OptionInvalid("url", complaint)
        token, token_file = self._text("token", "") or None, self._text("tokenFile", "") or None
        if token is not None and token_file is not None:
            raise OptionInvalid("tokenFile", "is given together with token; give one of them")
        if token is None and token_file is None:
            token = os.environ.get(TOKEN_VARIABLE) or None
            token_file = os.environ.get(TOKEN_FILE_VARIABLE) or None if token is None else None
        if token is not None and (not (token.isascii() and token.isprintable()) or " " in token):
            raise OptionInvalid("token", "has characters that no token can have, such as a space or a line end")
        return Place(
            urls=tuple(urls),
            token=token,
            topic=self._name("topic"),
            retry_seconds=self._seconds("retrySeconds", RETRY_SECONDS_DEFAULT, 0.0, RETRY_SECONDS_MAX),
            token_file=token_file,
        )

    def _text(self, name: str, default: str) -> str:
        return self._given.get(name.lower(), default).strip()

    def _name(self, name: str, default: str | None = None) -> str:
        text = self._text(name, default or "")
        if not text:
            if default is None:
                raise OptionInvalid(name, f'is missing; set .option("{name}", ...)')
            return default
        if len(text) > NAME_LENGTH_MAX or not all(letter.isascii() and _is_of_names(letter) for letter in text):
            raise OptionInvalid(name, f"must be 1 to {NAME_LENGTH_MAX} of A-Z a-z 0-9 . _ -, not {text!r}")
        return text

    def _whole(self, name: str, default: int, maximum: int) -> int:
        text = self._text(name, str(default))
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= maximum):
            raise OptionInvalid(name, f"must be a whole number from 1 to {maximum}, not {text!r}")
        return int(text)

    def _seconds(self, name: str, default: float, minimum: float, maximum: float) -> float:
        text = self._text(name, str(default))
        try:
            seconds = float(text)
        except ValueError:
            seconds = float("nan")
        if not minimum <= seconds <= maximum:
            raise OptionInvalid(name, f"must be seconds from {minimum:g} to {maximum:g}, not {text!r}")
        return seconds


def _is_of_names(letter: str) -> bool:
    return letter.isalnum() or letter in "._-"
