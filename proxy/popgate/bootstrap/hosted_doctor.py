"""Lets a running proxy do what ``popgate doctor`` does, without fixing anything."""

import asyncio
import importlib
from typing import TYPE_CHECKING

from popgate.config import ServeOptions
from popgate.doctor.examination import Checkup
from popgate.doctor.facts import Owner
from popgate.domain.errors import BrokerUnavailable, StartupError
from popgate.engine.engine import Engine
from popgate.runtime.clocks import SystemClock
from popgate.runtime.single_run import SingleRun

if TYPE_CHECKING:
    from popgate.adapters.doctor.catalog import CatalogQueue

SECONDS_MAX = 40.0
"""Maximum seconds of one run. RabbitMQ's tools may hang."""


def hosted_doctor(options: ServeOptions, engine: Engine) -> SingleRun[Checkup] | None:
    """Return what examines the proxy's RabbitMQ and Redis, or None if the proxy has no RabbitMQ.

    A run has connections of its own, and changes nothing.
    """
    if not options.amqp_urls:
        return None

    async def examine() -> Checkup:
        # This import is slow. On the event loop, it would delay the requests that are already served.
        await asyncio.to_thread(importlib.import_module, "popgate.bootstrap.doctor")
        from popgate.bootstrap import rabbit_options
        from popgate.bootstrap.doctor import doctor

        try:
            async with doctor(options, rabbit_options(options), (), served=_served(engine)) as at_work:
                return Checkup(at_work.place, await at_work.examine())
        except StartupError as error:
            raise BrokerUnavailable(error.detail) from error

    return SingleRun("the doctor", examine, SystemClock(), seconds_max=SECONDS_MAX)


def _served(engine: Engine) -> "list[CatalogQueue]":
    from popgate.adapters.doctor.catalog import CatalogQueue

    found: dict[str, Owner] = {}
    for served in engine.topics.served.values():
        layout = served.layout
        found |= dict.fromkeys(layout.queues, Owner.ADOPTED if layout.adopted else Owner.POPGATE)
        found[layout.dead] = Owner.POPGATE
    return [CatalogQueue(name=name, owner=owner) for name, owner in found.items()]
