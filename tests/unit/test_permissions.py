"""Permissions: patterns against a plain model, and what grants allow."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from popgate.domain.errors import Forbidden
from popgate.domain.permissions import SERVER, Action, Caller, Grant, Principal, Resource, matches, matches_any

names = st.text("ab.*", max_size=12)
patterns = st.text("ab.*", max_size=8)
pattern_lists = st.lists(patterns, max_size=3).map(tuple)
resources = st.builds(
    Resource,
    topic=st.none() | names,
    group=st.none() | names,
    lock=st.none() | names,
    queue=st.none() | names,
)
grants = st.builds(
    Grant,
    actions=st.frozensets(st.sampled_from(Action)),
    topics=pattern_lists | st.just(("*",)),
    groups=pattern_lists | st.just(("*",)),
    locks=pattern_lists | st.just(("*",)),
    queues=pattern_lists,
)


def model_matches(pattern: str, name: str) -> bool:
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(expression, name, re.DOTALL) is not None


def model_covers(grant: Grant, resource: Resource) -> bool:
    if resource == SERVER:
        return "*" in grant.topics and "*" in grant.groups
    kinds = zip(resource, (grant.topics, grant.groups, grant.locks, grant.queues), strict=True)
    return all(name is None or any(model_matches(one, name) for one in given) for name, given in kinds)


# ---------------------------------------------------------------- patterns


@given(patterns, names)
@example("a*a", "a")
@example("*ab*ab*", "ab")
@example("a*b*", "aab")
@example("**", "")
@example("", "")
def test_a_pattern_matches_as_in_the_model(pattern: str, name: str) -> None:
    assert matches(pattern, name) is model_matches(pattern, name)
    assert matches_any([pattern], name) is model_matches(pattern, name)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_only_a_star_is_special_in_a_pattern(before: str, after: str, between: str) -> None:
    assert matches(f"{before}*{after}", f"{before}{between}{after}")
    assert matches(before, before)
    assert matches(before, after) is model_matches(before, after)


@pytest.mark.parametrize("pattern", ["a?c", "[abc]", "a.c", "a\\*c", "A", "a|abc", "(?:abc)"])
def test_a_pattern_is_neither_a_glob_nor_a_regular_expression(pattern: str) -> None:
    assert not matches(pattern, "abc")
    assert not matches(pattern, "a")


def test_a_pattern_with_many_stars_takes_no_exponential_time() -> None:
    assert not matches("*a" * 100 + "*b", "a" * 250)


def test_no_pattern_matches_nothing() -> None:
    assert not matches_any([], "a")
    assert not matches_any([], "")


def test_all_names_are_matched_by_a_star_only() -> None:
    whole = Resource(topic="orders", group="*")
    assert Grant(actions=frozenset({Action.ADMIN})).covers(whole)
    assert not Grant(actions=frozenset({Action.ADMIN}), groups=("a*",)).covers(whole)
    assert not Grant(actions=frozenset({Action.ADMIN}), groups=("billing",)).covers(whole)


# ---------------------------------------------------------------- grants


@given(grants, resources)
def test_a_grant_covers_what_all_its_patterns_match(grant: Grant, resource: Resource) -> None:
    assert grant.covers(resource) is model_covers(grant, resource)


@given(st.lists(grants, max_size=3).map(tuple), st.sampled_from(Action), resources)
def test_a_principal_may_do_what_one_grant_allows_and_nothing_else(
    given_grants: tuple[Grant, ...], action: Action, resource: Resource
) -> None:
    principal = Principal(name="app", grants=given_grants)
    allowed = any(
        model_covers(grant, resource)
        and (action in grant.actions or (action is Action.INSPECT and Action.ADMIN in grant.actions))
        for grant in given_grants
    )
    assert principal.may(action, resource) is allowed
    assert principal.may_any([action], resource) is allowed
    caller = Caller(principal=principal, credential="k")
    if allowed:
        caller.require(action, resource)
    else:
        with pytest.raises(Forbidden) as raised:
            caller.require(action, resource)
        assert raised.value.action == action.value
        assert repr(action.value) in raised.value.detail


@given(grants, grants, st.sampled_from(Action), resources)
def test_another_grant_never_takes_a_permission_away(
    one: Grant, other: Grant, action: Action, resource: Resource
) -> None:
    if Principal(name="app", grants=(one,)).may(action, resource):
        assert Principal(name="app", grants=(other, one)).may(action, resource)


@pytest.mark.parametrize("action", Action)
def test_without_grants_everything_is_refused(action: Action) -> None:
    for resource in (SERVER, Resource(topic="a"), Resource(lock="a"), Resource(topic="", group="")):
        assert not Principal(name="app").may(action, resource)


def test_the_server_needs_a_grant_on_all_topics_and_groups() -> None:
    for restricted in ({"topics": ("a*",)}, {"groups": ("a",)}, {"topics": ()}):
        assert not Grant(actions=frozenset({Action.METRICS}), **restricted).covers(SERVER)
    assert Grant(actions=frozenset({Action.METRICS}), topics=("a", "*"), locks=()).covers(SERVER)


def test_a_queue_of_the_broker_needs_a_pattern_of_its_own() -> None:
    resource = Resource(topic="a", queue="legacy")
    assert not Grant(actions=frozenset(Action)).covers(resource)
    assert Grant(actions=frozenset(Action), queues=("leg*",)).covers(resource)


def test_a_refusal_names_the_resource_as_asked_and_the_server_as_such() -> None:
    caller = Caller(principal=Principal(name="app"), credential="k")
    with pytest.raises(Forbidden, match="app has no permission 'consume' on topic a group b; an administrator"):
        caller.require(Action.CONSUME, Resource(topic="a", group="b"))
    with pytest.raises(Forbidden, match="'metrics' on the server"):
        caller.require(Action.METRICS, SERVER)
