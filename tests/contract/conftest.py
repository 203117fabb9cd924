"""What contract tests share. Every registry test runs on SQLite and on a real PostgreSQL, where its programs are
installed; every loader test on a store that speaks S3, one for each file of tests."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract import postgres
from tests.loader_rig import Rig, running, s3_server


@pytest.fixture(scope="session")
def postgres_socket() -> Iterator[str]:
    """The socket's directory of a server of this session."""
    if postgres.find_binary("postgres") is None or postgres.find_binary("initdb") is None:
        pytest.skip("PostgreSQL's programs (initdb, postgres) are not installed; only SQLite is tested")
    with postgres.server() as socket:
        yield socket


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/registry.db"
    import psycopg

    socket = request.getfixturevalue("postgres_socket")
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(f"host={socket} user=loraport dbname=postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    return f"postgresql+psycopg://loraport@/{name}?host={socket}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the store of `address` keeps its objects."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """A store's address."""
    with s3_server(folder) as address:
        yield address


@pytest.fixture
async def rig(tmp_path: Path, address: str, folder: Path) -> AsyncIterator[Rig]:
    """A loader on that store; files that need another one have a `rig` of their own."""
    async with running(tmp_path, address, folder) as rig:
        yield rig
        rig.service.host._tier.check()
