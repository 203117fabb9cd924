"""The names of key/value blocks: one golden vector for router and executor, and no way to meet across identities."""

import pytest

from services.shared.prefix_hash import block_hash, prefix_chain, prefix_root

BASE = "sha256:" + "0" * 64
REVISION = "sha256:" + "1" * 64


def test_golden_vector() -> None:
    chain = prefix_chain(range(10), block_size=4, base_digest=BASE, revision_id=REVISION, salt=b"acme")
    assert [name.hex() for name in chain] == [
        "39d8d537b25de120becf2cb191e56b511aa63c7086f2b403efa3fd940323c251",
        "bdf1c8bc1c9301e62a9e5dd1f88219169aeed6b539c965a15919fbe3436f208a",
    ]
    root = prefix_root(base_digest=BASE, revision_id=None, salt=b"")
    assert root.hex() == "20767d9305382d57aa86b91f10152631cdc8341b9766e0d4379f1653b43c837c"


def test_base_adapter_and_salted_chains_share_no_name() -> None:
    seen = set()
    identities = [
        (BASE, None, b""),
        (BASE, REVISION, b""),
        (BASE, None, b"acme"),
        (REVISION, None, b""),
        (BASE, "", b""),
    ]
    for base, revision, salt in identities:
        chain = prefix_chain(range(64), block_size=16, base_digest=base, revision_id=revision, salt=salt)
        assert len(chain) == 4
        assert not seen.intersection(chain)
        seen.update(chain)


def test_fields_cannot_run_into_each_other() -> None:
    one = prefix_root(base_digest="ab", revision_id="c", salt=b"")
    other = prefix_root(base_digest="a", revision_id="bc", salt=b"")
    assert one != other


def test_a_chain_commits_to_all_tokens_before_it() -> None:
    one = prefix_chain([1, 2, 3, 4, 5, 6], block_size=2, base_digest=BASE, revision_id=None, salt=b"")
    other = prefix_chain([1, 9, 3, 4, 5, 6], block_size=2, base_digest=BASE, revision_id=None, salt=b"")
    assert not set(one) & set(other)
    assert prefix_chain([1, 2, 3], block_size=2, base_digest=BASE, revision_id=None, salt=b"") == one[:1]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        block_hash(b"short", [1])
    with pytest.raises(ValueError, match="token ids"):
        block_hash(b"0" * 32, [-1])
    with pytest.raises(ValueError, match="at least one token"):
        prefix_chain([1], block_size=0, base_digest=BASE, revision_id=None, salt=b"")
