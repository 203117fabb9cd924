"""Configuration: one frozen dataclass per service, read once from a JSON file, every fault listed."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from loraport.bundle.canonical import StrictJsonError, load_strict

MAX_CONFIG_BYTES = 1 << 20

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line that says what to change."""


def load_config(kind: type[T], path: str | Path) -> T:
    """Reads `path` into the dataclass `kind`; unknown, missing and mistyped fields are all refused.

    Raises:
        ConfigError: the file is unreadable, or its content does not fit `kind`.
    """
    try:
        data = Path(path).read_bytes()
        value = load_strict(data, max_bytes=MAX_CONFIG_BYTES, max_depth=8, allow_floats=True)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except StrictJsonError as error:
        raise ConfigError(f"{path} is not usable: {error.detail}") from None
    return from_mapping(kind, value, where=str(path))


def from_mapping(kind: type[T], value: Any, *, where: str) -> T:
    """Builds the dataclass `kind` from a JSON object.

    Raises:
        ConfigError: with every fault, and `where` in front.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object")
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    hints = typing.get_type_hints(kind)
    faults = [f"unknown field {name!r}" for name in sorted(set(value) - set(fields))]
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            try:
                arguments[name] = _convert(hints[name], value[name], f"{where}: {name}")
            except ConfigError as error:
                faults.append(str(error).removeprefix(f"{where}: "))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"field {name!r} is missing")
    if faults:
        raise ConfigError(f"{where}: " + "; ".join(faults))
    try:
        return kind(**arguments)
    except ValueError as error:  # a combination that __post_init__ refuses
        raise ConfigError(f"{where}: {error}") from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _convert(options[0], value, where)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{where} must be one of {', '.join(map(str, typing.get_args(hint)))}")
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(typing.get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _convert(typing.get_args(hint)[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_mapping(hint, value, where=where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    if not plain:
        raise ConfigError(f"{where} must be {getattr(hint, '__name__', hint)}, not {type(value).__name__}")
    return value
