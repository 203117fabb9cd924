"""The object store's policies, evaluated: by moto, a server of S3 that knows users and what their policies allow.

No MinIO is at hand here. Policies are the same language; of what moto takes otherwise one thing matters: it asks for
`s3:HeadBucket`, which is nothing that a policy can allow, where MinIO and S3 ask for `s3:ListBucket`.
"""

import io
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from minio import Minio
from minio.crypto import decrypt
from minio.deleteobjects import DeleteObject
from minio.error import S3Error
from moto import settings
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends
from moto.s3.responses import ACTION_MAP
from moto.server import ThreadedMotoServer
from urllib3 import HTTPResponse

from loraport.deploy import store as deployed
from loraport.deploy.credentials import Materials
from loraport.deploy.site import compose_site
from loraport.deploy.store import POLICY, QUARANTINE, REGION, VERIFIED, loader_policy
from services.loader import store as loading
from services.loader.conformance import check_store
from services.loader.ports import ObjectMissing
from services.loader.store import S3Store
from services.shared.errors import LoraportError
from tests.loader_rig import State, running
from tests.support.http_store import served

ACCOUNT = "123456789012"
EVERYTHING = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
OTHER = "somebody-elses"
# The least that S3 takes for a part; a loader's own are larger.
PART = 5 << 20
Keys = tuple[str, str]
Policy = dict[str, Any]
numbers = itertools.count()


class Server:
    """An S3 server that lets in whom it knows, and lets them do what their policies say."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def user(self, policy: Policy | None) -> Keys:
        """Makes a user and returns its keys."""
        iam, name = iam_backends[ACCOUNT]["aws"], f"user-{next(numbers)}"
        iam.create_user(region_name=REGION, user_name=name)
        if policy is not None:
            iam.put_user_policy(name, POLICY, json.dumps(policy))
        key = iam.create_access_key(name)
        return key.access_key_id, key.secret_access_key

    def store(self, keys: Keys, *, quarantine: str = QUARANTINE, verified: str = VERIFIED) -> S3Store:
        """Returns the loader's own client under somebody's keys."""
        return S3Store(self.endpoint, keys, quarantine_bucket=quarantine, verified_bucket=verified)

    def client(self, keys: Keys) -> Minio:
        """Returns a client that can ask for anything."""
        return Minio(self.endpoint, *keys, secure=False, region=REGION)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, with the buckets that the job `store-setup` makes, and one of somebody else."""
    head, usual = ACTION_MAP["BUCKET"]["HEAD"], settings.INITIAL_NO_AUTH_ACTION_COUNT
    asked = head["DEFAULT"]
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    head["DEFAULT"], settings.INITIAL_NO_AUTH_ACTION_COUNT = "ListBucket", 0
    parts, loading.PART_BYTES = loading.PART_BYTES, PART
    try:
        server = Server("{}:{}".format(*moto.get_host_and_port()))
        root, folder = server.user(EVERYTHING), tmp_path_factory.mktemp("keys")
        for name, text in zip(("root-user", "root-password"), root, strict=True):
            (folder / name).write_text(text)
        prepare = lambda: deployed.prepare(server.endpoint, folder, users=False)  # noqa: E731
        assert prepare() == [f"bucket {QUARANTINE}", f"bucket {VERIFIED}"]
        assert prepare() == []
        other = server.client(root)
        other.make_bucket(OTHER)
        other.put_object(OTHER, "secret", io.BytesIO(b"secret"), 6)
        yield server
    finally:
        head["DEFAULT"], settings.INITIAL_NO_AUTH_ACTION_COUNT, loading.PART_BYTES = asked, usual, parts
        moto.stop()


def put(store: S3Store, area: Any, key: str, data: bytes = b"data") -> None:
    store.put(area, key, io.BytesIO(data), len(data))


def read(store: S3Store, area: Any, key: str) -> bytes:
    return b"".join(store.read(area, key))


def missing(store: S3Store) -> None:
    with pytest.raises(ObjectMissing):
        read(store, "verified", "nothing")


