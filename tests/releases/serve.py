"""`python -m releases.serve` is `popgate` as another release has it.

`RELEASE_FILE` in the working directory names the release: to upgrade in place, write another name there and restart the
process. Whenever a peer speaks another version than the one before, the version is appended to `HEARD_FILE`.
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
"""The versions that each release speaks. No other release speaks the version of the last one."""


class NotingCodec(Codec):
    """Records the version of each message it decodes."""

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
