"""A consumer with a bug: it takes 20 orders, and then hangs. What it took, it writes to held.txt.

Each line has the SHA-256 of a body, the index of its queue and the time when the lease ends.
"""

import hashlib
import time
from pathlib import Path

from popgate_client import Client


def main() -> None:
    with Client() as client:
        taken = client.pop("orders", "billing", max_messages=20, wait_seconds=30)
        with Path("held.txt").open("w") as held:
            for message in taken:
                checksum = hashlib.sha256(message.body).hexdigest()
                held.write(f"{checksum} {message.queue} {message.invisible_until:.3f}\n")
        print(f"took {len(taken)} messages and hangs", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
