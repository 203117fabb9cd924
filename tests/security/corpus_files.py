"""Directories that are refused: pickles under every name, files of two formats, links, pipes, and what is no file."""

import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME
from tests.bundle_files import pack
from tests.security.corpus import Case, Kit, gguf

MARKER = "unpickled-by-accident"
# A pickle that makes a file of that name in the working directory; written by hand, so that nothing here pickles.
PICKLE = b"\x80\x04cos\nmkdir\n(X" + struct.pack("<I", len(MARKER)) + MARKER.encode() + b"tR."


def cases(kit: Kit) -> Iterator[Case]:
    """All cases about what lies in the directory."""
    yield from _pickles(kit)
    yield from _two_formats(kit)
    yield from _not_plain(kit)
    yield from _missing(kit)


def _zip(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, data)
    return out.getvalue()


def _tar(name: str, target: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        archive.addfile(member)
    return out.getvalue()


def _pickles(kit: Kit) -> Iterator[Case]:
    torch_file = _zip("archive/data.pkl", PICKLE)
    for name in (
        "adapter_model.bin",
        "adapter_model.pt",
        "adapter_model.pth",
        "adapter.pkl",
        "adapter.ckpt",
        "ADAPTER_MODEL.BIN",
    ):
        yield kit.case(
            "H3", f"pickle: only {name}", "NO_WEIGHTS PICKLE_ONLY", name, weights=None, disturb=_also(name, torch_file)
        )
    for name in ("adapter_model.gguf", "adapter_model.tensors", "adapter.nemo", "adapter_model.npz"):
        yield kit.case(
            "§10", f"format: only {name}", "NO_WEIGHTS PICKLE_ONLY", name, weights=None, disturb=_also(name, gguf())
        )
    yield kit.case("H3", "pickle: under the right name", "HEADER_LENGTH", "header", weights=PICKLE)
    yield kit.case("H3", "pickle: torch archive under the right name", "HEADER_LENGTH", "header", weights=torch_file)
    yield kit.case(
        "H3",
        "pickle: without an extension",
        "NO_WEIGHTS",
        WEIGHTS_NAME,
        weights=None,
        disturb=_also("adapter_model", PICKLE),
    )
    padded = struct.pack("<Q", len(PICKLE)) + PICKLE
    yield kit.case("H3", "pickle: in the place of the header", "HEADER_NOT_JSON", "{", weights=padded)
    yield kit.case("H3", "pickle: in the place of the config", "CONFIG_NOT_UTF8", "byte 0", config=PICKLE)


def _two_formats(kit: Kit) -> Iterator[Case]:
    archive = _zip("archive/data.pkl", PICKLE)
    header, data = kit.header()
    yield kit.case(
        "§5",
        "polyglot: zip behind the tensors",
        "HEADER_TRAILING_BYTES",
        "after the last",
        weights=kit.good_weights + archive,
    )
    yield kit.case(
        "§5", "polyglot: zip before the header", "HEADER_LENGTH", "header", weights=archive + kit.good_weights
    )
    inside = {
        **header,
        "archive": {"dtype": "U8", "shape": [len(archive)], "data_offsets": [len(data), len(data) + len(archive)]},
    }
    yield kit.case(
        "§5", "polyglot: zip as a tensor of bytes", "UNSUPPORTED_DTYPE", "archive", weights=pack(inside, data + archive)
    )
    room = archive + bytes(-len(archive) % 4)
    floats = {
        **header,
        "archive": {"dtype": "F32", "shape": [1, len(room) // 4], "data_offsets": [len(data), len(data) + len(room)]},
    }
    yield kit.case(
        "§5", "polyglot: zip as a tensor of floats", "UNKNOWN_TENSOR", "archive", weights=pack(floats, data + room)
    )
    yield kit.case("§10", "format: GGUF under the right name", "HEADER_LENGTH", "header", weights=gguf())
    yield kit.case(
        "§5",
        "format: gzip",
        "HEADER_LENGTH",
        "header",
        weights=b"\x1f\x8b\x08\x00" + bytes(4) + b"\x02\xff" + bytes(64),
    )
    yield kit.case(
        "H1", "format: tar with a link outside", "HEADER_NOT_JSON", "{", weights=_tar("x", "../../etc/passwd")
    )
    yield kit.case(
        "§10",
        "format: numpy archive",
        "HEADER_LENGTH",
        "header",
        weights=_zip("a.npy", b"\x93NUMPY\x01\x00" + bytes(64)),
    )
    yield kit.case(
        "§5",
        "format: a page of HTML",
        "HEADER_LENGTH",
        "header",
        weights=b"<!doctype html><title>404</title>" + b" " * 200,
    )
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 1234\n"
    yield kit.case("§5", "format: pointer of Git LFS", "HEADER_LENGTH", "header", weights=pointer)


def _not_plain(kit: Kit) -> Iterator[Case]:
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        for what, disturb in {
            "a link to its own bytes": _link,
            "a link to /etc/passwd": _link_to("/etc/passwd"),
            "a link to a device that never ends": _link_to("/dev/zero"),
            "a link to nothing": _link_to("/nonexistent/x"),
            "a link to itself": _link_to(None),
            "a hard link": _hard_link,
            "a pipe": _pipe,
            "a folder": _folder,
        }.items():
            yield kit.case("H1", f"file: {name} is {what}", "BAD_FILE", name, disturb=_with(disturb, name))


def _missing(kit: Kit) -> Iterator[Case]:
    yield kit.case("G1", "missing: config", "NO_CONFIG", CONFIG_NAME, config=None)
    yield kit.case("G1", "missing: weights", "NO_WEIGHTS", WEIGHTS_NAME, weights=None)
    yield kit.case("G1", "missing: both", "NO_CONFIG NO_WEIGHTS", WEIGHTS_NAME, config=None, weights=None)
    for other in (
        "adapters.safetensors",
        "model.safetensors",
        "Adapter_Model.safetensors",
        "adapter_model.safetensors.index.json",
    ):
        yield kit.case(
            "§10",
            f"missing: only {other}",
            "NO_WEIGHTS",
            WEIGHTS_NAME,
            weights=None,
            disturb=_also(other, kit.good_weights),
        )
    nested = _also("default/adapter_model.safetensors", kit.good_weights)
    yield kit.case("§2", "missing: weights in a folder below", "NO_WEIGHTS", WEIGHTS_NAME, weights=None, disturb=nested)
    yield kit.case("§5", "sparse: a terabyte", "FILE_TOO_LARGE", str(2**40), disturb=_stretch(WEIGHTS_NAME, 2**40))
    yield kit.case(
        "§5",
        "sparse: half a gibibyte of nothing",
        "HEADER_TRAILING_BYTES",
        "after the last",
        disturb=_stretch(WEIGHTS_NAME, 2**29),
    )
    yield kit.case(
        "§5", "sparse: config of 16 GiB", "CONFIG_TOO_LARGE", "65537 bytes", disturb=_stretch(CONFIG_NAME, 2**34)
    )


Disturb = Callable[[Path, str], None]


def _with(disturb: Disturb, name: str) -> Callable[[Path], None]:
    return lambda folder: disturb(folder, name)


def _also(name: str, data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return write


def _stretch(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def _link(folder: Path, name: str) -> None:
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to("elsewhere")


def _link_to(target: str | None) -> Disturb:
    def link(folder: Path, name: str) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target or name)

    return link


def _hard_link(folder: Path, name: str) -> None:
    (folder / "elsewhere").hardlink_to(folder / name)


def _pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def _folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
