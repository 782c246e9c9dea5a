"""The numbers of a connection's channels."""

from types import SimpleNamespace
from typing import Any

from popgate.adapters.rabbitmq.session import ChannelNumbers


def test_consumed_queues_leave_channels_to_all_other_work() -> None:
    connection: Any = SimpleNamespace(connection_tune=SimpleNamespace(channel_max=16), channels={})
    numbers = ChannelNumbers()

    def opened(reserve: int = 0) -> bool:
        with numbers.next(connection, reserve) as number:
            if number is not None:
                connection.channels[number] = None
            return number is not None

    assert [opened(reserve=64) for _ in range(15)] == [True] * 14 + [False]
    assert [opened() for _ in range(3)] == [True, True, False]
