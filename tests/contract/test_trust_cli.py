"""`loraport trust` against a real registry: shown, rotated, and signed by several holders."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loraport.bundle.envelope import SigningKey
from loraport.cli.main import run
from loraport.dev.layout import ENDPOINTS_SCHEMA
from tests.contract.registry_rig import LEAVES, serving, write_config
from tests.support.roots import ROOT_KEY

Cli = Callable[..., Awaitable[tuple[int, Any]]]


@pytest.fixture
async def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Cli]:
    """Runs a command and gives its exit code with its JSON, or the one line of its error."""
    async with serving(write_config(tmp_path)) as rig:
        ROOT_KEY.save(tmp_path / "trust" / "root.key")
        (tmp_path / "admin.pem").write_bytes(LEAVES["admin"].certificate)
        (tmp_path / "admin.key").write_bytes(LEAVES["admin"].key)
        endpoints = {
            "schema": ENDPOINTS_SCHEMA,
            **dict.fromkeys(("registry", "router_admin", "loader_upload"), rig.address),
            "credentials": {"ca": "ca.pem", "admin_certificate": "admin.pem", "admin_key": "admin.key"},
        }
        (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))

        async def call(*words: str) -> tuple[int, Any]:
            capsys.readouterr()
            code = await asyncio.to_thread(run, ["trust", *words, "--data", str(tmp_path), "--json"])
            out, err = capsys.readouterr()
            start = out.find("{\n")
            if code == 0:
                return code, json.loads(out[start:])
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            return code, err

        yield call


async def test_a_root_is_shown_and_a_key_replaced(cli: Cli, tmp_path: Path) -> None:
    before = (await cli("show"))[1]
    assert [item["version"] for item in before["chain"]] == [1]
    code, made = await cli("rotate", "--role", "router")
    assert (code, made["version"], made["stopped_revision_count"]) == (0, 2, 0)
    assert Path(made["key"]).stat().st_mode & 0o777 == 0o600
    (ended,) = made["ended"]
    assert [ended["key"]] == before["roles"]["router"]["keys"]
    after = (await cli("show"))[1]
    assert after["roles"]["router"]["keys"] == made["roles"]["router"]["keys"]
    assert (await cli("show", "--offline"))[1]["digest"] == after["digest"]
    for words, why in (
        (("rotate", "--keep"), "--role"),
        (("rotate", "--role", "loader", "--threshold", "2"), "--threshold"),
        (("init",), "already"),
    ):
        code, error = await cli(*words)
        assert (code, why in error) == (2, True)


async def test_a_key_that_was_replaced_may_turn_out_to_have_leaked(cli: Cli, tmp_path: Path) -> None:
    key = (await cli("show"))[1]["roles"]["router"]["keys"][0]
    assert "has not ended" in (await cli("leaked", key, "--since-log-index", "1"))[1]
    before = (await cli("rotate", "--role", "router"))[1]["ended"][0]
    after = (await cli("leaked", key, "--since-log-index", "1"))[1]
    assert (after["version"], [(item["key"], item["since_log_index"]) for item in after["ended"]]) == (3, [(key, 1)])
    assert after["ended"][0]["until"] < before["until"]
    # Said again with a later place, it counts for no more.
    again = (await cli("leaked", key, "--since-log-index", "9"))[1]
    assert (again["version"], again["ended"]) == (4, after["ended"])


async def test_several_holders_sign_a_draft(cli: Cli, tmp_path: Path) -> None:
    holders = [SigningKey.generate() for _ in range(2)]
    for name, key in zip("ab", holders, strict=True):
        key.save(tmp_path / f"{name}.key")
        (tmp_path / f"{name}.pub").write_bytes(key.public_pem)
    draft = str(tmp_path / "draft.json")
    given = [word for name in "ab" for word in ("--public-key", str(tmp_path / f"{name}.pub"))]
    made = (await cli("rotate", "--role", "root", *given, "--threshold", "2", "--draft", draft))[1]
    assert made["missing"] == [f"2 of the root keys of version 2: {', '.join(made['roles']['root']['keys'])}"]
    assert "signatures are missing" in (await cli("submit", draft))[1]
    assert (await cli("sign", draft, "--key", str(tmp_path / "a.key")))[1]["missing"]
    assert "signatures are missing" in (await cli("submit", draft))[1]
    assert (await cli("sign", draft, "--key", str(tmp_path / "b.key")))[1]["missing"] == []
    assert (await cli("submit", draft))[1]["version"] == 2
    # From now on one holder is not enough, and the old root key is nothing.
    keys = set((tmp_path / "trust").glob("*.key"))
    one = ("--root-key", str(tmp_path / "a.key"))
    for words in ((), one):
        assert "signatures are missing" in (await cli("rotate", "--role", "router", *words))[1]
    assert set((tmp_path / "trust").glob("*.key")) == keys, "a key that no root names is not kept"
    both = (*one, "--root-key", str(tmp_path / "b.key"))
    assert (await cli("rotate", "--role", "router", *both))[1]["version"] == 3


async def test_a_draft_that_was_changed_is_none(cli: Cli, tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    await cli("rotate", "--role", "router", "--draft", str(draft))
    value = json.loads(draft.read_bytes())
    for change in ({"schema": "x"}, {"root": value["envelope"]}, {"envelope": value["root"]}, {"root": 7}):
        draft.write_text(json.dumps(value | change))
        assert (await cli("submit", str(draft)))[0] == 1
    draft.write_text("no JSON")
    assert "no draft" in (await cli("submit", str(draft)))[1]
