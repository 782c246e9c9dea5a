"""Watches, while popgate runs, for policies that endanger messages of popgate's queues.

AMQP does not show policies, so this module uses the management API, and reports nothing if there is none. The rules are
those of ``popgate doctor``, which checks everything else, too.
"""

import logging
import re
from collections.abc import Callable, Iterable

from popgate.adapters.doctor.broker_api import broker_policies
from popgate.adapters.doctor.observing import own_queue
from popgate.adapters.replicas.management import Management
from popgate.doctor.facts import Facts
from popgate.doctor.findings import Finding
from popgate.doctor.queue_rules import queue_findings
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.names import BrokerQueue

_log = logging.getLogger(__name__)


class PolicyWatch:
    """Watches the policies of one virtual host.

    ``queues`` returns popgate's present queues. Each finding is logged once, when it appears, and again when it has
    ended.
    """

    def __init__(self, management: Management, vhost: str, queues: Callable[[], Iterable[BrokerQueue]]) -> None:
        self._management = management
        self._vhost = vhost
        self._queues = queues
        self._known: set[tuple[str, str]] = set()

    async def look(self) -> list[Finding]:
        """Return the present findings, and log new and ended ones.

        Returns nothing if the management API does not answer.
        """
        try:
            facts = await self._facts()
        except BrokerUnavailable as error:
            _log.debug("policies can't be looked at", extra={"error": error.detail})
            return []
        findings = queue_findings(facts)
        found = {(one.code, one.found): one for one in findings}
        for key in found.keys() - self._known:
            one = found[key]
            _log.warning(
                "a policy of RabbitMQ endangers messages",
                extra={"code": one.code, "found": one.found, "why": one.why, "mend": one.command},
            )
        for code, what in self._known - found.keys():
            _log.info("a policy of RabbitMQ no longer endangers messages", extra={"code": code, "found": what})
        self._known = set(found)
        return findings

    async def _facts(self) -> Facts:
        overview = await self._management.overview()
        return Facts(
            vhost=self._vhost,
            user="",
            version=tuple(int(part) for part in re.findall(r"\d+", str(overview.get("rabbitmq_version")))[:3]),
            queues=tuple(map(own_queue, self._queues())),
            policies=broker_policies(await self._management.policies()),
            operator_policies=broker_policies(await self._management.operator_policies()),
        )
