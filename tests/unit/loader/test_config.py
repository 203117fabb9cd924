"""The loader's configuration: what does not fit is refused before anything starts."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from services.loader.config import LoaderConfig
from services.loader.slots import Slots
from services.loader.store import read_credentials, verified_key
from services.shared.config import ConfigError, from_mapping

NEEDED = {
    "listen": "127.0.0.1:0",
    "upload_listen": "127.0.0.1:0",
    "tls": {"certificate": "a", "key": "b", "service_ca": "c", "admin_ca": "d"},
    "trust_dir": "trust",
    "signing_key": "key",
    "registry_address": "127.0.0.1:1",
    "s3_endpoint": "127.0.0.1:2",
    "s3_credentials": "s3",
}


def test_few_enough_settings_to_know() -> None:
    assert len(dataclasses.fields(LoaderConfig)) < 25


def test_defaults_fit() -> None:
    assert from_mapping(LoaderConfig, NEEDED, where="test").lease_ttl_s == 300.0


@pytest.mark.parametrize(
    "change",
    [
        {"host_budget_bytes": 0},
        {"turns": {"loads_per_tenant": 0}},
        {"turns": {"uploads": 0}},
        {"lease_ttl_s": 0.0},
        {"drain_s": -1.0},
        {"s3_quarantine_bucket": "loraport-verified"},
        {"node": {"handover_socket": "relative"}},
        {"node": {"handover_socket": "/" + "x" * 107}},
        {"node": {"disk_dir": "/x", "disk_budget_bytes": 0}},
        {"node": {"what": 1}},
        {"what": 1},
        {"listen": 5},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        from_mapping(LoaderConfig, {**NEEDED, **change}, where="test")


def test_credentials_are_two_lines(tmp_path: Path) -> None:
    path = tmp_path / "s3"
    path.write_text("access\nsecret\n")
    assert read_credentials(str(path)) == ("access", "secret")
    for text in ("", "access", "access\n\n", "a\nb\nc"):
        path.write_text(text)
        with pytest.raises(OSError, match="two lines"):
            read_credentials(str(path))


def test_keys_are_made_from_digests_only() -> None:
    assert verified_key("sha256:" + "ab" * 32) == "sha256/ab/" + "ab" * 31
    for bad in ("", "sha256:../../x", "sha256:" + "AB" * 32, "sha256:" + "a" * 63):
        with pytest.raises(ValueError, match="digest"):
            verified_key(bad)


async def test_slots_bound_each_key_and_all() -> None:
    slots = Slots(3, per_key=2)
    running: list[str] = []
    peaks = {"a": 0, "b": 0, "all": 0}

    async def work(key: str) -> None:
        async with slots.hold(key):
            running.append(key)
            for name in ("a", "b"):
                peaks[name] = max(peaks[name], running.count(name))
            peaks["all"] = max(peaks["all"], len(running))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            running.remove(key)

    await asyncio.gather(*(work(key) for key in "aaaaaabbb"))
    assert (peaks["a"], peaks["all"]) == (2, 3)
    assert 1 <= peaks["b"] <= 2
    assert slots._of_key == {}
