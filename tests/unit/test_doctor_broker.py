"""The doctor's findings on the broker as a whole, permissions, clocks and Redis; and how it reads its input."""

from collections.abc import Mapping

import pytest

from popgate.adapters.doctor.broker_api import (
    auto_delete_exchanges,
    disabled_flags,
    node_settings,
    permissions_of,
    skew_seconds,
)
from popgate.doctor.examination import examine
from popgate.doctor.facts import ClockSkew, Facts, MachineVersion, Owner, Permissions, Queue, RedisFacts, Refusal
from popgate.doctor.findings import Finding, SetPermissions, SetRedis, Severity

V43 = (4, 3, 6)
CLASSIC = Queue(name="orders", owner=Owner.ADOPTED, kind="classic")
ALL = Permissions(configure=".*", write=".*", read=".*")
GOOD_REDIS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
    "cluster-enabled": "no",
}


def said(**facts: object) -> list[Finding]:
    given: dict[str, object] = {"vhost": "/", "user": "popgate", "version": V43, **facts}
    return list(examine(Facts(**given)).findings)  # type: ignore[arg-type]  # the test names the fields


def severities(found: list[Finding]) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in found}


# -- the broker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "codes"),
    [
        ((3, 9, 29), {"version-too-old": Severity.ERROR, "version-dead-lettering": Severity.INFO}),
        ((3, 13, 7), {"version-unsupported": Severity.INFO, "version-dead-lettering": Severity.INFO}),
        ((4, 0, 5), {"version-unsupported": Severity.INFO, "version-dead-lettering": Severity.INFO}),
        ((4, 1, 0), {"version-dead-lettering": Severity.INFO}),
        ((4, 3, 2), {"version-dead-lettering": Severity.INFO}),
        ((4, 3, 3), {}),
        ((4, 4, 0), {}),
        ((), {}),
    ],
)
def test_versions_are_judged(version: tuple[int, ...], codes: Mapping[str, Severity]) -> None:
    assert severities(said(version=version)) == codes


def test_flags_that_are_not_enabled_are_named_and_never_enabled_by_the_doctor() -> None:
    (found,) = said(disabled_flags=("rabbitmq_4.0.0", "khepri_db"))
    assert (found.code, found.severity, found.fix) == ("feature-flags", Severity.WARNING, None)
    assert "rabbitmq_4.0.0, khepri_db" in found.found
    assert said(disabled_flags=()) == []


def test_exchanges_that_delete_themselves_are_a_danger_from_4_3_on() -> None:
    rows = [{"name": name, "auto_delete": name.startswith("t")} for name in ("t2", "", "amq.fanout", "t1")]
    exchanges = auto_delete_exchanges(rows)
    (found,) = said(auto_delete_exchanges=exchanges)
    assert (found.code, found.severity, found.fix) == ("auto-delete-exchanges", Severity.WARNING, None)
    assert found.found.endswith("auto-delete exchanges: t1, t2")
    assert "auto-delete-exchanges" not in severities(said(auto_delete_exchanges=exchanges, version=(4, 2, 9)))
    assert said(auto_delete_exchanges=()) == []


@pytest.mark.parametrize(
    ("version", "running", "newest", "severity"),
    [
        ((4, 2, 9), 3, 7, Severity.ERROR),
        ((4, 3, 6), 7, 8, Severity.WARNING),
        ((3, 13, 7), 2, 3, Severity.WARNING),
        ((4, 3, 6), 8, 8, None),
    ],
)
def test_a_queue_left_on_an_old_state_machine_is_found(
    version: tuple[int, ...], running: int, newest: int, severity: Severity | None
) -> None:
    machines = tuple(MachineVersion(queue=name, running=running, newest=newest) for name in ("it's", "b"))
    found = [one for one in said(version=version, machine_versions=machines) if one.code == "quorum-machine-old"]
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    for one in found:
        assert one.queues == ("it's", "b")
        assert one.command.startswith("""rabbitmq-queues quorum_status --vhost / 'it'"'"'s'""")


