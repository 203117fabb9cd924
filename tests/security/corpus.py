"""Malformed bundles of our own: what is wrong with each, how it must be named, and who is the offender.

Everything is made of bytes here, by numpy, struct and json alone, around one honest adapter of a base. `source` is the
fault kind in our notes on formats and on bugs seen in the field. `codes` are all codes of the verdict, not some of them:
a fault that hides another one, or that is blamed on a bystander, fails as well.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loraport.bundle.base import BaseModule, BaseSpec
from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME
from tests import bundle_files
from tests.bundle_files import a_name, b_name, encode, entries, pack

Q0, V0, Q1, V1 = bundle_files.Q0, bundle_files.V0, bundle_files.Q1, bundle_files.V1
ADAPTED = (Q0, V0, Q1, V1)
RANK = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One malformed bundle. None for a file that is not there; `disturb` changes the directory after it was written.

    `offender` is in the detail or the subject of a violation.
    """

    name: str
    source: str
    codes: frozenset[str]
    offender: str
    config: bytes | None
    weights: bytes | None
    disturb: Callable[[Path], None] | None = None

    def write(self, folder: Path) -> None:
        """Lays the bundle out in an empty directory."""
        for name, data in ((CONFIG_NAME, self.config), (WEIGHTS_NAME, self.weights)):
            if data is not None:
                (folder / name).write_bytes(data)
        if self.disturb is not None:
            self.disturb(folder)


class Kit:
    """Makes bundles for one base, around an honest adapter of rank 2 on q_proj and v_proj of two layers."""

    def __init__(self, base: BaseSpec) -> None:
        self.base = base
        self.modules: Mapping[str, BaseModule] = {module.path: module for module in base.modules}
        self.tensors = self.pairs(dict.fromkeys(ADAPTED, RANK))
        self.good_config = encode(bundle_files.config())
        self.good_weights = pack(*entries(self.tensors))

    def pairs(self, ranks: Mapping[str, int]) -> dict[str, np.ndarray]:
        """A and B of modules of the base, with the ranks given."""
        rng = np.random.default_rng(11)
        result = {}
        for path, rank in ranks.items():
            module = self.modules[path]
            result[a_name(path)] = rng.standard_normal((rank, module.in_features), dtype=np.float32)
            result[b_name(path)] = rng.standard_normal((module.out_features, rank), dtype=np.float32)
        return result

    def case(self, source: str, name: str, codes: str, offender: str, **files: Any) -> Case:
        """A case of which everything is honest that is not given. `codes` are separated by spaces."""
        fields: dict[str, Any] = {"config": self.good_config, "weights": self.good_weights, **files}
        return Case(name=name, source=source, codes=frozenset(codes.split()), offender=offender, **fields)

    def configured(self, source: str, name: str, codes: str, offender: str, **changes: Any) -> Case:
        """A case whose config has other values; `...` drops a key."""
        return self.case(source, name, codes, offender, config=encode(bundle_files.config(**changes)))

    def tensed(self, source: str, name: str, codes: str, offender: str, values: Mapping[str, np.ndarray]) -> Case:
        """A case whose weights file holds these tensors."""
        return self.case(source, name, codes, offender, weights=pack(*entries(values)))

    def added(self, *names: str, shape: tuple[int, ...] = (2, 2)) -> dict[str, np.ndarray]:
        """The honest tensors and further ones."""
        return self.tensors | {name: np.ones(shape, np.float32) for name in names}

    def renamed(self, change: Callable[[str], str]) -> dict[str, np.ndarray]:
        """The honest tensors under other names."""
        return {change(name): value for name, value in self.tensors.items()}

    def header(self, dtype: str = "F32") -> tuple[dict[str, Any], bytes]:
        """The honest header as an object, and the data."""
        return entries(self.tensors, dtype)

    def entry(self, name: str = a_name(Q0), **changes: Any) -> bytes:
        """A weights file in which one tensor's entry has other values."""
        header, data = self.header()
        return pack({**header, name: {**header[name], **changes}}, data)


def raw(text: str | bytes, data: bytes = b"", *, length: int | None = None, align: bool = True) -> bytes:
    """A weights file with a header of these very bytes."""
    return pack(text.encode() if isinstance(text, str) else text, data, length=length, align=align)


def gguf() -> bytes:
    """An adapter as llama.cpp has it: magic, version, counts, then typed key and value pairs."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [("general.type", "adapter"), ("adapter.type", "lora")]
    body = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in pairs)
    alpha = text("adapter.lora.alpha") + struct.pack("<If", 6, 16.0)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + body + alpha + bytes(64)


def corpus(base: BaseSpec) -> tuple[Case, ...]:
    """Every case, for one base."""
    from tests.security import corpus_configs, corpus_files, corpus_headers, corpus_tensors

    kit = Kit(base)
    rooms = (corpus_configs, corpus_headers, corpus_tensors, corpus_files)
    cases = tuple(case for room in rooms for case in room.cases(kit))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases of one name"
    return cases
