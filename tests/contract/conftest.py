"""Every registry test runs on SQLite and on a real PostgreSQL, where its programs are installed."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import postgres


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
