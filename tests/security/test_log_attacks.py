"""Somebody with a hand on the registry's database changes the log; `loraport log verify` says where, from outside."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from loraport.bundle.envelope import SigningKey
from loraport.cli.main import run
from loraport.dev.layout import ENDPOINTS_SCHEMA
from loraport.log import merkle
from loraport.log.events import FIRST as FIRST_EVENT
from loraport.log.events import Event, event_hash
from loraport.log.leaf import parse_leaf
from loraport.registry.v1 import adapter_service_pb2 as adapter_pb
from loraport.registry.v1 import log_service_pb2 as log_pb
from loraport.registry.v1 import trust_service_pb2 as trust_pb
from loraport.registry.v1.trust_service_pb2_grpc import TrustServiceStub
from loraport.trust.edit import next_root
from loraport.trust.files import read_chain
from loraport.trust.root import Role
from tests.contract.registry_rig import ADMIN_CA, LEAVES, SERVICE_CA, TIMEOUT, Rig, reason_of, serving, write_config
from tests.support.roots import sealed, write_root

REVISIONS = 4
# A trust root, a signer and its delegation, a base, and three leaves a revision.
ROWS = 4 + 3 * REVISIONS


class World:
    """A registry that keeps no file of what it signed, its database, and the command line."""

    rig: Rig

    def __init__(self, url: str, folder: Path, output: pytest.CaptureFixture[str]) -> None:
        self._config = write_config(folder, database_url=url)
        self._serving = AsyncExitStack()
        # An engine of our own: nothing of the registry stands between us and the rows.
        self._engine = create_engine(url)
        self.folder = folder
        self._output = output

    async def restart(self) -> None:
        """Ends the registry if it runs, and starts it."""
        await self._serving.aclose()
        self.rig = await self._serving.enter_async_context(serving(self._config))
        endpoints = {
            "schema": ENDPOINTS_SCHEMA,
            **dict.fromkeys(("registry", "router_admin", "loader_upload"), self.rig.address),
            "credentials": {"ca": "ca.pem", "admin_certificate": "admin.pem", "admin_key": "admin.key"},
        }
        (self.folder / "endpoints.json").write_text(json.dumps(endpoints))

    async def cli(self, *arguments: str, of: str = "log") -> tuple[int, dict[str, Any]]:
        words = [of, *arguments, "--data", str(self.folder), "--json"]
        self._output.readouterr()
        code = await asyncio.to_thread(run, words)
        out, err = self._output.readouterr()
        start = out.find("\n{\n") + 1 if not out.startswith("{") else 0
        return code, json.loads(out[start:]) if "{\n" in out else {"error": err}

    async def verify(self, *arguments: str) -> tuple[Any, Any]:
        """Returns the code and row of what an audit finds."""
        exit_code, found = await self.cli("verify", *arguments)
        assert "error" not in found, found
        assert exit_code == (0 if found["good"] else 1)
        return found["code"], found["first_row"]

    def sql(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Changes the database beside the registry, past triggers and foreign keys; `?` stands for a value."""
        with self._engine.begin() as database:
            if self._engine.name == "postgresql":
                database.exec_driver_sql("SET LOCAL session_replication_role = replica")
            else:
                for table in ("log_leaves", "log_nodes", "audit_events", "delegations"):
                    for change in ("update", "delete"):
                        database.exec_driver_sql(f"DROP TRIGGER IF EXISTS {table}_no_{change}")
            for statement, values in statements:
                database.exec_driver_sql(self._dialect(statement), values)

    def body(self, index: int) -> bytes:
        query = self._dialect("SELECT body FROM log_leaves WHERE leaf_index = ?")
        with self._engine.connect() as database:
            return bytes(database.exec_driver_sql(query, (index,)).scalar_one())

    def forge_audit_trail(self, *, reason: str) -> None:
        """Writes another reason into every event, and the hashes that fit it."""
        fields = ("sequence", "event_us", "principal", "method", "resource", "decision", "reason", "request_id")
        with self._engine.connect() as database:
            rows = database.exec_driver_sql(f"SELECT {', '.join(fields)} FROM audit_events ORDER BY sequence").all()
        last, changes = FIRST_EVENT, []
        for row in rows:
            values = dict(zip(fields, row, strict=True)) | {"reason": reason}
            last = event_hash(last, Event(time_us=values.pop("event_us"), **values))
            changes.append(("UPDATE audit_events SET reason = ?, hash = ? WHERE sequence = ?", (reason, last, row[0])))
        self.sql(*changes)

    async def close(self) -> None:
        self._engine.dispose()
        await self._serving.aclose()

    def _dialect(self, statement: str) -> str:
        return statement.replace("?", "%s") if self._engine.name == "postgresql" else statement