@pytest.mark.parametrize(
    ("version", "milliseconds", "queue", "is_found"),
    [
        ((4, 2, 0), 60_000, None, True),
        ((4, 2, 0), 1_800_000, None, False),
        ((4, 2, 0), 86_400_000, None, False),
        ((4, 2, 0), 0, None, False),
        ((4, 2, 0), None, None, False),
        ((4, 3, 6), 60_000, None, False),
        ((4, 3, 6), 60_000, CLASSIC, True),
    ],
)
def test_a_consumer_timeout_that_popgate_does_not_know_of_is_found_where_it_matters(
    version: tuple[int, ...], milliseconds: int | None, queue: Queue | None, *, is_found: bool
) -> None:
    queues = () if queue is None else (queue,)
    found = severities(said(version=version, broker_consumer_timeout_ms=milliseconds, queues=queues))
    assert ("consumer-timeout" in found) is is_found


def test_popgates_exclusive_queues_do_not_make_the_consumer_timeout_matter() -> None:
    guard = Queue(name="popgate:guard:0", owner=Owner.POPGATE, kind="classic", is_expected=True)
    assert said(broker_consumer_timeout_ms=60_000, queues=(guard,)) == []


@pytest.mark.parametrize(
    ("reconciles", "has_keeper", "severity"),
    [(True, True, Severity.WARNING), (True, False, Severity.INFO), (False, True, None), (None, True, None)],
)
def test_two_keepers_of_the_same_queues_are_one_too_many(
    *, reconciles: bool | None, has_keeper: bool, severity: Severity | None
) -> None:
    found = said(reconciles_membership=reconciles, has_keeper=has_keeper)
    assert severities(found) == ({} if severity is None else {"membership-reconciliation": severity})


@pytest.mark.parametrize(("seconds", "words"), [(3.1, "ahead of"), (-8.0, "behind"), (3.0, None), (-2.9, None)])
def test_clocks_may_differ_by_three_seconds(seconds: float, words: str | None) -> None:
    found = said(clocks=(ClockSkew(place="Redis", seconds=seconds),))
    assert severities(found) == ({} if words is None else {"clock-skew": Severity.WARNING})
    assert all(f"s {words} this machine's" in one.found for one in found)


@pytest.mark.parametrize(
    ("earliest", "latest", "skew"),
    [(100.2, 101.2, 0.0), (99.5, 100.1, 0.0), (110.0, 111.0, 9.0), (90.0, 91.0, -9.0), (101.0, 101.0, 0.0)],
)
def test_a_skew_is_what_the_time_of_asking_does_not_explain(earliest: float, latest: float, skew: float) -> None:
    assert skew_seconds(100.0, 101.0, earliest, latest) == pytest.approx(skew)


# -- permissions -------------------------------------------------------------------------------------------------------


def test_a_user_who_may_do_everything_lacks_nothing() -> None:
    assert said(permissions=ALL, queues=(CLASSIC,)) == []


def test_permissions_as_documented_are_enough() -> None:
    documented = Permissions(
        configure="^(popgate:.*|orders)$", write=r"^(popgate:.*|amq\.default)$", read="^(popgate:.*|orders)$"
    )
    assert said(permissions=documented, queues=(CLASSIC,)) == []


@pytest.mark.parametrize(
    ("present", "lacks", "wanted"),
    [
        (
            Permissions(configure="", write=".*", read=".*"),
            "configure on popgate:..., orders",
            Permissions(configure="^(popgate:.*|orders)$", write=".*", read=".*"),
        ),
        (
            Permissions(configure=".*", write="^popgate:", read=".*"),
            "write on amq.default",
            Permissions(configure=".*", write=r"^popgate:|^(popgate:.*|amq\.default)$", read=".*"),
        ),
        (
            Permissions(configure=".*", write=".*", read="^popgate:"),
            "read on orders",
            Permissions(configure=".*", write=".*", read="^popgate:|^(popgate:.*|orders)$"),
        ),
    ],
)
def test_permissions_that_are_missing_are_added_to_those_that_are_there(
    present: Permissions, lacks: str, wanted: Permissions
) -> None:
    (found,) = said(permissions=present, queues=(CLASSIC,), named=frozenset({CLASSIC.name}))
    assert (found.code, found.severity) == ("permissions", Severity.ERROR)
    assert found.found == f"the user 'popgate' may not {lacks}"
    assert found.fix == SetPermissions(vhost="/", user="popgate", permissions=wanted)
    (found,) = said(permissions=present, queues=(CLASSIC,))
    assert (found.fix is None) == ("orders" in lacks), "the catalog alone may name any queue"
    assert "set_permissions" in (found.command or "")
    assert said(permissions=wanted, queues=(CLASSIC,)) == []


