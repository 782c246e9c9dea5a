"""Identity tags: which are accepted, and which are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.identity import IdentityKeys
from popgate.domain.names import BrokerQueue, TopicName, bound_queue

SECRET = b"sixteen bytes or more"
KEYS = IdentityKeys([SECRET])
TOPIC, QUEUE = bound_queue(TopicName("orders"), 0), BrokerQueue("popgate:orders:billing:0")
COPY, OTHER_COPY = f"{7:032x}", f"{8:032x}"


@pytest.mark.parametrize("target", [TOPIC, QUEUE])
def test_what_popgate_signed_for_a_target_is_believed_there(target: BrokerQueue) -> None:
    assert KEYS.checker(TOPIC, QUEUE)(COPY, KEYS.signer(target)(COPY)) == ""


def test_a_tag_is_the_same_after_a_restart() -> None:
    """Messages outlive the process that published them: this text is on their queues."""
    assert KEYS.signer(QUEUE)(COPY) == "2:06817371:4059b5ae0d972d008f7d87118168642e"


def test_a_tag_of_version_1_is_believed_if_its_secret_is_known() -> None:
    tag = "1:713ec002:03025fa5a4735942f801174d2a5d3cc6"  # as the first popgate with tags wrote it
    assert KEYS.checker(TOPIC, QUEUE)(COPY, tag) == ""
    assert IdentityKeys([b"another secret of ours", SECRET]).checker(QUEUE)(COPY, tag) == ""
    assert "not the one" in KEYS.checker(TOPIC)(COPY, tag)
    assert "another secret" in IdentityKeys([b"another secret of ours"]).checker(QUEUE)(COPY, tag)


def test_a_tag_proves_nothing_for_another_copy_or_another_queue() -> None:
    tag = KEYS.signer(QUEUE)(COPY)
    assert "not the one" in KEYS.checker(TOPIC, QUEUE)(OTHER_COPY, tag)
    assert "not the one" in KEYS.checker(BrokerQueue("popgate:orders:billing:1"))(COPY, tag)
    assert "not the one" in KEYS.checker(BrokerQueue("popgate:orders:billing"))(":0" + COPY, tag)


def test_a_copy_id_without_a_tag_is_believed_only_while_that_is_asked_for() -> None:
    assert "--accept-untagged" in KEYS.checker(QUEUE)(COPY, None)
    accepting = IdentityKeys([SECRET], accepts_untagged=True)
    assert accepting.checker(QUEUE)(COPY, None) == ""
    assert "not the one" in accepting.checker(QUEUE)(COPY, KEYS.signer(TOPIC)(COPY))


def test_tags_of_another_secret_are_believed_only_if_it_is_one_of_several() -> None:
    tag = KEYS.signer(QUEUE)(COPY)
    assert "--secret-file" in IdentityKeys([b"another secret of ours"]).checker(QUEUE)(COPY, tag)
    changed = IdentityKeys([b"another secret of ours", SECRET])
    assert changed.checker(QUEUE)(COPY, tag) == ""
    assert changed.signer(QUEUE)(COPY) != tag


@given(st.text(max_size=80), st.text(max_size=60))
def test_no_text_is_a_tag_by_chance(copy_id: str, tag: str) -> None:
    assert KEYS.checker(TOPIC, QUEUE)(copy_id, tag)
    assert KEYS.checker(TOPIC, QUEUE)(COPY, KEYS.signer(QUEUE)(COPY)[:11] + tag)
