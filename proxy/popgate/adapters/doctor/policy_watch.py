"""Checks, while popgate runs, whether RabbitMQ's policies endanger messages in popgate's queues.

AMQP does not show policies, so this module uses the management API, and reports nothing if the API does not answer. It
applies the rules of ``popgate doctor`` that concern policies. The doctor checks more than policies.
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
    """Checks the policies of one virtual host.

    ``queues`` returns the names of popgate's present queues. Each finding is logged when a check first reports it, and
    when a check no longer reports it.
    """

    def __init__(self, management: Management, vhost: str, queues: Callable[[], Iterable[BrokerQueue]]) -> None:
        self._management = management
        self._vhost = vhost
        self._queues = queues
        self._known: set[tuple[str, str]] = set()

    async def look(self) -> list[Finding]:
        """Check the policies once, and return the present findings. Log which findings are new and which have ended.

        Return an empty list if the management API does not answer.
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
