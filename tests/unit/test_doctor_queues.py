"""The doctor's findings on queues and policies, and that its suggested policy repairs them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.adapters.rabbitmq.topology import DELIVERY_LIMIT_DEFAULT, DELIVERY_LIMIT_LOW, DELIVERY_LIMIT_UNREACHABLE
from popgate.adapters.rabbitmq.versions import DISCONNECTED_MILLISECONDS, DISCONNECTED_TIMEOUT
from popgate.doctor.examination import examine
from popgate.doctor.facts import BrokerPolicy, Facts, Owner, Queue, Version
from popgate.doctor.findings import Examination, Finding, SetPolicy, Severity
from popgate.doctor.limit_rules import DEFAULT_LIMIT, LOST_NODE, LOST_NODE_MS, LOW_LIMIT
from popgate.doctor.policies import UNREACHABLE_LIMIT, combined_limit

LIMIT = 2_000_000_000
V3, V40, V42, V43 = (3, 10, 8), (4, 0, 5), (4, 2, 0), (4, 3, 6)
OWN = "popgate:orders:billing:0"


def own(name: str = OWN, *, expected: bool = False, **arguments: object) -> Queue:
    """Return a queue as popgate declares it, except for the given arguments; underscores stand for dashes."""
    declared: dict[str, object] = {
        "x-single-active-consumer": True,
        "x-delivery-limit": LIMIT,
        "x-consumer-disconnected-timeout": 500,
    }
    given_arguments = {key.replace("_", "-"): value for key, value in arguments.items()}
    both = {key: value for key, value in {**declared, **given_arguments}.items() if value is not None}
    return Queue(name=name, owner=Owner.POPGATE, is_expected=expected, arguments=both)


def adopted(name: str = "orders.eu", kind: str = "quorum", **arguments: object) -> Queue:
    given_arguments = {key.replace("_", "-"): value for key, value in arguments.items()}
    return Queue(name=name, owner=Owner.ADOPTED, kind=kind, arguments=given_arguments)


def guard() -> Queue:
    return Queue(name="popgate:guard:0", owner=Owner.POPGATE, kind="classic", is_expected=True)


def level() -> Queue:
    return Queue(name="popgate:delay:3", owner=Owner.POPGATE, arguments={"x-overflow": "reject-publish"})


def policy(name: str, pattern: str = ".*", priority: int = 0, **definition: object) -> BrokerPolicy:
    keys = {key.replace("_", "-"): value for key, value in definition.items()}
    return BrokerPolicy(name=name, pattern=pattern, priority=priority, definition=keys, apply_to="queues")


def facts(
    version: Version,
    *queues: Queue,
    policies: Sequence[BrokerPolicy] | None = (),
    operator: Sequence[BrokerPolicy] | None = (),
) -> Facts:
    return Facts(
        vhost="/",
        user="popgate",
        version=version,
        queues=queues,
        policies=None if policies is None else tuple(policies),
        operator_policies=None if operator is None else tuple(operator),
    )


def told(version: Version, *queues: Queue, **policies: Sequence[BrokerPolicy] | None) -> list[Finding]:
    """Return the findings on queues, without the notes on versions."""
    said = examine(facts(version, *queues, **policies)).findings
    return [finding for finding in said if not finding.code.startswith("version-")]


def codes(found: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in found]


def written(finding: Finding) -> SetPolicy:
    assert isinstance(finding.fix, SetPolicy)
    assert finding.command == finding.fix.command
    return finding.fix


def after(before: Facts, fixes: Examination) -> Facts:
    """Return the facts after the fixes."""
    policies = {one.name: one for one in before.policies or ()}
    for fix in fixes.fixes:
        assert isinstance(fix, SetPolicy)
        assert not fix.is_operator
        assert fix.definition, "RabbitMQ refuses an empty policy"
        policies[fix.name] = BrokerPolicy(
            name=fix.name,
            pattern=fix.pattern,
            definition=fix.definition,
            priority=fix.priority,
            apply_to=fix.apply_to,
        )
    return replace(before, policies=tuple(policies.values()))


def test_the_rules_want_what_popgate_declares() -> None:
    assert (DISCONNECTED_TIMEOUT.removeprefix("x-"), DISCONNECTED_MILLISECONDS) == (LOST_NODE, LOST_NODE_MS)
    assert (UNREACHABLE_LIMIT, LOW_LIMIT, DEFAULT_LIMIT) == (
        DELIVERY_LIMIT_UNREACHABLE,
        DELIVERY_LIMIT_LOW,
        DELIVERY_LIMIT_DEFAULT,
    )


# -- delivery limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "limits", "combined"),
    [
        (V3, (None, None), None),
        (V3, (5, None), 5),
        (V3, (5, 9), 5),
        (V3, (-1, 9), -1),
        (V40, (None, None), None),
        (V40, (5, 9), 5),
        (V40, (-1, 9), 9),
        (V40, (9, -1), 9),
        (V43, (-1, -5), -1),
    ],
)
def test_limits_of_several_sources_come_together_as_rabbitmq_has_it(
    version: Version, limits: tuple[int | None, int | None], combined: int | None
) -> None:
    assert combined_limit(version, *limits) == combined


@pytest.mark.parametrize(
    ("version", "argument", "code"),
    [
        (V3, LIMIT, None),
        (V3, None, "delivery-limit-missing"),
        (V3, 20, "delivery-limit-low"),
        (V3, -1, "delivery-limit-low"),
        (V40, LIMIT, None),
        (V40, None, "delivery-limit-low"),
        (V40, 20, "delivery-limit-low"),
        (V40, -1, "delivery-limit-missing"),
        (V42, -1, "delivery-limit-missing"),
        (V43, -1, None),
        (V43, None, "delivery-limit-low"),
        (V43, 1_000_000, None),
    ],
)
def test_a_delivery_limit_is_judged_by_the_version(version: Version, argument: int | None, code: str | None) -> None:
    found = told(version, own(x_delivery_limit=argument))
    assert codes(found) == ([] if code is None else [code])


@pytest.mark.parametrize(("version", "argument"), [(V3, None), (V40, None), (V40, -1), (V43, None)])
def test_a_policy_mends_a_limit_that_it_can_raise(version: Version, argument: int | None) -> None:
    (found,) = told(version, own(x_delivery_limit=argument))
    assert written(found) == SetPolicy(
        vhost="/", name="popgate", pattern="^popgate:", definition={"delivery-limit": LIMIT}, priority=1
    )
    assert found.severity is Severity.WARNING
    assert found.queues == (OWN,)


@pytest.mark.parametrize(("version", "argument"), [(V3, 20), (V3, -1), (V40, 20), (V43, 0)])
def test_no_policy_is_offered_where_the_argument_can_not_be_raised(version: Version, argument: int) -> None:
    (found,) = told(version, own(x_delivery_limit=argument))
    assert (found.fix, found.severity) == (None, Severity.ERROR)
    assert "no policy can raise" in found.found
    assert found.command.startswith("delete the queue")


def test_the_policy_that_lowers_a_limit_is_copied_and_raised() -> None:
    low = policy("ha", "^orders", 5, delivery_limit=10, max_length=9)
    first, note = told(V3, adopted(x_delivery_limit=LIMIT), policies=[low])
    assert (first.code, first.severity, note.code) == ("delivery-limit-low", Severity.ERROR, "policy-limits-adopted")
    assert written(first) == SetPolicy(
        vhost="/",
        name="popgate-orders.eu",
        pattern=r"^orders\.eu$",
        definition={"delivery-limit": LIMIT, "max-length": 9},
        priority=6,
    )


def test_a_limit_that_the_operator_lowers_is_the_operators_to_raise() -> None:
    (found,) = told(V40, adopted(), operator=[policy("op", delivery_limit=3)])
    assert found.fix is None
    assert found.command.startswith("rabbitmqctl set_operator_policy -p / --priority 1")


def test_queues_that_are_not_consumed_need_no_limit() -> None:
    slot = Queue(name="popgate:semaphore:s:1:slot", owner=Owner.POPGATE)
    assert told(V43, level(), slot, guard()) == []


def test_dead_letter_queues_need_one() -> None:
    dead = Queue(name="popgate:orders:billing:dead", owner=Owner.POPGATE)
    assert codes(told(V40, dead)) == ["delivery-limit-low"]


def test_classic_queues_need_none() -> None:
    assert told(V43, adopted(kind="classic")) == []


# -- timeouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "argument", "by_policy", "is_found"),
    [
        (V42, None, None, False),
        (V43, 500, None, False),
        (V43, None, None, True),
        (V43, 9_000, None, True),
        (V43, 9_000, 400, False),
        (V43, None, 6_000, True),
        (V43, 0, None, False),
    ],
)
def test_a_lost_node_is_waited_for_half_a_second_at_most(
    version: Version, argument: int | None, by_policy: int | None, *, is_found: bool
) -> None:
    policies = [] if by_policy is None else [policy("p", consumer_disconnected_timeout=by_policy)]
    found = told(version, own(x_consumer_disconnected_timeout=argument), policies=policies)
    assert codes(found) == (["lost-node-timeout"] if is_found else [])
    for one in found:
        assert written(one).definition == {"consumer-disconnected-timeout": 500}


def test_one_policy_mends_all_that_is_wrong_with_the_queues_under_it() -> None:
    queues = own(x_delivery_limit=None), own("popgate:orders:audit:0", x_consumer_disconnected_timeout=None)
    found = told(V43, *queues, guard(), policies=[policy("all", message_ttl=9, queue_leader_locator="balanced")])
    assert codes(found) == ["policy-drops-messages", "delivery-limit-low", "lost-node-timeout"]
    assert len({written(one).command for one in found}) == 1
    assert written(found[0]).definition == {
        "delivery-limit": LIMIT,
        "consumer-disconnected-timeout": 500,
        "queue-leader-locator": "balanced",
    }


@pytest.mark.parametrize(
    ("version", "queue", "is_found"),
    [
        (V40, own(), True),
        (V43, own(), False),
        (V43, adopted(kind="classic"), True),
        ((3, 11, 0), own(), False),
    ],
)
def test_a_short_consumer_timeout_of_a_queue_is_found_where_it_matters(
    version: Version, queue: Queue, *, is_found: bool
) -> None:
    found = told(version, queue, policies=[policy("p", consumer_timeout=60_000)])
    assert codes(found) == (["queue-consumer-timeout"] if is_found else [])
    if found:
        assert "consumer-timeout" not in written(found[0]).definition


def test_a_short_consumer_timeout_in_the_arguments_is_a_matter_of_popgates_setting() -> None:
    (found,) = told(V43, adopted(kind="classic", x_consumer_timeout=60_000))
    assert (found.fix, found.command) == (None, "popgate serve --consumer-timeout-seconds 60")


# -- policies that hurt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["max-length", "max-length-bytes", "message-ttl"])
def test_policies_that_drop_messages_of_popgates_are_errors(key: str) -> None:
    bad = BrokerPolicy(name="all", pattern=".*", definition={key: 9, "overflow": "drop-head"}, priority=2)
    (found,) = told(V43, own(expected=True), policies=[bad])
    assert (found.code, found.severity, found.queues) == ("policy-drops-messages", Severity.ERROR, ())
    assert written(found) == SetPolicy(
        vhost="/", name="popgate", pattern="^popgate:", definition={"delivery-limit": LIMIT}, priority=3
    )


def test_a_policy_that_ends_queues_spares_none_of_popgates() -> None:
    found = told(V43, own(expected=True), guard(), policies=[policy("all", expires=9)])
    assert codes(found) == ["policy-drops-messages", "policy-expires"]
    results = written(found[1])
    assert (results.name, results.pattern) == ("popgate-exclusive", "^popgate:(guard|consumer|presence|unfenced)[:#-]")
    assert results.definition == {"queue-mode": "default"}, "delivery-limit would keep it from classic queues"


@pytest.mark.parametrize(("overflow", "is_found"), [("drop-head", True), ("reject-publish", False)])
def test_a_policys_overflow_endangers_delayed_messages(overflow: str, *, is_found: bool) -> None:
    found = told(V43, own(), level(), policies=[policy("all", overflow=overflow)])
    assert codes(found) == (["policy-overflow"] if is_found else [])


def test_dead_lettering_by_a_policy_is_found_where_arguments_do_not_count_before_it() -> None:
    found = told(V43, own(), level(), policies=[policy("all", dead_letter_exchange="x", dead_letter_strategy="y")])
    assert (codes(found), found[0].queues) == (["policy-dead-letters"], (OWN,))
    assert written(found[0]).definition == {"delivery-limit": LIMIT}


def test_a_delayed_retry_is_left_out_and_switched_off_where_the_argument_says_it() -> None:
    by_policy = policy("retry", delayed_retry_type="all", delayed_retry_min=5)
    (found,) = told(V43, own(), policies=[by_policy])
    assert (found.code, written(found).definition) == ("policy-delayed-retry", {"delivery-limit": LIMIT})
    delayed = adopted(x_delayed_retry_type="failed", x_delivery_limit=LIMIT, x_consumer_disconnected_timeout=1)
    (found,) = told(V43, delayed)
    assert written(found).definition == {"delayed-retry-type": "disabled"}
    disabled = replace(delayed, arguments={**delayed.arguments, "x-delayed-retry-type": "disabled"})
    assert told(V43, disabled) == []


def test_what_an_operator_policy_does_is_named_with_the_operators_command() -> None:
    (found,) = told(V43, own(), operator=[policy("op", "^popgate:", 4, message_ttl=9, max_length=8)])
    assert (found.code, found.fix) == ("policy-drops-messages", None)
    assert "the operator policy 'op' sets max-length 8 and message-ttl 9" in found.found
    definition = f'{{"delivery-limit":{LIMIT}}}'
    expected = f"rabbitmqctl set_operator_policy -p / --priority 4 --apply-to queues op '^popgate:' '{definition}'"
    assert found.command == expected


def test_limits_of_adopted_queues_are_notes_and_their_end_is_a_warning() -> None:
    queue = adopted(kind="classic")
    found = told(V43, queue, policies=[policy("orders", "^orders", 1, message_ttl=9, expires=8)])
    assert [(one.code, one.severity) for one in found] == [
        ("policy-expires", Severity.WARNING),
        ("policy-limits-adopted", Severity.INFO),
    ]
    assert written(found[0]).definition == {"message-ttl": 9}
    assert found[1].fix is None


def test_a_policy_of_popgates_own_is_changed_itself() -> None:
    mine = policy("mine", "^popgate:orders:", 7, message_ttl=9, queue_leader_locator="balanced")
    (found,) = told(V43, own(), own("popgate:topic:group:0", expected=True), policies=[mine])
    assert written(found) == SetPolicy(
        vhost="/",
        name="mine",
        pattern="^popgate:orders:",
        definition={"queue-leader-locator": "balanced"},
        priority=7,
    )


def test_a_policy_for_some_names_is_replaced_for_popgates_of_them_only() -> None:
    some = policy("some", "orders", 7, message_ttl=9)
    (found,) = told(V43, own(), own("popgate:topic:group:0", expected=True), policies=[some])
    results = written(found)
    assert (results.name, results.priority) == ("popgate-some", 8)
    assert results.pattern == "^(?=popgate:)(?=(?:orders)|.*(?:orders))"


def test_a_policy_for_queues_without_one_hides_none_of_the_others() -> None:
    other = policy("other", "billing", -3, queue_leader_locator="balanced")
    (found,) = told(V40, own(), own("popgate:topic:group:0", x_delivery_limit=None), policies=[other])
    assert (written(found).pattern, written(found).priority) == ("^popgate:", -4)


def test_the_name_of_a_policy_that_exists_is_not_taken() -> None:
    used = policy("popgate", "^elsewhere", message_ttl=9)
    (found,) = told(V40, own(x_delivery_limit=None), policies=[used])
    assert written(found).name == "popgate-2"


def test_policies_that_do_not_apply_to_a_kind_of_queue_hurt_none() -> None:
    mirrored = policy("ha", ha_mode="all", message_ttl=9)
    streams = BrokerPolicy(name="s", pattern=".*", definition={"message-ttl": 9}, apply_to="streams")
    unknown = policy("erlang", r"\R(?|a)(*FAIL)[", message_ttl=9)
    assert told(V3, own(), policies=[mirrored, streams, unknown]) == []


def test_where_policies_are_not_seen_a_command_is_told_and_nothing_is_done() -> None:
    (found,) = told(V40, own(x_delivery_limit=None), policies=None, operator=None)
    assert found.fix is None
    assert "if a policy applies already" in found.command


def test_queues_that_can_not_be_adopted_are_named() -> None:
    missing = Queue(name="gone", owner=Owner.ADOPTED, exists=False)
    assert codes(told(V43, missing, adopted("log", "stream"))) == ["queue-is-stream", "queue-missing"]


# -- all of it together ------------------------------------------------------------------------------------------------

DEFINITIONS = st.fixed_dictionaries(
    {},
    optional={
        "delivery-limit": st.sampled_from([-1, 5, LIMIT]),
        "message-ttl": st.just(9),
        "expires": st.just(9),
        "overflow": st.sampled_from(["drop-head", "reject-publish"]),
        "dead-letter-exchange": st.just("x"),
        "delayed-retry-type": st.sampled_from(["all", "disabled"]),
        "consumer-disconnected-timeout": st.sampled_from([1, 60_000]),
        "queue-leader-locator": st.just("balanced"),
        "ha-mode": st.just("all"),
    },
).filter(bool)
PATTERNS = st.sampled_from([".*", "", "orders", "^orders", "^popgate:", "^popgate:orders", ":0$", "^(x|popgate:topic)"])


@st.composite
def policies_of_one_kind(draw: st.DrawFn) -> list[BrokerPolicy]:
    """Return policies with priorities so far apart that none comes between."""
    patterns = draw(st.lists(PATTERNS, max_size=3))
    return [
        BrokerPolicy(
            name=f"p{at}", pattern=pattern, priority=at * 10, definition=draw(DEFINITIONS), apply_to=draw(KINDS)
        )
        for at, pattern in enumerate(patterns)
    ]


KINDS = st.sampled_from(["all", "queues"])
LIMITS = st.sampled_from([None, -1, 5, LIMIT])


@given(
    version=st.sampled_from([V3, V40, V42, V43]),
    policies=policies_of_one_kind(),
    limits=st.tuples(LIMITS, LIMITS, LIMITS),
    timeout=st.sampled_from([None, 500]),
)
def test_what_is_mended_stays_mended_and_nothing_new_is_wrong(
    version: Version,
    policies: list[BrokerPolicy],
    limits: tuple[int | None, int | None, int | None],
    timeout: int | None,
) -> None:
    before = facts(
        version,
        own("popgate:topic:group:0", expected=True),
        own(x_delivery_limit=limits[0], x_consumer_disconnected_timeout=timeout),
        own("popgate:other:g:1", x_delivery_limit=limits[1]),
        adopted(x_delivery_limit=limits[2]),
        adopted("letters", kind="classic"),
        level(),
        guard(),
        policies=policies,
    )
    first = examine(before)
    again, known = first, before
    for _ in range(3):  # a policy that hides another one may be changed so that it no longer does
        known = after(known, again)
        again = examine(known)
    assert not again.fixes
    left = {(one.code, one.queues) for one in again.to_fix}
    assert left == {(one.code, one.queues) for one in first.to_fix if one.fix is None}
