"""Rules about the whole broker: its version, feature flags, timeouts, replica keepers and clocks."""

import shlex
from collections import defaultdict
from collections.abc import Iterator

from popgate.doctor.facts import Facts, MachineVersion, Version
from popgate.doctor.findings import Finding, Severity

OLDEST, OLDEST_SUPPORTED = (3, 10), (4, 1)
"""The oldest version of RabbitMQ on which popgate runs, and the oldest version that had community support when this was
written (2026)."""
DEAD_LETTERING_FIXED = (4, 3, 3)
MACHINE_LOSES_UP_TO = 3
"""The newest version of the quorum queues' state machine with which a queue on RabbitMQ 4 may lose messages
(rabbitmq-server #17504)."""
AUTO_DELETE_BREAKS_FROM = (4, 3)
EXCHANGES_NAMED_MAX = 5
CLOCK_SKEW_SECONDS_MAX = 3.0


def broker_findings(facts: Facts) -> Iterator[Finding]:
    yield from _version(facts.version)
    yield from _flags(facts)
    yield from _auto_delete(facts)
    yield from _machines(facts)
    yield from _consumer_timeout(facts)
    yield from _reconciliation(facts)
    yield from _clocks(facts)


def shown_version(version: Version) -> str:
    return ".".join(map(str, version)) or "unknown"


def _version(version: Version) -> Iterator[Finding]:
    if not version:
        return
    if version < OLDEST:
        yield Finding(
            code="version-too-old",
            severity=Severity.ERROR,
            found=f"RabbitMQ {shown_version(version)} is older than {shown_version(OLDEST)}",
            why="popgate relies on features that it does not have",
            command="upgrade RabbitMQ",
        )
    elif version < OLDEST_SUPPORTED:
        yield Finding(
            code="version-unsupported",
            severity=Severity.INFO,
            found=f"RabbitMQ {shown_version(version)} no longer has community support",
            why="RabbitMQ's community no longer fixes its bugs; popgate is tested with it",
            command="upgrade RabbitMQ",
        )
    if version < DEAD_LETTERING_FIXED:
        yield Finding(
            code="version-dead-lettering",
            severity=Severity.INFO,
            found=f"at-least-once dead-lettering may stop in RabbitMQ before {shown_version(DEAD_LETTERING_FIXED)}",
            why=(
                "after repeated changes of a queue's members, delayed messages may stay in their delay queue "
                "(rabbitmq-server #16652)"
            ),
            command=f"upgrade RabbitMQ to {shown_version(DEAD_LETTERING_FIXED)} or newer",
        )


def _flags(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if stable feature flags are disabled.

    ``--fix`` does not enable the flags, because a flag can't be disabled again, and because one of the flags endangers
    queues with an old state machine.
    """
    if facts.disabled_flags:
        flags = ", ".join(facts.disabled_flags)
        yield Finding(
            code="feature-flags",
            severity=Severity.WARNING,
            found=f"stable feature flags are not enabled: {flags}",
            why=(
                "RabbitMQ's next release does not start without them; enable them when all nodes are upgraded and no "
                "finding quorum-machine-old remains (rabbitmq-server #17504)"
            ),
            command="rabbitmqctl enable_feature_flag all",
        )


def _auto_delete(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if there are auto-delete exchanges, and RabbitMQ's version may keep broken records of them.

    The rule is based on an experiment with RabbitMQ 4.3.6 (docs/rabbitmq.md, "A virtual host that is down").
    """
    exchanges = facts.auto_delete_exchanges
    if exchanges and facts.version >= AUTO_DELETE_BREAKS_FROM:
        more = ", ..." if len(exchanges) > EXCHANGES_NAMED_MAX else ""
        yield Finding(
            code="auto-delete-exchanges",
            severity=Severity.WARNING,
            found=f"there are auto-delete exchanges: {', '.join(exchanges[:EXCHANGES_NAMED_MAX])}{more}",
            why=(
                "if a queue is bound to such an exchange at the moment when its last binding is removed, RabbitMQ "
                "4.3 keeps a broken record of it, and can't start the virtual host again"
            ),
            command="declare them without auto_delete, under a new name",
        )


def _machines(facts: Facts) -> Iterator[Finding]:
    behind: defaultdict[tuple[int, int], list[MachineVersion]] = defaultdict(list)
    for machine in facts.machine_versions or ():
        if machine.running < machine.newest:
            behind[machine.running, machine.newest].append(machine)
    for (running, newest), machines in sorted(behind.items()):
        loses = facts.version >= (4,) and running <= MACHINE_LOSES_UP_TO
        queue = shlex.join(["rabbitmq-queues", "quorum_status", "--vhost", facts.vhost, machines[0].queue])
        yield Finding(
            code="quorum-machine-old",
            severity=Severity.ERROR if loses else Severity.WARNING,
            found=f"queues run version {running} of the quorum queues' state machine, but RabbitMQ has {newest}",
            why=(
                "they may discard confirmed messages, and break permanently (rabbitmq-server #17504)"
                if loses
                else "they still behave as in the release before the upgrade, which popgate does not expect"
            ),
            command=f"{queue}  # start every member that is down",
            queues=tuple(machine.queue for machine in machines),
        )


def _consumer_timeout(facts: Facts) -> Iterator[Finding]:
    milliseconds = facts.broker_consumer_timeout_ms
    quorum_only = all(queue.kind == "quorum" or queue.is_exclusive for queue in facts.queues)
    if milliseconds is None or milliseconds <= 0 or (facts.version >= (4, 3) and quorum_only):
        return
    if milliseconds < facts.consumer_timeout_seconds * 1000:
        yield Finding(
            code="consumer-timeout",
            severity=Severity.WARNING,
            found=(
                f"RabbitMQ's consumer_timeout is {milliseconds / 1000:g} s, but popgate is configured for "
                f"{facts.consumer_timeout_seconds:g} s"
            ),
            why="RabbitMQ closes the channel while popgate still holds messages, and redelivers all of them",
            command=f"popgate serve --consumer-timeout-seconds {milliseconds / 1000:g}",
        )


def _reconciliation(facts: Facts) -> Iterator[Finding]:
    if facts.reconciles_membership:
        yield Finding(
            code="membership-reconciliation",
            severity=Severity.WARNING if facts.has_keeper else Severity.INFO,
            found="RabbitMQ's continuous membership reconciliation is on",
            why=(
                "popgate's replica keeper changes the members of the same queues"
                if facts.has_keeper
                else "popgate's replica keeper must not run beside it: both change the members of the same queues"
            ),
            command=(
                "quorum_queue.continuous_membership_reconciliation.enabled = false  # in rabbitmq.conf of every node, "
                "then restart; or run no replica keeper"
            ),
        )


def _clocks(facts: Facts) -> Iterator[Finding]:
    for clock in facts.clocks:
        if abs(clock.seconds) > CLOCK_SKEW_SECONDS_MAX:
            direction = "ahead of" if clock.seconds > 0 else "behind"
            yield Finding(
                code="clock-skew",
                severity=Severity.WARNING,
                found=f"the clock of {clock.place} is {abs(clock.seconds):.0f} s {direction} this machine's",
                why=(
                    "times in logs and in the journal don't match; leases and times to live are not affected, "
                    "because they use only the state store's clock"
                ),
                command="timedatectl set-ntp true  # on both machines",
            )
