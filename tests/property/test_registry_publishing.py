"""Publishing under every order of events: whatever is announced, admitted, approved and revoked, invariants hold."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from loraport.bundle.base import base_id, to_json
from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, sign_envelope
from loraport.bundle.manifest import parse_manifest
from services.registry.ports import SystemRandomness
from services.registry.publishing import Limits, Publishing
from services.registry.records import SignerRow
from services.registry.store import accounts, adapters, bases, feed, log, revisions
from services.registry.store.database import Database
from services.registry.store.migrate import upgrade
from services.registry.store.tables import adapters as adapters_table
from services.registry.store.tables import revisions as revisions_table
from services.shared.catalog import CatalogView, verified_record
from services.shared.errors import LoraportError
from services.shared.names import AdapterName
from tests.contract.registry_rig import LOADER_KEY, REGISTRY_KEY, base_spec, manifest, verification

SIGNER = SigningKey.generate()
NOW_S = 1_800_000_000
CONTENTS, ADAPTERS, VERSIONS = ("one", "two"), ("pirate", "json"), range(1, 5)
PAYLOADS = {
    key: manifest("acme", key[1], key[2], content=key[0]) for key in itertools.product(CONTENTS, ADAPTERS, VERSIONS)
}
ANSWERS = {"REVISION_NOT_FOUND", "REVISION_EXISTS", "VERSION_NOT_RISING", "INVALID_STATE"}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("announce"), st.sampled_from(sorted(PAYLOADS))),
        st.tuples(st.sampled_from(("verify", "refuse", "approve", "revoke")), st.sampled_from(CONTENTS)),
        st.tuples(st.just("share"), st.sampled_from(((), ("globex",), ("globex", "initech")))),
    ),
    max_size=14,
)


class World:
    """A registry without its door, and a watcher."""

    def __init__(self, folder: str) -> None:
        self.database = Database(f"sqlite:///{folder}/registry.db")
        upgrade(self.database)
        limits = Limits(max_weights_bytes=1 << 30, max_rank=256, session_life_s=3600)
        loaders = {LOADER_KEY.key_id: LOADER_KEY.public_pem}
        self.publishing = Publishing(REGISTRY_KEY, loaders, SystemRandomness(), limits)
        self.view = CatalogView()
        self.revoked: set[str] = set()
        with self.database.write() as transaction:
            accounts.add_tenant(transaction, "acme", display_name="", weight=1.0, base_allowed=True, now_us=1)
            pem = SIGNER.public_pem.decode()
            accounts.add_signer(
                transaction,
                SignerRow(
                    tenant="acme",
                    signer="ci",
                    key_id=SIGNER.key_id,
                    public_key_pem=pem,
                    create_us=1,
                    revoke_us=None,
                    since_log_index=None,
                ),
            )
            spec = canonical(to_json(base_spec()))
            bases.add_base(transaction, "base", base_id=base_id(base_spec()), spec_json=spec, now_us=1)

    def step(self, what: str, argument: Any) -> None:
        """Carries out a step; a refusal is an answer, anything else is a bug."""
        now_us = NOW_S * 1_000_000
        try:
            with self.database.write() as transaction:
                if what == "announce":
                    envelope = sign_envelope(IN_TOTO_PAYLOAD_TYPE, PAYLOADS[argument], SIGNER)
                    self.publishing.announce(transaction, "acme", envelope, now_us=now_us, validate_only=False)
                    return
                if what == "share":
                    adapter = adapters.find_adapter(transaction.connection, AdapterName("acme", "pirate"))
                    if adapter is not None:
                        adapters.share(transaction, adapter, argument, now_us=now_us)
                    return
                payload = PAYLOADS[argument, "pirate", 1]
                row = revisions.require(
                    revisions.find_current(transaction.connection, parse_manifest(payload).revision_id)
                )
                if what in ("verify", "refuse"):
                    envelope = verification(payload, admitted=what == "verify", verified_time=NOW_S)
                    opened = self.publishing.open_verification(transaction.connection, envelope)
                    self.publishing.admit(transaction, opened, envelope, now_us=now_us)
                elif what == "approve":
                    self.publishing.approve(transaction, row, etag="", now_us=now_us)
                else:
                    self.publishing.revoke(transaction, row, etag="", reason="because", security=False, now_us=now_us)
                    self.revoked.add(row.revision_id)
        except LoraportError as error:
            if error.reason not in ANSWERS:
                raise

    def check(self) -> None:
        """The invariants."""
        with self.database.read() as connection:
            rows = connection.execute(select(revisions_table)).all()
            counts = connection.execute(
                select(revisions_table.c.adapter_id, func.max(revisions_table.c.version)).group_by("adapter_id")
            )
            latest = connection.execute(select(adapters_table.c.adapter_id, adapters_table.c.latest_version))
            assert {tuple(row) for row in counts} == {tuple(row) for row in latest}
        current = [row.revision_id for row in rows if row.current]
        assert len(current) == len(set(current)) == len({row.revision_id for row in rows})
        for row in rows:
            assert row.current or row.state == "QUARANTINED"
            assert bool(row.record_envelope) == bool(row.record_leaf) == (row.state == "ACTIVE")
            if row.current:
                assert (row.state == "REVOKED") == (row.revision_id in self.revoked)

    def follow(self) -> None:
        """A watcher that hears of changes knows what one that starts afresh knows."""
        epoch, items = feed.changes(self.database, self.view.epoch, artefacts_only=False)
        self.view.apply(items, epoch=epoch, synced=True)
        fresh = CatalogView()
        for kind in feed.kinds(artefacts_only=False):
            for chunk in feed.scan(self.database, kind):
                fresh.apply(chunk, epoch=epoch, synced=True)
        assert fresh == self.view
        assert self.view.contradictions == [], "what an honest registry shows, its log says"
        with self.database.read() as connection:
            state = log.state(connection)
            log.require_computed(log.compute(connection), state)
        restrictions = self.view.restraint.restrictions
        assert restrictions.count == state.listed.count
        assert restrictions.begins_with(state.listed.count, state.listed.head.hex())
        for item in fresh.revisions.values():
            if item.state == "ACTIVE":
                assert verified_record(item, {REGISTRY_KEY.key_id: REGISTRY_KEY.public_pem}).version == item.version


@settings(max_examples=30)
@given(STEPS)
def test_invariants_hold_after_every_step(steps: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert Path(folder).is_dir()
        world = World(folder)
        for what, argument in steps:
            world.step(what, argument)
            world.check()
            world.follow()
        world.database.close()
