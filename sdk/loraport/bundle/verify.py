"""The one verification of a bundle: bytes in, every violation or an identity out.

Publisher and loader run this same code. Config and header are judged before anything larger than
them is read; then the data is read once, in order, in pieces, hashed and looked at while it is at
hand. Nothing is executed, imported, opened or fetched on the word of the bundle.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from loraport.bundle.base import BaseSpec
from loraport.bundle.digest import PREFIX, sha256_digest
from loraport.bundle.identity import WeightsFacts, build_identity, revision_id_of
from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME, check_training, is_name
from loraport.bundle.module_table import NO_TABLE, ModuleTable, resolve_modules
from loraport.bundle.peft_config import PeftConfig, parse_config
from loraport.bundle.safetensors_header import PREFIX_BYTES, Header, header_length, parse_header
from loraport.bundle.tensor_values import TensorScan, judge_values
from loraport.bundle.verdict import DEFAULT_LIMITS, Limits, Verdict, Violation

# Large enough that numpy's fixed cost per call vanishes, small enough to stay in a core's cache.
CHUNK_BYTES = 512 * 1024

_NEVER_OPENED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".gguf", ".tensors", ".npz", ".nemo")
_TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
        "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Findings:
    """Grows while a bundle is looked at."""

    violations: list[Violation]
    warnings: list[Violation]


class _Source:
    """The weights, read once from front to back, hashed on the way. Pieces are valid until the next read."""

    def __init__(self, weights: bytes | bytearray | memoryview | BinaryIO) -> None:
        if isinstance(weights, bytes | bytearray | memoryview):
            self._view: memoryview | None = memoryview(weights).cast("B")
            self.size = len(self._view)
        else:
            self._view = None
            self._file = weights
            self.size = weights.seek(0, 2)
            weights.seek(0)
            self._buffer = memoryview(bytearray(CHUNK_BYTES))
        self._hash = hashlib.sha256()
        self._position = 0

    def read(self, count: int) -> memoryview:
        """Returns the next `count` bytes, fewer at the end of the file."""
        if self._view is not None:
            piece = self._view[self._position : self._position + count]
        elif count <= CHUNK_BYTES:
            piece = self._buffer[: _fill(self._file, self._buffer[:count])]
        else:
            piece = memoryview(self._file.read(count))
        self._position += len(piece)
        self._hash.update(piece)
        return piece

    def pieces(self, count: int) -> Iterator[memoryview]:
        """Yields the next `count` bytes in pieces of CHUNK_BYTES, the last one shorter."""
        while count > 0:
            piece = self.read(min(count, CHUNK_BYTES))
            if not piece:
                return
            count -= len(piece)
            yield piece

    def digest(self) -> str | None:
        """Returns the digest of the file once all of it was read."""
        return PREFIX + self._hash.hexdigest() if self._position == self.size else None


def _fill(file: BinaryIO, buffer: memoryview) -> int:
    """Reads until the buffer is full or the file ends; returns the number of bytes read."""
    filled = 0
    while filled < len(buffer):
        piece = file.read(len(buffer) - filled)
        if not piece:
            break
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
    return filled


def verify_bundle(
    config: bytes | None,
    weights: bytes | bytearray | memoryview | BinaryIO | None,
    *,
    base: BaseSpec,
    tenant: str,
    limits: Limits = DEFAULT_LIMITS,
    other_files: Sequence[str] = (),
    file_violations: Sequence[Violation] = (),
    training: Mapping[str, str] | None = None,
) -> Verdict:
    """Verifies a bundle against one base and says everything that is wrong with it.

    `config` is the content of adapter_config.json and `weights` that of adapter_model.safetensors;
    None where the file is missing. A file object must be seekable and is read once, in pieces.
    `other_files` are the names of what else lies in the bundle; they are never opened.
    `file_violations` are faults that were seen when the files were opened. `training` is
    provenance that the publisher declares; it is part of the identity.

    Whatever the bytes are, the answer is a verdict. The bytes of a file whose header is refused
    are not read further, so `weights_digest` is then None.

    Raises:
        ValueError: `tenant` or `training` is not legal; these come from the caller, not the bundle.
        OSError: a file object could not be read.
    """
    if not is_name(tenant):
        raise ValueError(f"not a legal tenant name: {tenant!r:.80}")
    check_training(training or {})
    source = None if weights is None else _Source(weights)
    findings = _Findings(*_check_files(config, weights, other_files, file_violations))
    parsed = None
    if config is not None:
        parsed, found = parse_config(config, limits=limits)
        findings.violations.extend(found)
    header, table = None, NO_TABLE
    if source is not None:
        header, table = _check_weights(source, parsed, base, limits, findings)
    digest = source.digest() if source is not None and header is not None else None
    dtype = header.tensors[0].dtype if header is not None and header.tensors else None
    identity = None
    if not findings.violations and source is not None and digest is not None and dtype is not None:
        files = WeightsFacts(digest, source.size, dtype)
        identity = build_identity(files, table.modules, tenant=tenant, base=base, training=training or {})
    return Verdict(
        admitted=identity is not None,
        violations=_capped(findings.violations, limits),
        warnings=_capped(findings.warnings, limits),
        identity=identity,
        revision_id=revision_id_of(identity) if identity is not None else None,
        modules=table.modules,
        dtype=dtype,
        weights_digest=digest,
        weights_size=None if source is None else source.size,
        config_digest=None if config is None else sha256_digest(config),
        config_size=None if config is None else len(config),
    )


def _check_weights(
    source: _Source, config: PeftConfig | None, base: BaseSpec, limits: Limits, findings: _Findings
) -> tuple[Header | None, ModuleTable]:
    """Reads the weights to the end, or to a header that is refused."""
    header, found = _read_header(source, limits)
    findings.violations.extend(found)
    if header is None:
        return None, NO_TABLE
    table = resolve_modules(config, header, base, limits=limits)
    findings.violations.extend(table.violations)
    findings.warnings.extend(table.warnings)
    if len(findings.violations) < limits.max_listed:
        wrong, notes = judge_values(_scan(source, header), table.modules, limits)
        findings.violations.extend(wrong)
        findings.warnings.extend(notes)
    else:  # thousands of foreign tensors: nobody will read more, so the values are only hashed
        for _ in source.pieces(source.size - header.data_start):
            pass
    if source.digest() is None:
        detail = "the file became shorter while it was read"
        findings.violations.append(Violation("DATA_TRUNCATED", detail, WEIGHTS_NAME))
    return header, table


def _check_files(
    config: bytes | None, weights: object | None, other_files: Sequence[str], file_violations: Sequence[Violation]
) -> tuple[list[Violation], list[Violation]]:
    violations, warnings = list(file_violations), []
    faulty = {violation.subject for violation in file_violations}
    if config is None and CONFIG_NAME not in faulty:
        violations.append(Violation("NO_CONFIG", f"{CONFIG_NAME} is missing", CONFIG_NAME))
    if weights is None and WEIGHTS_NAME not in faulty:
        violations.append(Violation("NO_WEIGHTS", f"{WEIGHTS_NAME} is missing", WEIGHTS_NAME))
        for name in sorted(set(other_files)):
            if name.lower().endswith(_NEVER_OPENED):
                violations.append(
                    Violation("PICKLE_ONLY", f"{name:.200} is never opened; use {WEIGHTS_NAME}", name[:200])
                )
    for name in sorted(other_files):
        if name in _TOKENIZER_FILES:
            detail = f"{name} is ignored; the base's own tokenizer and chat template are used"
            warnings.append(Violation("IGNORED_TOKENIZER", detail, name))
        else:
            warnings.append(Violation("IGNORED_FILE", f"{name!r:.200} is ignored", name[:200]))
    return violations, warnings


def _read_header(source: _Source, limits: Limits) -> tuple[Header | None, tuple[Violation, ...]]:
    if source.size == 0:
        return None, (Violation("EMPTY_FILE", f"{WEIGHTS_NAME} has no bytes", WEIGHTS_NAME),)
    if source.size > limits.max_file_bytes:
        detail = f"{source.size} bytes, the limit is {limits.max_file_bytes}"
        return None, (Violation("FILE_TOO_LARGE", detail, WEIGHTS_NAME),)
    length = header_length(bytes(source.read(PREFIX_BYTES)), file_size=source.size, limits=limits)
    if isinstance(length, Violation):
        return None, (length,)
    return parse_header(bytes(source.read(length)), file_size=source.size, limits=limits)


def _scan(source: _Source, header: Header) -> list[TensorScan]:
    """Reads all tensors, which cover the rest of the file exactly."""
    scans = []
    for tensor in header.tensors:
        scan = TensorScan(tensor)
        for piece in source.pieces(tensor.end - tensor.begin):
            scan.add(piece)
        scans.append(scan)
    return scans


def _capped(items: Sequence[Violation], limits: Limits) -> tuple[Violation, ...]:
    if len(items) <= limits.max_listed:
        return tuple(items)
    more = Violation("MORE_VIOLATIONS", f"{len(items) - limits.max_listed} more are not listed")
    return (*items[: limits.max_listed], more)
