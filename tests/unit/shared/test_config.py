import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from services.shared.config import ConfigError, load_config


@dataclass(frozen=True)
class Inner:
    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class Config:
    address: str
    rows: int = 8
    dtype: Literal["float32", "bfloat16"] = "float32"
    items: tuple[Inner, ...] = ()
    bases: dict[str, str] | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("rows must be at least 1")


def load(tmp_path: Path, value: object) -> Config:
    path = tmp_path / "config.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return load_config(Config, path)


def test_reads_nested_values(tmp_path: Path) -> None:
    config = load(tmp_path, {"address": "x", "items": [{"name": "a", "weight": 2}], "bases": {"b": "dir"}, "url": None})
    assert config == Config("x", items=(Inner("a", 2.0),), bases={"b": "dir"})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "'address' is missing"),
        ({"address": 1}, "address must be str"),
        ({"address": "x", "rows": True}, "rows must be int"),
        ({"address": "x", "rows": 0}, "rows must be at least 1"),
        ({"address": "x", "dtype": "int8"}, "dtype must be one of"),
        ({"address": "x", "adress": "y"}, "unknown field 'adress'"),
        ({"address": "x", "items": [{}]}, "'name' is missing"),
        ([], "expected an object"),
        ("{", "not usable"),
        ('{"address": "a", "address": "b"}', "occurs twice"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=".*" + said.replace("'", ".")):
        load(tmp_path, value)


def test_every_fault_is_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"rows": "8", "colour": "red"})
    assert all(word in str(caught.value) for word in ("colour", "rows", "address"))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(Config, tmp_path / "absent.json")
