"""Controls when a connection reads: not while its client is too slow, and not while parsed requests wait."""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from popgate.api.rare_waits import RareEvent


class HeldFlow(FlowControl):
    """Stops reading while the connection holds requests that have not been parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = self._is_held = False
        self._is_writable_event = RareEvent()
        self._is_writable_event.set()

    def hold(self) -> None:
        self._is_held = True
        self._transport.pause_reading()

    def let_go(self) -> None:
        self._is_held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()