def test_what_was_refused_is_told_though_permissions_can_not_be_seen() -> None:
    refusals = (Refusal(kind="write", name="amq.default"), Refusal(kind="configure", name="orders"))
    (found,) = said(refusals=refusals, queues=(CLASSIC,))
    assert found.found == "the user 'popgate' may not configure on orders; write on amq.default"
    assert found.fix is None
    assert found.command == (
        r"rabbitmqctl set_permissions -p / popgate '^(popgate:.*|orders)$' '^(popgate:.*|amq\.default)$' "
        "'^(popgate:.*|orders)$'  # this replaces what the user has now"
    )


def test_an_expression_that_only_erlang_understands_is_no_finding() -> None:
    assert said(permissions=Permissions(configure="(*FAIL)[", write=".*", read=".*")) == []


# -- Redis -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "code", "severity", "fix"),
    [
        ({}, None, None, None),
        ({"appendonly": "no"}, "redis-append-only", Severity.ERROR, SetRedis(name="appendonly", value="yes")),
        (
            {"appendfsync": "no"},
            "redis-append-sync",
            Severity.WARNING,
            SetRedis(name="appendfsync", value="always"),
        ),
        (
            {"appendfsync": "everysec"},
            "redis-append-sync",
            Severity.INFO,
            SetRedis(name="appendfsync", value="always"),
        ),
        (
            {"maxmemory-policy": "allkeys-lru"},
            "redis-eviction",
            Severity.ERROR,
            SetRedis(name="maxmemory-policy", value="noeviction"),
        ),
        ({"cluster-enabled": "yes"}, "redis-cluster", Severity.ERROR, None),
    ],
)
def test_settings_of_redis_that_put_records_at_risk_are_found(
    settings: Mapping[str, str], code: str | None, severity: Severity | None, fix: SetRedis | None
) -> None:
    found = said(redis=RedisFacts(place="here", version=(7, 0), settings={**GOOD_REDIS, **settings}))
    assert [(one.code, one.severity, one.fix) for one in found] == ([] if code is None else [(code, severity, fix)])


def test_an_old_redis_is_found() -> None:
    assert severities(said(redis=RedisFacts(place="here", version=(4, 0, 9), settings=GOOD_REDIS))) == {
        "redis-version": Severity.ERROR
    }


def test_notes_are_not_mended() -> None:
    redis = RedisFacts(place="here", version=(7, 0), settings={**GOOD_REDIS, "appendfsync": "everysec"})
    examination = examine(Facts(vhost="/", user="popgate", version=V43, redis=redis))
    assert (examination.to_fix, examination.fixes) == ((), ())


# -- reading -----------------------------------------------------------------------------------------------------------


def test_the_worst_comes_first() -> None:
    redis = RedisFacts(place="here", version=(7, 0), settings={**GOOD_REDIS, "appendonly": "no"})
    found = said(version=(4, 0, 5), redis=redis, disabled_flags=("x",))
    assert [one.severity for one in found] == [Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.INFO]


@pytest.mark.parametrize(
    ("text", "milliseconds", "reconciles"),
    [
        ("[{rabbit,[{consumer_timeout,1800000},\n {quorum_membership_reconciliation_enabled,true}]}]", 1_800_000, True),
        ("[{rabbit,[{consumer_timeout,undefined},{quorum_membership_reconciliation_enabled,false}]}]", 0, False),
        ("[{rabbit,[{dead_letter_worker_consumer_timeout,5}]}]", None, False),
    ],
)
def test_the_effective_configuration_is_read(text: str, milliseconds: int | None, *, reconciles: bool) -> None:
    settings = node_settings(text)
    assert (settings.consumer_timeout_ms, settings.reconciles_membership) == (milliseconds, reconciles)


def test_only_flags_that_the_next_release_may_need_count() -> None:
    rows = [
        {"name": "b", "state": "disabled", "stability": "stable"},
        {"name": "a", "state": "unavailable", "stability": "required"},
        {"name": "c", "state": "disabled", "stability": "experimental"},
        {"name": "d", "state": "enabled", "stability": "stable"},
    ]
    assert disabled_flags(rows) == ("a", "b")


def test_permissions_that_are_no_permissions_are_none() -> None:
    assert permissions_of(None) is None
    assert permissions_of({"configure": ".*"}) is None
    assert permissions_of({"configure": "", "write": ".*", "read": ".*"}) == Permissions(
        configure="", write=".*", read=".*"
    )
