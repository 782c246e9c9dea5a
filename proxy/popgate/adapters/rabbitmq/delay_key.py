"""Encodes the delay of a message and its destination in one routing key. All functions are pure.

The key contains the delay in whole seconds, as one word for each bit, the highest bit first. The destination follows:
the topic, and the index of the destination queue in each group. ``delay_levels`` declares the exchanges that read the
key.
"""

from math import ceil

from popgate.domain.names import TopicName

LEVELS = 22
"""Number of delay levels, one for each bit of a delay. The longest delay, 30 days, is less than 2^22 seconds."""
DELAY_SECONDS_END = 1 << LEVELS

_DOT = "%"
"""Replaces a dot in a topic's name, because a dot would end a word. No name contains this character."""


def whole_seconds(delay_seconds: float) -> int:
    """Return the delay in whole seconds. It is rounded up, because no message may arrive early."""
    return ceil(delay_seconds)


def levels_passed(seconds: int) -> list[int]:
    """Return the levels at which a message with this delay waits, in order. It waits at level n for 2^n seconds."""
    return [level for level in reversed(range(LEVELS)) if seconds >> level & 1]


def entry_level(seconds: int) -> int:
    """Return the first level that a message with this delay enters.

    ``seconds`` must be from 1 to ``DELAY_SECONDS_END`` - 1.
    """
    assert 0 < seconds < DELAY_SECONDS_END, "a delay that the levels can't keep"
    return seconds.bit_length() - 1


def level_milliseconds(level: int) -> int:
    """Return the time to live of messages at a level, in milliseconds.

    It is 1 ms longer than the delay of the level, because RabbitMQ truncates the time at which a message arrives.
    """
    return 1000 * (1 << level) + 1


def delay_key(seconds: int, topic: TopicName, index: int) -> str:
    """Return the routing key of a message. It has at most 113 bytes; AMQP allows 255."""
    return ".".join([*f"{seconds:0{LEVELS}b}", _place(topic, index)])


def waits_pattern(level: int) -> str:
    """Return the pattern that matches the keys of messages that wait at this level."""
    return _bit_pattern(level, "1")


def passes_pattern(level: int) -> str:
    """Return the pattern that matches the keys of messages that skip this level and continue to the next lower one."""
    return _bit_pattern(level, "0")


def place_pattern(topic: TopicName, index: int) -> str:
    """Return the pattern that matches the keys of messages for queue number ``index`` of each group of ``topic``."""
    return "*." * LEVELS + _place(topic, index)


def _bit_pattern(level: int, bit: str) -> str:
    return "*." * (LEVELS - 1 - level) + f"{bit}.#"


def _place(topic: TopicName, index: int) -> str:
    return f"{topic.replace('.', _DOT)}.{index}"
