"""What a registry of 100,000 revisions takes: `make bench-registry`.

A real registry process on SQLite, called over mTLS on loopback, in a database that `registry_rows` has filled. Prints a
line per figure (name, value, baseline, target, PASS or FAIL); the baseline is the SQL alone, without a service around
it. Writes bench/results/registry.json. Exits 0 unless something could not be measured.
"""

import argparse
import asyncio
import gc
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.figures import RESULTS, Figure, report
from bench.host import Quiet
from bench.registry_rows import Filled, Filler, Shape, check_fill, read_sample
from bench.registry_sample import ADAPTER, TENANT, TIMEOUT_S, VERSION, Fleet, manifest_of, publish_sample
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, sign_envelope
from loraport.registry.v1 import adapter_service_pb2 as pb
from loraport.registry.v1 import adapter_service_pb2_grpc as stubs
from loraport.registry.v1 import log_service_pb2 as log_pb
from loraport.registry.v1 import log_service_pb2_grpc as log_stubs
from services.shared.catalog_client import CatalogClient

WARM_UP = 200
RESOLVES, LISTS, REGISTERS = 2000, 200, 500
# A percentile is the median of those of three rounds. Seconds for measuring rounds again, all in all, and the share of
# the CPU time that the host may take beside one that counts: a percentile feels less than a mean does.
ROUNDS, SPARE_S, MOST_STOLEN = 3, 90.0, 0.01
# Publishers that call at once; the registry's writers take turns.
PUBLISHERS = 8
PAGE = 50
BUSY = "busy"
CHECK_EVERY = 997

_REVISION = """SELECT r.*, d.manifest_envelope FROM revisions r JOIN revision_documents d USING (adapter_id, version)
    WHERE revision_id = ? AND current"""
