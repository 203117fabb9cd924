import pytest

from loraport.cli.references import Reference, is_revision_id, parse_reference


@pytest.mark.parametrize(
    ("text", "tenant", "version", "expected"),
    [
        ("terse", "acme", None, Reference("acme", "terse", None)),
        ("acme/terse", None, None, Reference("acme", "terse", None)),
        ("acme/terse@v3", None, None, Reference("acme", "terse", 3)),
        ("terse@3", "acme", 3, Reference("acme", "terse", 3)),
        ("acme/terse", "acme", 2, Reference("acme", "terse", 2)),
        ("tenants/acme/adapters/terse", None, None, Reference("acme", "terse", None)),
        ("tenants/acme/adapters/terse/revisions/v7", None, None, Reference("acme", "terse", 7)),
    ],
)
def test_every_form_is_read(text: str, tenant: str | None, version: int | None, expected: Reference) -> None:
    assert parse_reference(text, tenant=tenant, version=version) == expected


@pytest.mark.parametrize(
    ("text", "tenant", "version"),
    [
        ("terse", None, None),
        ("acme/terse", "globex", None),
        ("acme/terse@v3", None, 2),
        ("acme/terse@v0", None, None),
        ("a/b/c", None, None),
        ("", "acme", None),
    ],
)
def test_what_names_nothing_is_wrong_use(text: str, tenant: str | None, version: int | None) -> None:
    with pytest.raises(Exception, match=r"names no|says|whose") as caught:
        parse_reference(text, tenant=tenant, version=version)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_only_a_full_digest_is_a_revision_id() -> None:
    assert is_revision_id("sha256:" + "a" * 64)
    assert not is_revision_id("sha256:" + "a" * 12)
    assert not is_revision_id("a" * 64)
