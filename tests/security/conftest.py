"""One hostile server for all tests of a module; databases, stores and loaders as in the contract tests."""

from collections.abc import Iterator

import pytest

from tests.contract.conftest import address, folder, postgres_socket, rig, url  # noqa: F401 - fixtures
from tests.security.hostile import DATA, World, hostile_world


@pytest.fixture(scope="module")
def shared_world() -> Iterator[World]:
    with hostile_world() as world:
        yield world


@pytest.fixture
def world(shared_world: World) -> World:
    """The server, with nothing left of the test before."""
    fresh = World(shared_world.authorities, shared_world.port)
    for name in ("names", "requests", "resolved", "connected"):
        setattr(shared_world, name, getattr(fresh, name))
    shared_world.script = lambda request, wire: wire.file(DATA, ETag='"1"')
    return shared_world
