"""Kill -9 of the proxy at random moments while clients publish with a dedup_id and repeat unanswered publishes.

Every message is there once in the end, whatever the proxy had stored or recorded when it died.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.conftest import assert_no_traceback
from popgate_client import Client, OutgoingMessage
from support.proxy import ProxyProcess

PUBLISHERS = 2
BATCH = 8
KILLS, KILLS_FULL = 2, 20
TOPIC = "t"


@pytest.mark.crash
def test_what_is_repeated_over_kills_is_there_once(
    broker_flags: Sequence[str], tmp_path: Path, seed: int, full_run: bool
) -> None:
    chance = random.Random(seed)
    ended = threading.Event()

    def publish(publisher: int) -> dict[str, str]:
        """Publish batches until the kills are over; return the message_id of each body."""
        ids: dict[str, str] = {}
        with Client(proxy.url, retry_seconds_max=60) as client:
            for number in range(1_000_000):
                bodies = [f"{publisher}.{number}.{place}" for place in range(BATCH)]
                messages = [OutgoingMessage(body=body, dedup_id=body) for body in bodies]
                for body, result in zip(bodies, client.publish(TOPIC, *messages), strict=True):
                    result.raise_for_status()
                    ids[body] = result.message_id or ""
                if ended.is_set():
                    return ids
        raise AssertionError("the kills take their time")

    with ProxyProcess(tmp_path, *broker_flags) as proxy:
        with Client(proxy.url) as client:
            client.put_topic(TOPIC, queues=2)
            client.put_group(TOPIC, "default")
        with ThreadPoolExecutor(PUBLISHERS) as pool:
            publishing = [pool.submit(publish, publisher) for publisher in range(PUBLISHERS)]
            try:
                for _ in range(KILLS_FULL if full_run else KILLS):
                    time.sleep(chance.uniform(0.2, 0.8))  # any moment is as good as another
                    proxy.kill()
                    proxy.start()
            finally:
                ended.set()
            ids = {body: message_id for one in publishing for body, message_id in one.result().items()}
        with Client(proxy.url) as client:
            repeats = client.publish(TOPIC, *(OutgoingMessage(body=body, dedup_id=body) for body in ids))
            assert [result.status for result in repeats] == ["duplicate"] * len(ids)
            assert [result.message_id for result in repeats] == list(ids.values())
            popped: Counter[str] = Counter()
            while messages := client.pop(TOPIC, "default", 256, wait_seconds=2, invisibility_seconds=600):
                popped.update(message.text for message in messages)
                assert all(result.ok for result in client.ack(TOPIC, "default", messages))
        assert popped == Counter(ids.keys())
        assert_no_traceback(proxy)