@pytest.fixture
async def world(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[World]:
    (tmp_path / "admin.pem").write_bytes(LEAVES["admin"].certificate)
    (tmp_path / "admin.key").write_bytes(LEAVES["admin"].key)
    assert SERVICE_CA.certificate != ADMIN_CA.certificate
    world = World(url, tmp_path, capsys)
    try:
        await world.restart()
        await world.rig.tenant("acme")
        await world.rig.base()
        for version in range(1, REVISIONS + 1):
            await world.rig.active("acme", "pirate", version, f"c{version}")
        yield world
    finally:
        await world.close()


def edited(body: bytes) -> bytes:
    return replace(parse_leaf(body), digest="sha256:" + "2" * 64).body()


SET = "UPDATE log_leaves SET body = ? WHERE leaf_index = ?"


async def test_an_honest_log_is_good_and_shown(world: World) -> None:
    code, found = await world.cli("verify")
    assert (code, found["good"], found["tree_size"], found["row_count"]) == (0, True, ROWS, ROWS)
    assert found["root_hash"] == found["signed_root"]
    code, shown = await world.cli("checkpoint")
    assert (code, shown["tree_size"], shown["root_hash"]) == (0, ROWS, found["root_hash"])
    assert shown["fresh"]
    assert (await world.cli("list", "--start", "3"))[0] == 0
    await world.rig.active("acme", "pirate", 9, "c9")
    assert await world.verify() == (None, None)


async def test_records_that_a_leaked_key_signed_are_no_finding_once_they_are_out_of_service(world: World) -> None:
    """The audit would cry for ever over what was put right, and nobody would look at it any more."""
    rig, old = world.rig, read_chain(world.folder / "trust")[-1][0]
    names = [f"tenants/acme/adapters/pirate/revisions/v{version}" for version in (1, 2)]
    place = min(index for index in range(ROWS) if parse_leaf(world.body(index)).kind == "RECORD")
    await rig.revoke(names[1])
    new = SigningKey.generate()
    new.save(world.folder / "signing.new.key")
    root = next_root(
        old, now=old.issued, role=Role.REGISTRY, public_keys=[new.public_pem], since=place, compromised=True
    )
    request = trust_pb.SubmitTrustRootRequest(envelope=sealed(root))
    await TrustServiceStub(rig.channel("admin")).SubmitTrustRoot(request, timeout=TIMEOUT)
    assert await world.verify() == (None, None), "withdrawn and revoked"
    await rig.approve(names[0])
    assert await world.verify() == (None, None), "approved again by the new key"
    # A registry that shows one of them as ACTIVE all the same contradicts its log.
    world.sql(("UPDATE revisions SET state = 'ACTIVE' WHERE version = ?", (3,)))
    assert (await world.verify())[0] == "CATALOG"


@pytest.mark.parametrize("index", [0, 7, ROWS - 1])
async def test_an_edited_row(world: World, index: int) -> None:
    await world.verify()  # what is not signed yet the registry itself finds
    world.sql((SET, (edited(world.body(index)), index)))
    code, row = await world.verify()
    assert (code, row) == ("EDITED" if index < ROWS - 1 else "REWRITTEN", index)


@pytest.mark.parametrize("index", [0, 7, ROWS - 1])
async def test_a_dropped_row(world: World, index: int) -> None:
    await world.verify()
    world.sql(("DELETE FROM log_leaves WHERE leaf_index = ?", (index,)))
    assert await world.verify() == ("DROPPED", index)


async def test_reordered_rows(world: World) -> None:
    await world.verify()
    first, second = world.body(4), world.body(9)
    world.sql((SET, (second, 4)), (SET, (first, 9)))
    assert await world.verify() == ("REORDERED", 4)


async def test_a_row_put_in_behind_the_end_is_not_part_of_what_is_signed(world: World) -> None:
    await world.verify()
    forged = replace(parse_leaf(world.body(ROWS - 1)), index=ROWS).body()
    world.sql(("INSERT INTO log_leaves (leaf_index, revocation, body) VALUES (?, FALSE, ?)", (ROWS, forged)))
    assert await world.verify() == (None, None), "what was signed is all there"
    # The next change finds the log inconsistent, and is refused rather than built on it.
    world.rig.service._hub.advance(world.rig.service._hub.epoch + 1)
    code, found = await world.cli("verify")
    assert code == 1
    assert "LOG_DAMAGED" in found["error"]


def rewritten(world: World, index: int) -> list[bytes]:
    """The whole log with row `index` edited and every later one made to fit."""
    rows = [world.body(i) for i in range(ROWS)]
    rows[index] = edited(rows[index])
    for i in range(index + 1, ROWS):
        rows[i] = replace(parse_leaf(rows[i]), previous=merkle.leaf_hash(rows[i - 1]).hex()).body()
    return rows


@pytest.mark.parametrize("index", [0, 6, ROWS - 1])
async def test_a_history_of_its_own_is_located_by_proofs(world: World, index: int) -> None:
    await world.verify()
    world.sql(*((SET, (row, i)) for i, row in enumerate(rewritten(world, index))))
    assert await world.verify() == ("REWRITTEN", index)


async def test_a_registry_restarted_on_a_rewritten_database_is_caught_by_the_last_audit(world: World) -> None:
    """Rows and all hashes rewritten: the new root is signed in good faith, and the auditor remembers the old one."""
    assert await world.verify() == (None, None)
    rows, nodes = rewritten(world, 4), {}
    for size, row in enumerate(rows):
        left = [nodes[node] for node in merkle.merged(size)]
        nodes |= dict(merkle.new_nodes(size, merkle.leaf_hash(row), left))
    put = "UPDATE log_nodes SET hash = ? WHERE level = ? AND node_index = ?"
    world.sql(
        *((SET, (row, i)) for i, row in enumerate(rows)), *((put, (value, *node)) for node, value in nodes.items())
    )
    await world.restart()
    code, row = await world.verify()
    assert (code, row) == ("REWRITTEN", ROWS - 1)
    (world.folder / "state" / "log-audit.json").unlink()
    assert await world.verify() == (None, None), "nobody who has not seen the first history can know"


async def test_a_registry_that_remembers_signs_no_second_history_after_a_restart_either(
    url: str, tmp_path: Path
) -> None:
    """Rows and all hashes rewritten while it was down, as well as anybody could."""
    config = write_config(tmp_path, database_url=url, state_file=str(tmp_path / "state" / "signed.json"))
    async with serving(config) as rig:
        await rig.tenant("acme")
        before = await rig.log().GetCheckpoint(log_pb.GetCheckpointRequest(), timeout=TIMEOUT)
    async with serving(config) as rig:
        again = await rig.log().GetCheckpoint(log_pb.GetCheckpointRequest(), timeout=TIMEOUT)
        assert (again.tree_size, again.root_hash) == (before.tree_size, before.root_hash)
    engine = create_engine(url)
    with engine.begin() as database:
        if engine.name == "postgresql":
            database.exec_driver_sql("SET LOCAL session_replication_role = replica")
        else:
            for name in ("log_leaves_no_delete", "log_nodes_no_delete", "log_restrictions_no_delete"):
                database.exec_driver_sql(f"DROP TRIGGER {name}")
        for table in ("log_leaves", "log_nodes", "log_restrictions"):
            database.exec_driver_sql(f"DELETE FROM {table}")
    engine.dispose()
    async with serving(config) as rig:
        call = rig.log().GetCheckpoint(log_pb.GetCheckpointRequest(), timeout=TIMEOUT)
        assert await reason_of(call) == "LOG_DAMAGED"


async def test_a_registry_restored_from_a_backup_is_a_rollback(world: World) -> None:
    await world.verify()
    world.sql(
        ("DELETE FROM log_leaves WHERE leaf_index >= 11", ()), ("DELETE FROM log_nodes WHERE node_index >= 11", ())
    )
    code, found = await world.cli("verify")
    assert (code, found["code"], found["first_row"]) == (1, "DROPPED", 11)
    await world.restart()
    assert await world.verify() == ("ROLLBACK", 11)


CATALOG = [
    ("UPDATE revisions SET state = 'ACTIVE' WHERE version = 1", "v1 is shown as ACTIVE, the log says REVOKED"),
    ("UPDATE revisions SET state = 'REVOKED' WHERE version = 2", "v2 is shown as REVOKED, the log says ACTIVE"),
    ("UPDATE aliases SET revision_id = 'sha256:' || 'aa'", "prod is shown as sha256:aa, the log says sha256:"),
    ("UPDATE aliases SET removed = TRUE", "prod is shown as missing, the log says sha256:"),
    ("UPDATE signers SET key_id = 'aa'", "ci is shown as key aa, valid, the log says key "),
    ("UPDATE signers SET revoke_us = 1", ", revoked, the log says key "),
    ("UPDATE base_models SET base_id = 'sha256:aa'", "base is shown as sha256:aa, the log says sha256:"),
    ("UPDATE adapters SET shared_tenants = '[\"mallory\"]'", "adapters/pirate is shown as sha256:"),
    (
        "UPDATE delegations SET envelope = manifest_envelope FROM revision_documents",
        "delegations/1 is shown as sha256:",
    ),
    ("UPDATE delegations SET version = 2", "delegations/1 is shown as missing, the log says sha256:"),
    ("DELETE FROM revisions WHERE version = 3", "v3 is shown as missing, the log says ACTIVE"),
    (
        "INSERT INTO aliases SELECT adapter_id, 'next', tenant, adapter, revision_id, version, FALSE, 1, 1 FROM aliases",
        "next is shown as sha256:",
    ),
]


@pytest.mark.parametrize(("statement", "detail"), CATALOG)
async def test_a_row_of_the_catalog_that_the_log_contradicts(world: World, statement: str, detail: str) -> None:
    """A revoked revision's record is still a valid signature: only the log says that it was revoked."""
    shown = await world.rig.adapters().GetAdapter(
        adapter_pb.GetAdapterRequest(name="tenants/acme/adapters/pirate"), timeout=TIMEOUT
    )
    second = await world.rig.adapters().GetRevision(
        adapter_pb.GetRevisionRequest(name=f"{shown.name}/revisions/v2"), timeout=TIMEOUT
    )
    await world.rig.alias(f"{shown.name}/aliases/prod", second.revision_id)
    await world.rig.revoke(f"{shown.name}/revisions/v1")
    assert await world.verify() == (None, None)
    world.sql((statement, ()))
    code, found = await world.cli("verify")
    assert (code, found["code"]) == (1, "CATALOG")
    assert detail in found["detail"]
    assert await world.verify("--no-catalog") == (None, None)


COPIES: list[tuple[str, int, Callable[[list[bytes]], list[bytes]]]] = [
    ("EDITED", 5, lambda rows: [*rows[:5], edited(rows[5]), *rows[6:]]),
    ("DROPPED", 5, lambda rows: [*rows[:5], *rows[6:]]),
    ("DROPPED", 5, lambda rows: rows[:5]),
    ("REORDERED", 5, lambda rows: [*rows[:5], rows[6], rows[5], *rows[7:]]),
    ("EDITED", 5, lambda rows: [*rows[:5], b"{}", *rows[6:]]),
]


@pytest.mark.parametrize(("code", "row", "change"), COPIES)
async def test_an_untrusted_copy(
    world: World, tmp_path: Path, code: str, row: int, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    path = tmp_path / "copy"
    assert (await world.cli("export", str(path)))[1]["leaf_count"] == ROWS
    assert await world.verify("--from", str(path)) == (None, None)
    head, *rows = path.read_bytes().splitlines()
    assert hashlib.sha256(rows[3]).digest() == hashlib.sha256(world.body(3)).digest()
    path.write_bytes(b"\n".join([head, *change(rows)]) + b"\n")
    assert await world.verify("--from", str(path)) == (code, row)


async def test_a_copy_without_the_registrys_signature_is_no_evidence(world: World, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    await world.cli("export", str(path))
    write_root(tmp_path / "other", {"registry": SigningKey.generate()})
    code, found = await world.cli("verify", "--from", str(path), "--trust", str(tmp_path / "other"))
    assert code == 1
    assert "proves nothing: UNTRUSTED" in found["error"]
