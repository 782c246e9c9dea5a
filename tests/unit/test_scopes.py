"""Scopes of tokens, and the grants that they become."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.auth.key_file import GRANTS_BYTES_MAX
from popgate.auth.scopes import SCOPES_MAX, ScopeRules, TooManyScopes
from popgate.domain.permissions import (
    GRANTS_MAX,
    PATTERN_LENGTH_MAX,
    PATTERNS_MAX,
    SERVER,
    Action,
    Grant,
    Principal,
    Resource,
)

NAMES = ("orders", "orders.eu", "billing", "o*")
ACTIONS = {"read": {Action.CONSUME, Action.INSPECT}, "write": {Action.PUBLISH}, "configure": {Action.CREATE}}


def holder(claim: object, rules: ScopeRules | None = None) -> Principal:
    return Principal(name="someone", grants=(rules or ScopeRules()).grants(claim))


def permitted(claim: object, resource: Resource, rules: ScopeRules | None = None) -> set[Action]:
    principal = holder(claim, rules)
    return {action for action in Action if principal.may(action, resource)}


@pytest.mark.parametrize(
    ("scope", "resource", "actions"),
    [
        ("read:orders/billing", Resource("orders", "billing"), ACTIONS["read"]),
        ("read:orders/billing", Resource("orders"), ACTIONS["read"]),
        ("read:orders/billing", Resource("orders", "*"), set[Action]()),
        ("read:orders/billing", Resource("orders", "audit"), set[Action]()),
        ("read:orders.*/*", Resource("orders.eu", "any"), ACTIONS["read"]),
        ("read:*/*/*", Resource("any", "any"), ACTIONS["read"]),
        ("write:orders", Resource("orders"), ACTIONS["write"]),
        ("write:orders/*", Resource("orders"), ACTIONS["write"]),
        ("write:orders/*/*", Resource("orders"), ACTIONS["write"]),
        ("configure:team.*/*", Resource("team.new", "group"), ACTIONS["configure"]),
        ("lock:daily-*", Resource(lock="daily-report"), {Action.LOCK}),
        ("lock:daily-*", Resource("daily-report"), set[Action]()),
        ("tag:administrator", Resource("any", "any", "any", "any"), set(Action)),
        ("tag:administrator", SERVER, set(Action)),
        ("tag:monitoring", SERVER, {Action.METRICS, Action.INSPECT}),
        ("tag:monitoring", Resource("any", "any"), {Action.METRICS, Action.INSPECT}),
        ("tag:monitoring", Resource(queue="any"), set[Action]()),
        ("tag:management", Resource("any", "any"), set[Action]()),
        ("tag:policymaker", Resource("any", "any"), set[Action]()),
    ],
)
def test_a_scope_permits_what_the_table_says(scope: str, resource: Resource, actions: set[Action]) -> None:
    assert permitted(scope, resource) == actions


@pytest.mark.parametrize("scope", ["read:*/*", "write:*", "configure:*/*"])
def test_a_scope_for_topics_permits_nothing_on_locks(scope: str) -> None:
    assert permitted(scope, Resource(lock="any")) == set()
    assert permitted(scope, Resource(queue="any")) == set()


@pytest.mark.parametrize(
    "scope",
    [
        "",
        "openid",
        "read",
        "read:",
        "read:orders",
        "read:orders/",
        "read:/billing",
        "read:orders/billing/eu",
        "read:orders/billing/*/*",
        "write:",
        "write:orders/eu",
        "write:orders/*/eu",
        "write:orders/*/*/*",
        "write:orders/",
        "configure:orders",
        "lock:",
        "Read:orders/billing",
        "tag:",
        "tag:Administrator",
        "tag:administrator/*",
        "tag:administrator:",
        "administrator",
        "read:%2A/%2a",
        "read:%/x",
        "read:%zz/x",
        "read:%ff/x",
        "read:%20/x",
        "read:orders\x00/x",
        "read:\u2028/x",
        "read:\ud800/x",
        f"read:{'x' * (PATTERN_LENGTH_MAX + 1)}/x",
    ],
)
def test_other_scopes_grant_nothing(scope: str) -> None:
    assert ScopeRules().grants(scope) == ()
    assert ScopeRules().grants([scope]) == ()


@pytest.mark.parametrize("claim", [None, 7, True, {}, {"read:*/*": 1}, [None, 7, ["read:*/*"], {}], b"read:*/*"])
def test_a_claim_of_another_type_grants_nothing(claim: object) -> None:
    assert ScopeRules().grants(claim) == ()


def test_escapes_are_decoded_after_the_parts_are_split() -> None:
    (grant,) = ScopeRules().grants("read:a%2Fb/%6frders")
    assert (grant.topics, grant.groups) == (("a/b",), ("orders",))


def test_an_entry_of_a_list_is_one_scope() -> None:
    assert permitted(["read:a/a", "write:b"], Resource("b")) == ACTIONS["write"]
    assert ScopeRules().grants(["team tag:administrator", "x read:*/*"]) == ()


def test_scopes_without_the_prefix_are_ignored() -> None:
    rules = ScopeRules(prefix="popgate.")
    claim = "read:*/* tag:administrator rabbitmq.write:* popgate.read:orders/billing"
    assert rules.grants(claim) == ScopeRules().grants("read:orders/billing")


def test_an_alias_stands_for_its_scopes() -> None:
    aliases = [("orders-team", ("read:orders/*", "popgate.write:orders", "other")), ("other", ("tag:administrator",))]
    rules = ScopeRules(prefix="popgate.", aliases=aliases)
    assert rules.grants(["orders-team"]) == ScopeRules().grants("read:orders/* write:orders")
    assert rules.grants("popgate.orders-team") == ()
    assert permitted("other", SERVER, rules) == set(Action)


def test_an_alias_replaces_the_scope_of_the_same_name() -> None:
    rules = ScopeRules(aliases=[("write:packages", ("read:packages/one",))])
    assert permitted("write:packages", Resource("packages")) == ACTIONS["write"]
    assert permitted("write:packages", Resource("packages"), rules) == ACTIONS["read"]


def test_grants_of_several_tokens_share_their_patterns() -> None:
    scope = "read:orders.%2Feu/billing"
    (one,), (other,) = (ScopeRules().grants(claim) for claim in (scope, [scope]))
    assert one.topics == ("orders./eu",)
    assert one.topics[0] is other.topics[0], "thousands of tokens are remembered"
    assert one.groups[0] is other.groups[0]


def test_similar_scopes_become_one_grant() -> None:
    assert ScopeRules().grants("read:a/* write:a read:b/* write:b write:b lock:x lock:y") == (
        Grant(actions=frozenset(ACTIONS["read"] | ACTIONS["write"]), topics=("a", "b"), groups=("*",), locks=()),
        Grant(actions=frozenset({Action.LOCK}), topics=(), groups=(), locks=("x", "y")),
    )
    many = ScopeRules().grants(" ".join(f"write:t{number}" for number in range(PATTERNS_MAX + 1)))
    assert [len(grant.topics) for grant in many] == [PATTERNS_MAX, 1]


@pytest.mark.parametrize(
    "scopes",
    [
        [f"read:t{number}/g{number}" for number in range(GRANTS_MAX + 1)],
        [f"write:{number:0200}" for number in range(GRANTS_BYTES_MAX // 200 + 1)],
        ["tag:management"] * (SCOPES_MAX + 1),
    ],
)
def test_more_than_a_caller_may_have_is_refused(scopes: list[str]) -> None:
    with pytest.raises(TooManyScopes):
        ScopeRules().grants(scopes)
    with pytest.raises(TooManyScopes):
        ScopeRules(aliases=[("all", tuple(scopes))]).grants("all")
    assert ScopeRules(prefix="popgate.").grants(scopes) == ()


@given(
    st.lists(st.tuples(st.sampled_from([*ACTIONS]), st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=12),
    st.sampled_from(["orders", "orders.eu", "billing", "other"]),
    st.sampled_from(["orders", "orders.eu", "billing", "other"]),
)
def test_many_scopes_permit_what_each_of_them_permits(
    parts: list[tuple[str, str, str]], topic: str, group: str
) -> None:
    scopes = [f"{verb}:{first}/{'*' if verb == 'write' else second}" for verb, first, second in parts]
    alone: set[Action] = set()
    for scope in scopes:
        alone |= permitted(scope, Resource(topic, group))
    assert permitted(scopes, Resource(topic, group)) == alone
    assert permitted(" ".join(scopes), Resource(topic, group)) == alone


@given(st.text(max_size=40) | st.recursive(st.none() | st.text(), lambda inner: st.lists(inner, max_size=5)))
def test_any_claim_is_read_without_an_error(claim: object) -> None:
    for grant in ScopeRules().grants(claim):
        json.dumps([*grant.topics, *grant.groups, *grant.locks]).encode()


@given(st.sampled_from(["read", "write", "configure", "lock", "tag"]), st.text(max_size=30))
def test_no_scope_but_the_tag_makes_an_administrator(verb: str, rest: str) -> None:
    claim = [f"{verb}:{rest}"]
    is_tag = claim == ["tag:administrator"]
    assert (Action.ADMIN in permitted(claim, SERVER)) == is_tag
