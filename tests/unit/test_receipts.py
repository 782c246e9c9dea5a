"""Receipt handles: how a client may alter one, and what it then names."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain import receipt
from popgate.domain.derived_keys import key_id
from popgate.domain.names import CopyId, GroupName, LeaseId, QueueId, TopicName
from popgate.domain.receipt import RECEIPT_LENGTH_MAX, Receipt, ReceiptSigner

SECRET, OTHER = b"a secret of many bytes", b"another secret of many bytes"
SIGNER = ReceiptSigner([SECRET])
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
def test_a_handle_names_the_lease_it_was_made_for(lease: Receipt) -> None:
    handle = SIGNER.sign(lease)
    assert SIGNER.verify(handle) == lease  # remembered
    assert SIGNER.verify(handle) == lease  # read


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
    assert all(SIGNER.verify(handle + extra) is None for extra in ("A", "=", "==", "====", "!", "\n", " "))


def test_a_handle_of_another_secret_is_forged() -> None:
    assert ReceiptSigner([OTHER]).verify(SIGNER.sign(EXAMPLE)) is None


def test_the_first_secret_signs_and_handles_of_all_are_valid() -> None:
    handle, promoted = SIGNER.sign(EXAMPLE), ReceiptSigner([OTHER, SECRET])
    assert promoted.verify(handle) == EXAMPLE
    assert promoted.verify(handle[:-1] + ("A" if handle[-1] != "A" else "B")) is None
    assert SIGNER.verify(promoted.sign(EXAMPLE)) is None
    assert ReceiptSigner([SECRET, OTHER]).verify(promoted.sign(EXAMPLE)) == EXAMPLE


def test_a_handle_says_which_secret_signed_it_but_nothing_of_the_secret() -> None:
    raw = urlsafe_b64decode(SIGNER.sign(EXAMPLE))
    assert raw.startswith(b"\x02" + key_id(SECRET))
    assert SECRET not in raw


def test_secrets_whose_key_ids_are_equal_by_chance_are_both_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(_: bytes) -> bytes:
        return b"same"

    monkeypatch.setattr(receipt, "key_id", same)
    first, second = ReceiptSigner([SECRET]), ReceiptSigner([OTHER])
    both = ReceiptSigner([SECRET, OTHER])
    assert both.verify(first.sign(EXAMPLE)) == both.verify(second.sign(EXAMPLE)) == EXAMPLE
    assert first.verify(second.sign(EXAMPLE)) is None


def test_a_handle_is_the_same_after_a_restart() -> None:
    """Leases outlive the process that granted them: clients hold this text."""
    assert ReceiptSigner([SECRET]).sign(EXAMPLE) == (
        "Av_fybbbmjyT0m9WzhJ3_LS8BjYDIG9yZGVyc3xiaWxsaW5nfDN8YWIxMnw3fDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAw"
    )


def test_a_handle_of_version_1_is_no_handle() -> None:
    tag = blake2b(b" ", key=blake2b(SECRET, digest_size=32, person=b"popgate-receipt").digest(), digest_size=16)
    assert SIGNER.verify(urlsafe_b64encode(b"\x01" + tag.digest() + b" ").decode()) is None


def test_an_endless_handle_is_refused_unread() -> None:
    assert SIGNER.verify("A" * (RECEIPT_LENGTH_MAX + 1)) is None


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        ReceiptSigner([SECRET, b"short"])
    with pytest.raises(ValueError, match="at least one secret"):
        ReceiptSigner([])
