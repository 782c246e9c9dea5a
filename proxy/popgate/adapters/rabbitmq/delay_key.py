"""How long a message is delayed and where it goes then, as one routing key.

Pure. The key spells the delay in whole seconds, a word for each bit and the highest first, then names the place: the
topic and the index of its queues. ``delay_levels`` has the exchanges that read it.
"""

from math import ceil

from popgate.domain.names import TopicName

LEVELS = 22
"""30 days are less than 2^22 seconds."""
DELAY_SECONDS_END = 1 << LEVELS

_DOT = "%"
"""Stands for a dot within a topic's name, where it would end a word. No name has it."""


def whole_seconds(delay_seconds: float) -> int:
    """The delay as the levels keep it: rounded up, for nothing may come early."""
    return ceil(delay_seconds)


def levels_passed(seconds: int) -> list[int]:
    """The levels at which a message waits, in their order: level n for 2^n seconds."""
    return [level for level in reversed(range(LEVELS)) if seconds >> level & 1]


def entry_level(seconds: int) -> int:
    """The level at which a message of 1 to ``DELAY_SECONDS_END`` - 1 seconds waits first."""
    assert 0 < seconds < DELAY_SECONDS_END, "a delay that the levels can't keep"
    return seconds.bit_length() - 1


def level_milliseconds(level: int) -> int:
    """The time to live at a level: one more than the delay, for RabbitMQ cuts off a part of one when it arrives."""
    return 1000 * (1 << level) + 1


def delay_key(seconds: int, topic: TopicName, index: int) -> str:
    """The routing key of a message: at most 113 bytes of AMQP's 255."""
    return ".".join([*f"{seconds:0{LEVELS}b}", _place(topic, index)])


def waits_pattern(level: int) -> str:
    """Matches the keys of messages that wait at this level."""
    return _bit_pattern(level, "1")


def passes_pattern(level: int) -> str:
    """Matches the keys of messages that don't, and go on to the next level down."""
    return _bit_pattern(level, "0")


def place_pattern(topic: TopicName, index: int) -> str:
    """Matches the keys that lead to the queues ``index`` of this topic's groups."""
    return "*." * LEVELS + _place(topic, index)


def _bit_pattern(level: int, bit: str) -> str:
    return "*." * (LEVELS - 1 - level) + f"{bit}.#"


def _place(topic: TopicName, index: int) -> str:
    return f"{topic.replace('.', _DOT)}.{index}"
