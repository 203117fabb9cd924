"""The registry's settings, and the one line that a bad one gives."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from loraport.bundle.envelope import SigningKey
from services.registry.config import RegistryConfig
from services.registry.service import RegistryService
from services.shared.config import ConfigError, load_config
from tests.architecture.source import ROOT
from tests.contract.registry_rig import write_config


def test_the_documented_form_is_read(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    path = tmp_path / "registry.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    assert load_config(RegistryConfig, path) == config
    assert len(dataclasses.fields(RegistryConfig)) < 25


@pytest.mark.parametrize(
    "change",
    [
        {"session_life_s": 59},
        {"session_life_s": 86401},
        {"request_life_s": 1},
        {"poll_interval_s": 0.0},
        {"drain_s": -1.0},
        {"max_rank": 0},
        {"max_weights_bytes": 0},
    ],
)
def test_ranges(tmp_path: Path, change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        write_config(tmp_path, **change)


@pytest.mark.parametrize(
    ("url", "word"), [("sqlite://", "file"), ("mysql://x/y", "mysql"), ("junk", "URL"), ("sqlite:///:memory:", "file")]
)
def test_an_unusable_database_url_is_one_line(tmp_path: Path, url: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RegistryService(write_config(tmp_path, database_url=url))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_signing_key_that_nobody_trusts_is_refused(tmp_path: Path) -> None:
    SigningKey.generate().save(tmp_path / "other.key")
    service = RegistryService(write_config(tmp_path, signing_key_file=str(tmp_path / "other.key")))
    with pytest.raises(ConfigError, match="trust_dir"):
        await service.start()
    service._database.close()


def test_a_short_pepper_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    Path(config.pepper_file).write_bytes(b"short")
    with pytest.raises(ConfigError, match="pepper"):
        RegistryService(config)


def test_a_process_that_cannot_start_says_why_and_exits_2(tmp_path: Path) -> None:
    config = dataclasses.asdict(write_config(tmp_path, database_url="postgresql+psycopg://nobody@127.0.0.1:1/none"))
    path = tmp_path / "registry.json"
    path.write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "services.registry", "--config", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("registry: database_url")