def broken_off(store: S3Store) -> None:
    """An upload in parts that ends too soon leaves nothing behind."""
    for area, bucket in (("quarantine", QUARANTINE), ("verified", VERIFIED)):
        with pytest.raises(LoraportError):
            store.put(area, "half", io.BytesIO(bytes(PART + 1)), 2 * PART)
        left = s3_backends[ACCOUNT]["aws"].buckets[bucket].multiparts
        assert not left, f"parts are left in {bucket}: {left.clear()}"


# What a loader does with its store, in its own words.
WORK: dict[str, Callable[[S3Store], object]] = {
    "begin": lambda store: store.prepare(),
    "be checked by doctor": lambda store: check_store(store, "loader").state == "GOOD" or pytest.fail("not good"),
    "quarantine": lambda store: put(store, "quarantine", "loader/upload-1/weights"),
    "read back": lambda store: read(store, "quarantine", "loader/upload-1/weights"),
    "sweep": lambda store: [store.delete("quarantine", key) for key in store.keys("quarantine", "loader/")],
    "keep what is verified": lambda store: put(store, "verified", "sha256/aa/aabb"),
    "load": lambda store: read(store, "verified", "sha256/aa/aabb"),
    "find that something is missing": missing,
    "keep large weights": lambda store: put(store, "verified", "sha256/cc/ccdd", bytes(PART + 1)),
    "give a large upload up": broken_off,
}


def test_a_loader_can_do_all_that_it_does(server: Server) -> None:
    store = server.store(server.user(loader_policy()))
    for work in WORK.values():
        work(store)


async def test_a_loader_takes_an_upload_in_and_gives_it_out(server: Server, tmp_path: Path) -> None:
    keys = server.user(loader_policy())
    (tmp_path / "keys").write_text("\n".join(keys))
    names = {"s3_quarantine_bucket": QUARANTINE, "s3_verified_bucket": VERIFIED}
    async with running(tmp_path, server.endpoint, tmp_path, s3_credentials=str(tmp_path / "keys"), **names) as rig:
        bundle = await rig.admit()
        assert rig.registry.revisions[bundle.revision_id].state == State.STATE_ACTIVE
        _, lease = await rig.ensure(bundle)
        assert await rig.read(lease) == bundle.weights
    client = server.client(server.user(EVERYTHING))
    assert [one.object_name for one in client.list_objects(QUARANTINE, recursive=True)] == []


def allow(permissions: list[tuple[str, str]]) -> Policy:
    """Returns a policy of single permissions, (action, resource)."""
    return {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": action, "Resource": resource} for action, resource in permissions],
    }


PERMISSIONS = [
    (action, resource)
    for statement in loader_policy()["Statement"]
    for action in statement["Action"]
    for resource in statement["Resource"]
]


@pytest.mark.parametrize("permission", PERMISSIONS, ids=[" ".join(one) for one in PERMISSIONS])
def test_a_loader_needs_every_permission_that_it_has(server: Server, permission: tuple[str, str]) -> None:
    store = server.store(server.user(allow([one for one in PERMISSIONS if one != permission])))
    with pytest.raises((LoraportError, AssertionError, pytest.fail.Exception)):
        for work in WORK.values():
            work(store)


# What it must not be able to do, whoever has taken it over; `client` has its keys.
FORBIDDEN: dict[str, Callable[[Minio], object]] = {
    "take verified bytes away": lambda client: client.remove_object(VERIFIED, "sha256/aa/kept"),
    "read another bucket": lambda client: client.get_object(OTHER, "secret").read(),
    "write into another bucket": lambda client: client.put_object(OTHER, "x", io.BytesIO(b"x"), 1),
    "take from another bucket": lambda client: client.remove_object(OTHER, "secret"),
    "list another bucket": lambda client: list(client.list_objects(OTHER)),
    "list the buckets": lambda client: client.list_buckets(),
    "make a bucket": lambda client: client.make_bucket("of-its-own"),
    "take a bucket away": lambda client: client.remove_bucket(QUARANTINE),
    "see a policy": lambda client: client.get_bucket_policy(VERIFIED),
    "open a bucket to the world": lambda client: client.set_bucket_policy(VERIFIED, json.dumps(EVERYTHING)),
    "have objects expire": lambda client: client.delete_bucket_lifecycle(VERIFIED),
    "begin versions": lambda client: client.get_bucket_versioning(VERIFIED),
    "tag": lambda client: client.get_object_tags(VERIFIED, "sha256/aa/kept"),
}


