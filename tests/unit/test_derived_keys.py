"""HKDF-SHA256 against the test vectors of RFC 5869, and the keys that popgate derives with it."""

import pytest

from popgate.domain.derived_keys import KEY_ID_BYTES, LENGTH_MAX, derived_key, expand, extract, key_id

SECRET = b"sixteen bytes or more"


@pytest.mark.parametrize(
    ("secret", "salt", "info", "length", "pseudorandom_key", "key"),
    [
        pytest.param(
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            42,
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
            id="A.1",
        ),
        pytest.param(
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            82,
            "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09da3275600c2f"
            "09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
            id="A.2",
        ),
        pytest.param(
            b"\x0b" * 22,
            b"",
            b"",
            42,
            "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
            id="A.3",
        ),
    ],
)
def test_it_is_the_hkdf_of_the_rfc(
    secret: bytes, salt: bytes, info: bytes, length: int, pseudorandom_key: str, key: str
) -> None:
    assert extract(salt, secret).hex() == pseudorandom_key
    assert expand(extract(salt, secret), info, length).hex() == key


def test_each_purpose_and_each_secret_has_its_own_key() -> None:
    keys = {derived_key(secret, purpose) for secret in (SECRET, SECRET + b"!") for purpose in ("one", "two")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}
    assert derived_key(SECRET, "one", 48)[:32] == derived_key(SECRET, "one")


def test_a_key_id_is_short_and_stays_the_same() -> None:
    assert len(key_id(SECRET)) == KEY_ID_BYTES
    assert key_id(SECRET).hex() == "06817371"


@pytest.mark.parametrize("length", [0, -1, LENGTH_MAX + 1])
def test_a_length_that_hkdf_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 8160 bytes"):
        derived_key(SECRET, "one", length)