_ADAPTER = (
    "SELECT * FROM adapters LEFT JOIN aliases USING (adapter_id) WHERE adapters.tenant = ? AND adapters.adapter = ?"
)
_ADAPTERS = "SELECT * FROM adapters WHERE (tenant, adapter) > (?, ?) ORDER BY tenant, adapter LIMIT ?"
_ALL = (
    "SELECT * FROM tenants",
    "SELECT * FROM api_keys",
    "SELECT base_model, base_id FROM base_models",
    "SELECT r.*, a.shared_tenants FROM revisions r JOIN adapters a USING (adapter_id) WHERE current",
    "SELECT * FROM aliases",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a registry of 100,000 revisions.")
    parser.add_argument("--tenants", type=int, default=Shape().tenants, help="tenants, of 20 revisions each")
    parser.add_argument("--out", type=Path, default=RESULTS / "registry.json", help="where the JSON goes")
    options = parser.parse_args()
    # A run that is stopped takes its registry and its files with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    shape = Shape(tenants=options.tenants)
    with tempfile.TemporaryDirectory(prefix="loraport-bench-") as folder:
        figures, facts = measure(Fleet(Path(folder)), shape)
    report(options.out, figures, facts)
    return 0


def measure(fleet: Fleet, shape: Shape) -> tuple[list[Figure], dict[str, Any]]:
    """Fills a database and returns the figures of a registry on it."""
    started = time.monotonic()
    with fleet.serving():
        publish_sample(fleet)
    connection = sqlite3.connect(fleet.database, isolation_level=None)
    # The bulk is written without a journal: a run that breaks off starts anew.
    for setting in ("synchronous = OFF", "journal_mode = OFF", "cache_size = -400000"):
        connection.execute(f"PRAGMA {setting}")
    sample = read_sample(connection, tenant=TENANT, adapter=ADAPTER, version=VERSION)
    filled = Filler(connection, sample, fleet.keys, shape).fill()
    root = check_fill(connection, filled, fleet.keys, every=CHECK_EVERY)
    connection.execute("PRAGMA journal_mode = WAL")
    facts = {
        "tenants": shape.tenants,
        "adapters": len(filled.adapters),
        "revisions": shape.revisions,
        "database_mb": round(fleet.database.stat().st_size / 1e6),
        "fill_s": round(time.monotonic() - started, 1),
    }
    print(f"filled: {facts}", flush=True)
    quiet = Quiet(spare_s=SPARE_S, most=MOST_STOLEN)
    with fleet.serving(), fleet.channel("admin") as channel:
        checkpoint = log_stubs.LogServiceStub(channel).GetCheckpoint(log_pb.GetCheckpointRequest(), timeout=TIMEOUT_S)
        if checkpoint.root_hash != root:
            raise RuntimeError("the registry's log is not the one that was filled in")
        # A million rows of the filler's are in this process; looking through them for garbage is not the registry's.
        gc.collect()
        gc.freeze()
        facts["empty_call_p99_ms"] = round(_empty_call(channel, quiet), 2)
        figures = [*_resolves(channel, connection, filled, quiet), *_lists(channel, connection, quiet)]
        figures.append(asyncio.run(_watch(fleet, connection, shape.revisions)))
        figures.append(asyncio.run(_register(fleet, connection, filled)))
        figures.append(_revision_page(channel, connection, next(iter(filled.signers)), quiet))
    facts["CPU time that the host took"] = quiet.said()
    return figures, facts


def _rounds(quiet: Quiet, once: Callable[[], float]) -> float:
    return statistics.median(quiet.measure(once) for _ in range(ROUNDS))


def _p99_of_rounds(quiet: Quiet, call: Callable[[Any], Any], keys: Sequence[Any], *, warm_up: int = WARM_UP) -> float:
    return _rounds(quiet, partial(_p99, call, keys, warm_up=warm_up))


def _empty_call(channel: grpc.Channel, quiet: Quiet) -> float:
    """Returns the p99 of a call that reads nothing, milliseconds: what the way there and back costs."""
    check = health_pb2_grpc.HealthStub(channel).Check
    request = health_pb2.HealthCheckRequest()
    return _p99_of_rounds(quiet, lambda _: check(request, timeout=TIMEOUT_S), range(RESOLVES + WARM_UP))


def _resolves(channel: grpc.Channel, connection: sqlite3.Connection, filled: Filled, quiet: Quiet) -> Iterable[Figure]:
    stub: Any = stubs.AdapterServiceStub(channel)
    chance = random.Random(1)  # noqa: S311 - which rows are read is no secret
    ids = chance.choices(filled.revision_ids, k=RESOLVES + WARM_UP)
    names = chance.choices(filled.adapters, k=RESOLVES + WARM_UP)
    yield Figure(
        name="resolve by id, p99",
        value=_p99_of_rounds(
            quiet, lambda key: stub.GetRevision(pb.GetRevisionRequest(name=key), timeout=TIMEOUT_S), ids
        ),
        baseline=_p99(lambda key: connection.execute(_REVISION, (key,)).fetchall(), ids),
        target=5.0,
        unit="ms",
    )
    yield Figure(
        name="resolve by alias, p99",
        value=_p99_of_rounds(
            quiet, lambda key: stub.GetAdapter(pb.GetAdapterRequest(name=key), timeout=TIMEOUT_S), names
        ),
        baseline=_p99(
            lambda key: connection.execute(_ADAPTER, (key.split("/")[1], key.split("/")[3])).fetchall(), names
        ),
        target=5.0,
        unit="ms",
    )


def _lists(channel: grpc.Channel, connection: sqlite3.Connection, quiet: Quiet) -> Iterable[Figure]:
    stub: Any = stubs.AdapterServiceStub(channel)
    for size in (PAGE, 500):
        keys: list[tuple[str, str]] = []
        yield Figure(
            name=f"list page of {size}, p99",
            value=_rounds(quiet, partial(_walk, stub, size, keys)),
            baseline=_p99(_reader(connection, size), keys, warm_up=0),
            target=20.0,
            unit="ms",
        )


def _walk(stub: Any, size: int, keys: list[tuple[str, str]]) -> float:
    """Returns the p99 of the pages of all adapters, and in `keys` where each began.

    Deep pages as well: the walk itself is what is measured, page by page, and begins again at the end, so that a
    percentile is one of hundreds whatever the page's size.
    """
    token, pages = "", []
    keys[:] = [("", "")]
    for _ in range(LISTS):
        request = pb.ListAdaptersRequest(parent="tenants/-", page_size=size, page_token=token)
        began = time.perf_counter()
        response = stub.ListAdapters(request, timeout=TIMEOUT_S)
        pages.append((time.perf_counter() - began) * 1e3)
        token, last = response.next_page_token, response.adapters[-1].name.split("/")
        keys.append((last[1], last[3]) if token else ("", ""))
    return _quantile(pages)


def _reader(connection: sqlite3.Connection, size: int) -> Callable[[Any], Any]:
    return lambda key: connection.execute(_ADAPTERS, (*key, size + 1)).fetchall()


async def _watch(fleet: Fleet, connection: sqlite3.Connection, revisions: int) -> Figure:
    async with fleet.async_channel("router") as channel:
        await channel.channel_ready()
        client = CatalogClient(channel, artefacts_only=False)
        began = time.perf_counter()
        client.start()
        if not await client.wait_synced(60):
            raise RuntimeError("the watch did not complete in 60 s")
        value = time.perf_counter() - began
        if len(client.view.revisions) <= revisions:
            raise RuntimeError("the watch has left revisions out")
        await client.stop()
    began = time.perf_counter()
    for query in _ALL:
        connection.execute(query).fetchall()
    baseline = time.perf_counter() - began
    return Figure(name="catalog watch start", value=value, baseline=baseline, target=5.0, unit="s")


async def _register(fleet: Fleet, connection: sqlite3.Connection, filled: Filled) -> Figure:
    def request(tenant: str, adapter: str, version: int) -> pb.RegisterRevisionRequest:
        payload = manifest_of(tenant, adapter, version, f"new {tenant} {adapter} {version}".encode())
        envelope = sign_envelope(IN_TOTO_PAYLOAD_TYPE, payload, filled.signers[tenant])
        return pb.RegisterRevisionRequest(parent=f"tenants/{tenant}", manifest_envelope=envelope)

    # One publisher sends the versions of one adapter, in order; the others send new adapters of many tenants.
    each = REGISTERS // PUBLISHERS
    tenants = list(filled.signers)
    turns = [[request(tenants[0], BUSY, version) for version in range(1, each + 1)]]
    for publisher in range(1, PUBLISHERS):
        turns.append([request(tenants[n % len(tenants)], f"new-{publisher}-{n}", 1) for n in range(each)])
    async with fleet.async_channel("admin") as channel:
        stub: Any = stubs.AdapterServiceStub(channel)

        async def publish(turn: Sequence[pb.RegisterRevisionRequest]) -> None:
            for item in turn:
                await stub.RegisterRevision(item, timeout=TIMEOUT_S)

        began = time.perf_counter()
        await asyncio.gather(*map(publish, turns))
        value = each * PUBLISHERS / (time.perf_counter() - began)
    baseline = _commits(connection, fleet.folder / "scratch.db")
    return Figure(name="register", value=value, baseline=baseline, target=100.0, unit="/s", at_most=False)


def _commits(connection: sqlite3.Connection, scratch: Path) -> float:
    """Returns how many transactions a second SQLite commits, each with the rows of one announcement."""
    names = "('revisions', 'revision_documents', 'log_leaves', 'log_nodes', 'audit_events')"
    schema = connection.execute(f"SELECT name, sql FROM sqlite_master WHERE name IN {names} AND type = 'table'")  # noqa: S608
    other = sqlite3.connect(scratch, isolation_level=None)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("PRAGMA synchronous = FULL")
    inserts = []
    for name, sql in schema.fetchall():
        other.execute(sql)
        row = connection.execute(f"SELECT * FROM {name} ORDER BY rowid DESC LIMIT 1").fetchone()  # noqa: S608
        inserts.append((f"INSERT INTO {name} VALUES ({','.join('?' * len(row))})", list(row)))  # noqa: S608
    began = time.perf_counter()
    for number in range(REGISTERS):
        other.execute("BEGIN IMMEDIATE")
        for statement, row in inserts:
            # The first column is a key, or part of one.
            other.execute(statement, [number, *row[1:]])
        other.execute("COMMIT")
    rate = REGISTERS / (time.perf_counter() - began)
    other.close()
    return rate


def _revision_page(channel: grpc.Channel, connection: sqlite3.Connection, tenant: str, quiet: Quiet) -> Figure:
    stub: Any = stubs.AdapterServiceStub(channel)
    request = pb.ListRevisionsRequest(parent=f"tenants/{tenant}/adapters/{BUSY}", page_size=PAGE)
    found = connection.execute("SELECT adapter_id FROM adapters WHERE tenant = ? AND adapter = ?", (tenant, BUSY))
    key = found.fetchone()
    page = "SELECT * FROM revisions WHERE adapter_id = ? ORDER BY version DESC LIMIT ?"
    return Figure(
        name=f"revisions page of {PAGE}, p99",
        value=_p99_of_rounds(quiet, lambda _: stub.ListRevisions(request, timeout=TIMEOUT_S), range(LISTS), warm_up=10),
        baseline=_p99(lambda _: connection.execute(page, (*key, PAGE + 1)).fetchall(), range(LISTS), warm_up=10),
        target=20.0,
        unit="ms",
    )


def _p99(call: Callable[[Any], Any], keys: Sequence[Any], *, warm_up: int = WARM_UP) -> float:
    """Returns the 99th percentile of the time of `call`, milliseconds; the first calls are not counted."""
    times = []
    for key in keys:
        began = time.perf_counter()
        call(key)
        times.append((time.perf_counter() - began) * 1e3)
    return _quantile(times[warm_up:])


def _quantile(times: Sequence[float]) -> float:
    return sorted(times)[max(len(times) * 99 // 100 - 1, 0)]


if __name__ == "__main__":
    sys.exit(main())