def test_a_loader_can_do_nothing_else(server: Server) -> None:
    keys = server.user(loader_policy())
    put(server.store(keys), "verified", "sha256/aa/kept")
    client = server.client(keys)
    for name, deed in FORBIDDEN.items():
        with pytest.raises(S3Error) as caught:
            deed(client)
        assert caught.value.code == "AccessDenied", name
    refused = list(client.remove_objects(VERIFIED, [DeleteObject("sha256/aa/kept")]))
    assert [one.code for one in refused] == ["AccessDenied"]
    assert read(server.store(keys), "verified", "sha256/aa/kept") == b"data"
    # All of it can be done by somebody who may, so it was the policy that refused.
    root = server.client(server.user(EVERYTHING))
    for name in ("read another bucket", "list another bucket", "list the buckets", "begin versions", "tag"):
        FORBIDDEN[name](root)


@pytest.mark.parametrize("who", ["a user of something else", "a stranger", "the loader's name with another secret"])
def test_nobody_else_reads_weights(server: Server, who: str) -> None:
    loader = server.user(loader_policy())
    put(server.store(loader), "verified", "sha256/aa/private")
    keys, code = {
        "a user of something else": (server.user(None), "AccessDenied"),
        "a stranger": (("AKIA" + "X" * 16, "y" * 40), "InvalidAccessKeyId"),
        "the loader's name with another secret": ((loader[0], "y" * 40), "SignatureDoesNotMatch"),
    }[who]
    for asked in (
        lambda: read(server.store(keys), "verified", "sha256/aa/private"),
        lambda: server.store(keys).keys("verified", ""),
        lambda: put(server.store(keys), "verified", "sha256/aa/private"),
    ):
        with pytest.raises(LoraportError) as caught:
            asked()
        assert caught.value.metadata["s3_code"] == code


def test_no_other_service_is_given_a_key_of_the_store(tmp_path: Path) -> None:
    Materials(tmp_path, compose_site(base_model="base", executors=("executor-0",), public=())).make({})
    _, secret = (tmp_path / "loader" / "s3").read_text().split()
    root = (tmp_path / "store" / "root-password").read_text()
    for directory in ("registry", "router", "executor-0", "board", "database", "grafana"):
        texts = b"".join(path.read_bytes() for path in (tmp_path / directory).rglob("*") if path.is_file())
        assert secret.encode() not in texts, directory
        assert root.encode() not in texts, directory


@contextmanager
def admin_server() -> Iterator[tuple[str, list[tuple[str, str, dict[str, list[str]], bytes]]]]:
    """A server that takes note of what it is asked, and grants it."""
    seen: list[tuple[str, str, dict[str, list[str]], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            seen.append((self.command, url.path, parse_qs(url.query), body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = do_any

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as address:
        yield address, seen


def test_minio_is_told_the_policy_the_user_and_that_they_belong_together(tmp_path: Path) -> None:
    for name, text in {"root-user": "root", "root-password": "r" * 32, "loader": "loader-user\nits-secret"}.items():
        (tmp_path / name).write_text(text)
    with admin_server() as (address, seen):
        assert deployed.prepare(address, tmp_path, users=True) == ["user loader-user"]
    policy, user, both = [one for one in seen if one[1].startswith("/minio/admin/v3/")]
    assert policy[:3] == ("PUT", "/minio/admin/v3/add-canned-policy", {"name": [POLICY]})
    assert json.loads(policy[3]) == loader_policy()
    assert user[:3] == ("PUT", "/minio/admin/v3/add-user", {"accessKey": ["loader-user"]})
    told = HTTPResponse(io.BytesIO(user[3]), preload_content=False)
    assert json.loads(decrypt(told, "r" * 32)) == {"status": "enabled", "secretKey": "its-secret"}
    assert b"its-secret" not in user[3]
    named = {"userOrGroup": ["loader-user"], "isGroup": ["false"], "policyName": [POLICY]}
    assert both[:3] == ("PUT", "/minio/admin/v3/set-user-or-group-policy", named)
