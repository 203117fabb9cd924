import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.shared.errors import LoraportError
from services.shared.names import (
    AdapterName,
    alias_name,
    is_id,
    parse_adapter,
    parse_alias,
    parse_owned,
    parse_revision,
    parse_tenant,
    revision_name,
    tenant_name,
)

ids = st.from_regex(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@given(ids, ids, ids, st.integers(1, 10**15))
def test_what_is_written_is_read_back(tenant: str, adapter: str, alias: str, version: int) -> None:
    name = AdapterName(tenant, adapter)
    assert parse_tenant(tenant_name(tenant)) == tenant
    assert parse_adapter(str(name)) == name
    assert parse_revision(revision_name(name, version)) == (name, version)
    assert parse_alias(alias_name(name, alias)) == (name, alias)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "A",
        "1a",
        "a_b",
        "-a",
        "a-",
        "a" * 64,
        "ä",
        "a\n",
        "../x",
        "/etc",
        "a/../../b",
        "..%2f",
        "a\0b",
        "a\\b",
        "a b",
    ],
)
def test_hostile_ids_are_refused(bad: str) -> None:
    assert not is_id(bad)
    for parse, name in (
        (parse_tenant, f"tenants/{bad}"),
        (parse_adapter, f"tenants/acme/adapters/{bad}"),
        (parse_alias, f"tenants/acme/adapters/bot/aliases/{bad}"),
    ):
        with pytest.raises(LoraportError) as caught:
            parse(name)
        assert caught.value.reason == "INVALID_NAME"


@pytest.mark.parametrize("version", ["", "1", "v0", "v01", "v-1", "v1.0", "V1", "v" + "9" * 17])
def test_versions_have_one_form(version: str) -> None:
    with pytest.raises(LoraportError):
        parse_revision(f"tenants/acme/adapters/bot/revisions/{version}")


@given(st.text(max_size=200))
def test_any_text_is_a_name_or_a_typed_refusal(text: str) -> None:
    for parse in (parse_tenant, parse_adapter, parse_revision, parse_alias, lambda name: parse_owned(name, "keys")):
        with contextlib.suppress(LoraportError):
            parse(text)
