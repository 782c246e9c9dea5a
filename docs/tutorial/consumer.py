"""Processes orders: writes the SHA-256 of every body to processed-NAME.txt.

    python consumer.py NAME

Each line also has the delivery count, the index of the queue and the time. Ends with Ctrl-C or SIGTERM, once the
messages in hand are done. The proxy's address is the variable POPGATE_URL, http://127.0.0.1:8080 where there is none.
"""

import hashlib
import sys
import time
from pathlib import Path

from popgate_client import Consumer, Message


def main(name: str) -> None:
    with Path(f"processed-{name}.txt").open("ab", buffering=0) as processed:

        def process(message: Message) -> None:
            checksum = hashlib.sha256(message.body).hexdigest()
            processed.write(f"{checksum} {message.delivery_count} {message.queue} {time.time():.3f}\n".encode())

        Consumer("orders", "billing", process).run()


if __name__ == "__main__":
    main(sys.argv[1])
