"""What `from loraport import …` offers is a promise: every name is there, documented, and none is forgotten."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import loraport
from loraport import aio, client, errors, values


def public(module) -> set[str]:
    return {
        name
        for name, member in vars(module).items()
        if inspect.isclass(member) and member.__module__ == module.__name__ and not name.startswith("_")
    }


def test_every_public_class_is_exported() -> None:
    defined = public(errors) | public(values) | {"Client", "AsyncClient", "Event"}
    assert set(loraport.__all__) == defined
    assert loraport.__all__ == sorted(loraport.__all__)


def test_names_are_there_and_documented() -> None:
    for name in loraport.__all__:
        member = getattr(loraport, name)
        if inspect.isclass(member):
            assert inspect.getdoc(member), name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = loraport.Nothing


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    assert calls(client.Client) == calls(aio.AsyncClient)


def test_the_bundle_format_needs_no_grpc() -> None:
    code = "import sys, loraport.bundle.verify; assert 'grpc' not in sys.modules"
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
