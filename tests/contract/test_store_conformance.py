"""The object store port over a real S3 server, and over servers that misbehave.

Set LORAPORT_TEST_S3=host:port (with LORAPORT_TEST_S3_KEYS=access,secret) to hold another server to the same rules.
"""

import gzip
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from services.loader.ports import ObjectMissing
from services.loader.store import PART_BYTES, S3Store
from services.shared.errors import LoraportError
from tests.loader_rig import ACCESS, SECRET, s3_server, s3_store, tiny_folder
from tests.support.http_store import http_server, respond


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
    other = os.environ.get("LORAPORT_TEST_S3")
    if other:
        access, secret = os.environ["LORAPORT_TEST_S3_KEYS"].split(",")
        store = S3Store(other, (access, secret), quarantine_bucket="lp-quarantine", verified_bucket="lp-verified")
        store.prepare()
        yield store
        return
    with s3_server(tmp_path_factory.mktemp("store")) as address:
        yield s3_store(address)


def put(store: S3Store, key: str, data: bytes) -> None:
    store.put("verified", key, io.BytesIO(data), len(data))


def get(store: S3Store, key: str) -> bytes:
    return b"".join(store.read("verified", key))


def test_prepare_is_idempotent(store: S3Store) -> None:
    store.prepare()
    store.prepare()


@pytest.mark.parametrize("size", [1, 1000, 6 << 20, PART_BYTES + 1])
def test_what_is_put_is_read(store: S3Store, size: int) -> None:
    data = (os.urandom(4096) * (size // 4096 + 1))[:size]
    put(store, f"size/{size}", data)
    assert get(store, f"size/{size}") == data


def test_a_put_replaces(store: S3Store) -> None:
    put(store, "twice", b"a longer first")
    put(store, "twice", b"second")
    assert get(store, "twice") == b"second"


def test_missing_objects_are_missing(store: S3Store) -> None:
    put(store, "t/10/x", b"x")
    for key in ("nothing", "t", "t/1", "t/10"):
        with pytest.raises(ObjectMissing):
            get(store, key)


def test_delete_is_idempotent(store: S3Store) -> None:
    put(store, "gone", b"x")
    store.delete("verified", "gone")
    store.delete("verified", "gone")
    with pytest.raises(ObjectMissing):
        get(store, "gone")


def test_keys_are_listed_by_prefix(store: S3Store) -> None:
    for key in ("l/1/a", "l/1/b", "l/10/c"):
        store.put("quarantine", key, io.BytesIO(b"x"), 1)
    assert sorted(store.keys("quarantine", "l/1/")) == ["l/1/a", "l/1/b"]
    assert store.keys("quarantine", "none/") == []


def test_the_same_bytes_by_many_at_once(store: S3Store) -> None:
    data = os.urandom(100_000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: put(store, "raced", data), range(16)))
    assert get(store, "raced") == data


def test_a_reader_may_leave_early(store: S3Store) -> None:
    put(store, "large", os.urandom(6 << 20))
    for _ in range(30):
        with closing(store.read("verified", "large")) as pieces:
            assert next(pieces)


def test_wrong_credentials_are_a_store_that_does_not_work(store: S3Store) -> None:
    address = store._client._base_url.host
    stranger = S3Store(address, (ACCESS, "wrong-secret"), quarantine_bucket="quarantine", verified_bucket="verified")
    with pytest.raises(LoraportError) as caught:
        put(stranger, "x", b"x")
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert SECRET not in str(caught.value) + str(caught.value.metadata)


def test_nobody_listening_is_said_soon() -> None:
    with pytest.raises(LoraportError) as caught:
        get(s3_store("127.0.0.1:1"), "x")
    assert (caught.value.reason, caught.value.retry_after_s is not None) == ("STORE_UNAVAILABLE", True)


def test_redirects_are_not_followed() -> None:
    with (
        http_server(lambda handler: respond(handler, 200, b"secret")) as (other, seen),
        http_server(
            lambda handler: respond(handler, 302, Location=f"http://{other._client._base_url.host}/elsewhere")
        ) as (store, _),
    ):
        with pytest.raises(LoraportError) as caught:
            get(store, "x")
        assert caught.value.reason == "STORE_UNAVAILABLE"
        assert seen == []


def test_content_encoding_is_not_decoded() -> None:
    body = gzip.compress(b"\0" * 1_000_000)
    with http_server(lambda handler: respond(handler, 200, body, Content_Encoding="gzip")) as (store, _):
        assert get(store, "x") == body


def test_a_body_that_breaks_off_is_an_error() -> None:
    with (
        http_server(lambda handler: respond(handler, 200, b"short", Content_Length="500")) as (store, _),
        pytest.raises(LoraportError) as caught,
    ):
        get(store, "x")
    assert caught.value.reason == "STORE_UNAVAILABLE"


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (507, b"<Error><Code>InsufficientStorage</Code></Error>", "STORAGE_FULL"),
        (500, b"\xff\xfe not text", "STORE_UNAVAILABLE"),
        (500, b"<not><closed>", "STORE_UNAVAILABLE"),
        (500, b"<Error><Code>XMinioStorageFull</Code></Error>", "STORAGE_FULL"),
        (503, b"<Error><Code>SlowDown</Code></Error>", "STORE_UNAVAILABLE"),
        (500, b"<Error><Code>InternalError</Code></Error>", "STORE_UNAVAILABLE"),
        (403, b"<Error><Code>AccessDenied</Code></Error>", "STORE_UNAVAILABLE"),
        (200, b"", ""),
    ],
)
@pytest.mark.parametrize("content_type", ["application/xml", "text/xml; charset=utf-8"])
def test_failed_writes_have_a_reason(status: int, body: bytes, reason: str, content_type: str) -> None:
    with http_server(lambda handler: respond(handler, status, body, Content_Type=content_type)) as (store, _):
        if not reason:
            put(store, "x", b"x")
            return
        with pytest.raises(LoraportError) as caught:
            put(store, "x", b"x")
        assert caught.value.reason == reason


def test_a_full_disk_is_a_full_store(tmp_path: Path) -> None:
    with tiny_folder(tmp_path / "tiny") as folder, s3_server(folder) as address:
        store = s3_store(address)
        put(store, "fits", b"x" * 100_000)
        with pytest.raises(LoraportError) as caught:
            put(store, "does-not-fit", b"x" * 3_000_000)
        assert caught.value.reason == "STORAGE_FULL"
        assert get(store, "fits") == b"x" * 100_000
        with pytest.raises(ObjectMissing):
            get(store, "does-not-fit")
