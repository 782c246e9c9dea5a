"""The main job of the README's tutorial, with real servers and a process for every program.

A program without knowledge of popgate fills two queues; popgate adopts them; three Python consumers, a shell script and
a hanging consumer drain them. The tutorial's own blocks are run. Afterwards this test counts everything independently.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pika
import pytest

from acceptance.readme import Block, scenario
from acceptance.terminal import ServerBlock, Substitution, Terminal, checkout, reader_environment
from support.processes import PortBlock, wait_until

MESSAGES, MESSAGES_FULL = 4_000, 20_000
QUEUES = ("orders-classic", "orders-quorum")
TAKEOVER_SECONDS_MAX = 1.0
CLOCK_STEP_SECONDS = 0.05
HANG_TIMEOUT_SECONDS = 40
BLOCK_TIMEOUT_SECONDS = 90

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed:
    """One line of a consumer's file."""

    consumer: str
    checksum: str
    delivery_count: int
    queue: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One line of the hung consumer's file."""

    checksum: str
    queue: int
    ends_at: float


class Tutorial:
    """The reader's working folder, and the files in it afterwards."""

    def __init__(self, folder: Path) -> None:
        self.root = checkout(folder)
        self._files = self.root / "docs" / "tutorial"

    def published(self) -> Counter[str]:
        return Counter((self._files / "published.txt").read_text().split())

    def held(self) -> list[Held]:
        rows = [line.split() for line in self._lines("held.txt")]
        return [Held(checksum=row[0], queue=int(row[1]), ends_at=float(row[2])) for row in rows]

    def processed(self) -> Iterator[Processed]:
        for consumer in ("1", "2", "3", "4"):
            for line in self._lines(f"processed-{consumer}.txt"):
                checksum, count, queue, at = line.split()
                yield Processed(
                    consumer=consumer, checksum=checksum, delivery_count=int(count), queue=int(queue), at=float(at)
                )

    def _lines(self, name: str) -> list[str]:
        file = self._files / name
        return file.read_text().splitlines() if file.exists() else []


def depths(amqp_url: str) -> dict[str, int]:
    """Return the number of ready messages in the queues, by AMQP."""
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        answers = {queue: channel.queue_declare(queue, passive=True) for queue in QUEUES}
        return {queue: answer.method.message_count for queue, answer in answers.items()}


@pytest.fixture
def tutorial(tmp_path: Path) -> Tutorial:
    return Tutorial(tmp_path)


def test_every_message_is_processed_and_a_hung_consumers_leases_pass_to_the_others(
    tutorial: Tutorial, tmp_path: Path, amqp_url: str, full_run: bool, seed: int
) -> None:
    messages = MESSAGES_FULL if full_run else MESSAGES
    ports = PortBlock()
    (port,) = ports.ports
    substitution = Substitution(
        port=port, amqp_url=amqp_url, counts={"--messages 20000": f"--messages {messages} --seed {seed}"}
    )
    environment = reader_environment(port, tmp_path / "data")
    with ExitStack() as stack:
        terminal = stack.enter_context(Terminal(tutorial.root, substitution, environment))
        for block in scenario("tutorial"):
            started = time.monotonic()
            if block.keeps_running:
                stack.enter_context(ServerBlock(tmp_path / "serve", block, port, substitution, environment))
                continue
            if "consumer.py 1" in block.text:
                wait_until(lambda: bool(tutorial.held()), timeout_seconds=HANG_TIMEOUT_SECONDS, what="a hung consumer")
            terminal.paste(block, timeout_seconds=BLOCK_TIMEOUT_SECONDS * (10 if full_run else 1))
            logger.info("%.1f s: %s", time.monotonic() - started, block.text.strip().splitlines()[-1])
    check(tutorial, messages, depths(amqp_url))


def check(tutorial: Tutorial, messages: int, left: dict[str, int]) -> None:
    """Count independently."""
    published, held, processed = tutorial.published(), tutorial.held(), list(tutorial.processed())
    assert published.total() == messages
    assert Counter(one.checksum for one in processed) == published
    assert left == dict.fromkeys(QUEUES, 0)
    by_consumer = Counter(one.consumer for one in processed)
    assert set(by_consumer) == {"1", "2", "3", "4"}, "a consumer was left out"
    assert set(Counter(one.queue for one in processed)) == {0, 1}

    again = [one for one in processed if one.delivery_count > 1]
    assert held
    assert all(one.delivery_count == 2 for one in again)
    assert Counter((one.checksum, one.queue) for one in again) == Counter((one.checksum, one.queue) for one in held)
    ends_at = {one.ends_at for one in held}
    assert max(ends_at) - min(ends_at) < CLOCK_STEP_SECONDS, "one pop, one deadline"
    late = sorted(one.at - max(ends_at) for one in again)
    logger.info("%s of %d messages; took over %d leases, %.3f to %.3f s after their end",
                dict(by_consumer), messages, len(again), late[0], late[-1])  # fmt: skip
    assert late[0] > -CLOCK_STEP_SECONDS, "a lease was given away before its end"
    assert late[-1] < TAKEOVER_SECONDS_MAX


def test_the_tutorial_starts_every_program_that_the_main_job_needs() -> None:
    """Keep the README, and with it this test, from being shortened."""
    blocks: list[Block] = scenario("tutorial")
    text = "".join(block.text for block in blocks)
    for needed in ("publisher.py", "--adopt", "hung_consumer.py", "consumer.py 3", "consumer.sh 4", "cmp"):
        assert needed in text
    assert sum(block.keeps_running for block in blocks) == 1
