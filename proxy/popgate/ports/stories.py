"""Defines the stories port, which reads the events of one message from the journal."""

from typing import Protocol

from popgate.domain.story import Story


class Stories(Protocol):
    async def story(self, topic: str, message_id: str) -> Story:
        """Return the events of the message with this message id or copy id. Never raises; see ``Story.trouble``."""
        ...
