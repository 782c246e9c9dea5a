"""Receipt handles: how a client may alter one, and what it then names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.names import CopyId, GroupName, LeaseId, QueueId, TopicName
from popgate.domain.receipt import RECEIPT_LENGTH_MAX, Receipt, ReceiptSigner

SIGNER = ReceiptSigner(b"a secret of many bytes")
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
RECEIPTS = st.builds(
    Receipt,
    queue=st.builds(QueueId, NAMES.map(TopicName), NAMES.map(GroupName), st.integers(0, 255)),
    lease_id=st.from_regex(r"[0-9a-f]{1,24}", fullmatch=True).map(LeaseId),
    epoch=st.integers(0, 2**62),
    copy_id=st.text(min_size=1, max_size=100).map(CopyId),
)
EXAMPLE = Receipt(QueueId(TopicName("orders"), GroupName("billing"), 3), LeaseId("ab12"), 7, CopyId("0" * 32))


@given(RECEIPTS)
def test_a_handle_names_the_lease_it_was_made_for(receipt: Receipt) -> None:
    assert SIGNER.verify(SIGNER.sign(receipt)) == receipt


@given(st.text(max_size=300))
def test_an_arbitrary_text_is_no_handle(text: str) -> None:
    assert SIGNER.verify(text) is None


@given(st.data())
def test_a_handle_with_one_character_changed_is_no_handle(data: st.DataObject) -> None:
    handle = SIGNER.sign(EXAMPLE)
    position = data.draw(st.integers(0, len(handle) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda character: character != handle[position]))
    assert SIGNER.verify(handle[:position] + other + handle[position + 1 :]) is None


def test_a_truncated_or_lengthened_handle_is_no_handle() -> None:
    handle = SIGNER.sign(EXAMPLE)
    assert all(SIGNER.verify(handle[:length]) is None for length in range(len(handle)))
    assert all(SIGNER.verify(handle + extra) is None for extra in ("A", "=", "==", "!", "\n", " "))


def test_a_handle_of_another_secret_is_forged() -> None:
    assert ReceiptSigner(b"another secret of many bytes").verify(SIGNER.sign(EXAMPLE)) is None


def test_an_endless_handle_is_refused_unread() -> None:
    assert SIGNER.verify("A" * (RECEIPT_LENGTH_MAX + 1)) is None


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        ReceiptSigner(b"short")
