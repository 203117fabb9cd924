"""The contract's own rules: every element documented, names and numbers by one rule."""

import importlib.resources
import re
import sysconfig
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from services.shared.access import POLICIES
from services.shared.errors import REASONS

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
FILES = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))

F = descriptor_pb2.FieldDescriptorProto
UNSIGNED = {F.TYPE_UINT32, F.TYPE_UINT64, F.TYPE_FIXED32, F.TYPE_FIXED64}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "all.bin"
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{well_known}",
            f"-I{sysconfig.get_paths()['purelib']}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
            *FILES,
        ]
    )
    assert code == 0
    parsed = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return {file.name: file for file in parsed.file}


def elements(file: descriptor_pb2.FileDescriptorProto):
    """Yields (path, kind, descriptor, comment) of everything in a file that must be documented."""
    comments = {tuple(loc.path): loc.leading_comments.strip() for loc in file.source_code_info.location}

    def message(path, item):
        yield path, "message", item, comments.get(path, "")
        for i, field in enumerate(item.field):
            yield (*path, 2, i), "field", field, comments.get((*path, 2, i), "")
        for i, one in enumerate(item.oneof_decl):
            if not one.name.startswith("_"):  # an optional scalar
                yield (*path, 8, i), "oneof", one, comments.get((*path, 8, i), "")
        for i, nested in enumerate(item.nested_type):
            if not nested.options.map_entry:
                yield from message((*path, 3, i), nested)
        for i, enum in enumerate(item.enum_type):
            yield from enumeration((*path, 4, i), enum)

    def enumeration(path, item):
        yield path, "enum", item, comments.get(path, "")
        for i, value in enumerate(item.value):
            yield (*path, 2, i), "value", (item, value), comments.get((*path, 2, i), "")

    for i, item in enumerate(file.message_type):
        yield from message((4, i), item)
    for i, item in enumerate(file.enum_type):
        yield from enumeration((5, i), item)
    for i, service in enumerate(file.service):
        yield (6, i), "service", service, comments.get((6, i), "")
        for j, method in enumerate(service.method):
            yield (6, i, 2, j), "rpc", method, comments.get((6, i, 2, j), "")


def test_everything_is_documented_in_sentences(files) -> None:
    for file in files.values():
        for path, kind, item, comment in elements(file):
            name = item[1].name if kind == "value" else item.name
            assert comment, f"{file.name}: {kind} {name} {path} has no comment"
            assert comment.endswith("."), f"{file.name}: the comment of {kind} {name} is not a sentence"


def test_packages_follow_directories(files) -> None:
    for name, file in files.items():
        assert file.package == ".".join(Path(name).parent.parts)
        assert re.fullmatch(r"loraport\.[a-z]+\.v1", file.package)
        assert len(file.service) <= 1
        if file.service:
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", file.service[0].name).lower()
            assert Path(name).name == f"{snake}.proto"
            assert file.service[0].name.endswith("Service")


def test_fields(files) -> None:
    for file in files.values():
        for _path, kind, item, _comment in elements(file):
            if kind != "field":
                continue
            assert re.fullmatch(r"[a-z][a-z0-9_]*", item.name)
            assert item.type not in UNSIGNED, f"{file.name}: {item.name} is unsigned (AIP-141)"
            if item.type_name == ".google.protobuf.Timestamp":
                assert item.name.endswith("_time"), f"{file.name}: {item.name}"
            assert not item.name.endswith("_bytes") or item.type == F.TYPE_INT64


def test_enums_begin_unspecified_and_carry_their_name(files) -> None:
    for file in files.values():
        for _path, kind, item, _comment in elements(file):
            if kind == "enum":
                prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", item.name).upper()
                assert item.value[0].name == f"{prefix}_UNSPECIFIED"
                assert item.value[0].number == 0
                assert all(value.name.startswith(prefix + "_") for value in item.value)


def test_rpcs_state_errors_that_exist_and_idempotence(files) -> None:
    for file in files.values():
        for _path, kind, item, comment in elements(file):
            if kind != "rpc":
                continue
            text = " ".join(comment.split())
            assert re.match(r"[A-Z][a-z]+s\b|Says|Does", text), f"{item.name}: begin with a verb in the third person"
            assert re.search(r"[Ii]dempotent|validate_only|^Streams|Errors: as|Lets|Fetches", text), item.name
            codes = {code.name for code, _ in REASONS.values()}
            for word in re.findall(r"`([A-Z][A-Z_]{3,})`", text):
                assert word in REASONS or word in codes, f"{file.name}: {item.name} names the unknown {word}"


def test_list_calls_page(files) -> None:
    for file in files.values():
        messages = {item.name: item for item in file.message_type}
        for service in file.service:
            for method in service.method:
                request = messages[method.input_type.rsplit(".", 1)[1]]
                response = messages.get(method.output_type.rsplit(".", 1)[1])
                names = {field.name for field in request.field}
                if "page_size" in names:
                    assert "page_token" in names
                    assert response.field[0].label == F.LABEL_REPEATED
                    assert response.field[1].name == "next_page_token"
                    assert not method.server_streaming


def test_every_method_has_an_access_policy_and_no_policy_is_left_over(files) -> None:
    methods = {
        f"/{file.package}.{service.name}/{method.name}"
        for file in files.values()
        for service in file.service
        for method in service.method
    }
    assert methods == {method for method in POLICIES if method.startswith("/loraport.")}


def test_service_messages_do_not_cross(files) -> None:
    for file in files.values():
        own = file.package.split(".")[1]
        for dependency in file.dependency:
            if dependency.startswith("loraport/"):
                assert dependency.split("/")[1] in {own, "types"}, f"{file.name} imports {dependency}"
