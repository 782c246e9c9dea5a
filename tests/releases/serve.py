"""`python -m releases.serve` is `popgate` as another release has it.

Which one, `RELEASE_FILE` in the working directory says: who writes another name there and starts the process again has
upgraded it in place. The number of a version in which peers speak to it is appended to `HEARD_FILE` whenever it is not
the one before.
"""

import sys
from pathlib import Path

from popgate.cli import main
from popgate.domain.names import InstanceId
from popgate.ports.peers import PeerMessage
from popgate.wire import codec, version_1
from popgate.wire.codec import Codec, Version
from releases import earlier_wire, next_wire

RELEASE_FILE, HEARD_FILE = Path("release"), Path("heard")
EARLIER, NEXT, FAR = "earlier", "next", "far"
RELEASES: dict[str, dict[int, Version]] = {
    EARLIER: {1: earlier_wire},
    NEXT: {1: version_1, 2: next_wire},
    FAR: {3: next_wire},
}
"""The versions that each of them speaks. Nobody comes to hear what the last one says."""


class NotingCodec(Codec):
    """Notes in which version it was spoken to."""

    heard = 0

    def decode_message(self, data: bytes) -> tuple[int, InstanceId, PeerMessage[object]]:
        version, sender, message = super().decode_message(data)
        if version != self.heard:
            self.heard = version
            with HEARD_FILE.open("a") as heard:
                heard.write(f"{version}\n")
        return version, sender, message


if __name__ == "__main__":
    codec.CODEC = NotingCodec(RELEASES[RELEASE_FILE.read_text()])
    sys.exit(main())
