"""A program that shares a group's queues with other instances; it prints the messages it handles and its state.

Started by `support.amqp_apps`: python amqp_program.py NAME TOPIC GROUP '{more arguments of AmqpConsumer}'
"""

import json
import logging
import sys
import threading
import time

from popgate_client import Message
from popgate_client.amqp import AmqpConsumer

STATE_SECONDS = 0.1


def tell(**what: object) -> None:
    """Print one JSON line immediately."""
    sys.stdout.write(json.dumps({"at": time.time(), **what}) + "\n")
    sys.stdout.flush()


def handle(message: Message) -> None:
    tell(handled=message.text, queue=message.queue, count=message.delivery_count)


def watch(consumer: AmqpConsumer) -> None:
    """Print the state whenever it changes."""
    told: object = None
    while True:
        state = consumer.state()
        active = sorted(queue for queue, standing in state.queues.items() if standing == "active")
        absent = sorted(queue for queue, standing in state.queues.items() if standing in ("absent", "leaving"))
        now = {
            "active": active,
            "absent": absent,
            "members": [*state.members],
            "released": state.released_count,
            "learns_from": state.learns_from,
            "problems": dict(state.problems),
        }
        if now != told:
            told = now
            tell(**now)
        time.sleep(STATE_SECONDS)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    name, topic, group, more = sys.argv[1:]
    consumer = AmqpConsumer(topic, group, handle, client_id=name, **json.loads(more))
    threading.Thread(target=watch, args=(consumer,), daemon=True).start()
    tell(started=name)
    consumer.run()
    tell(ended=name)


if __name__ == "__main__":
    main()
