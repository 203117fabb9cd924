"""What goes wrong gets a typed error in one line, at once, and nothing is lost."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loraport import Client, LoraportError, NotFoundError, UnauthenticatedError
from tests.e2e.harness import Stack, add_tenant, publish

pytestmark = pytest.mark.e2e

CONTEXT = 512
# Far above what an answer takes here, far below any timeout of the client: what hangs fails.
SOON_S = 50


@pytest.fixture(scope="module")
def served(stack: Stack, world_dir: Path) -> str:
    """An adapter of initech that serves."""
    add_tenant(stack, "initech")
    publish(stack, world_dir / "bundles" / "alpha_1", "initech", "steady")
    return "steady"


@pytest.fixture(autouse=True)
def stays_healthy(stack: Stack, served: str) -> object:
    """After every fault the stack still answers."""
    yield
    answer = stack.ok("generate", "a", "--tenant", "initech", "--adapter", served, "--max-tokens", "2")
    assert len(answer["token_ids"]) <= 2


def first_failure(ask: Callable[[], object]) -> LoraportError:
    """Asks until the answer is a failure, and returns it."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        try:
            ask()
        except LoraportError as error:
            return error
        time.sleep(0.1)
    raise AssertionError("it never failed")


def ids(count: int) -> str:
    return ",".join(["7"] * count)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a", "--adapter", "unknown"], "ADAPTER_NOT_FOUND"),
        (["a", "--adapter", "Not An Id"], "INVALID_REQUEST|INVALID_NAME|ADAPTER_NOT_FOUND"),
        (["a", "--adapter", "steady", "--alias", "unknown"], "ADAPTER_NOT_FOUND"),
        (["a", "--revision", "sha256:" + "0" * 64], "ADAPTER_NOT_FOUND"),
        ([""], "INVALID_REQUEST"),
        (["--token-ids", ""], "INVALID_REQUEST"),
        (["--token-ids", "1,2,100000"], "INVALID_REQUEST"),
        (["--token-ids", "-1"], "INVALID_REQUEST"),
        (["--token-ids", ids(CONTEXT + 1)], "PROMPT_TOO_LONG"),
        (["--token-ids", ids(CONTEXT)], "PROMPT_TOO_LONG"),
        (["--token-ids", ids(10), "--max-tokens", str(CONTEXT)], "PROMPT_TOO_LONG|INVALID_REQUEST"),
        (["a", "--max-tokens", "1000000"], "PROMPT_TOO_LONG|INVALID_REQUEST"),
        (["a", "--max-tokens", "0"], "INVALID_REQUEST"),
        (["a", "--temperature", "-0.5"], "INVALID_REQUEST"),
        (["a", "--temperature", "nan"], "INVALID_REQUEST"),
        (["a", "--top-p", "1.5"], "INVALID_REQUEST"),
        (["a", "--logprobs", "1000"], "INVALID_REQUEST"),
        (["a", "--base-model", "unknown"], "INVALID_REQUEST|BASE_MODEL_NOT_FOUND|ADAPTER_NOT_FOUND"),
    ],
)
def test_a_bad_request_is_one_line_with_its_reason(stack: Stack, arguments: list[str], reason: str) -> None:
    started = time.monotonic()
    answer = stack.cli("generate", "--tenant", "initech", *arguments)
    assert time.monotonic() - started < SOON_S
    assert answer.code == 1, answer
    assert answer.error.split(":")[0] in reason.split("|")


def test_a_foreign_adapter_is_the_same_as_one_that_never_was(stack: Stack) -> None:
    with Client.local(stack.data, tenant="globex") as client:
        seen = []
        for name in ("steady", "never-was"):
            with pytest.raises(NotFoundError) as caught:
                client.generate("a", adapter=name, max_tokens=1)
            seen.append((caught.value.reason, caught.value.message, caught.value.faults, caught.value.metadata))
        assert seen[0] == seen[1]
        assert "steady" not in {adapter.adapter for adapter in client.list_adapters()}


def test_a_wrong_key_is_refused(stack: Stack) -> None:
    endpoint = f"127.0.0.1:{stack.port_base}"
    ca = stack.data / "pki" / "ca.pem"
    with (
        Client(endpoint, api_key="lk_aaaaaaaaaa_" + "b" * 43, ca_certificate=ca) as client,
        pytest.raises(UnauthenticatedError),
    ):
        client.generate("a", max_tokens=1)


def test_a_revoked_key_is_refused_from_then_on(stack: Stack) -> None:
    made = stack.ok("key", "create", "--tenant", "globex", "--out", str(stack.data / "extra.key"))
    endpoint = f"127.0.0.1:{stack.port_base}"
    with Client(endpoint, api_key=made["secret"], ca_certificate=stack.data / "pki" / "ca.pem") as client:
        assert client.generate("a", max_tokens=1).finish_reason == "length"
        stack.ok("key", "revoke", made["key"], "--tenant", "globex")
        assert isinstance(first_failure(lambda: client.generate("a", max_tokens=1)), UnauthenticatedError)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["tenant", "create", "initech"], "TENANT_EXISTS"),
        (["tenant", "create", "Not_An_Id"], "INVALID_NAME"),
        (["key", "create", "--tenant", "nobody"], "TENANT_NOT_FOUND"),
        (["adapter", "show", "initech/unknown"], "ADAPTER_NOT_FOUND"),
        (["adapter", "approve", "initech/unknown"], "ADAPTER_NOT_FOUND"),
        (["adapter", "revoke", "sha256:" + "0" * 64], "REVISION_NOT_FOUND"),
        (["alias", "set", "initech/steady", "prod", "--revision", "sha256:" + "0" * 64], "REVISION_NOT_FOUND"),
        (["alias", "delete", "initech/steady", "unknown"], "ALIAS_NOT_FOUND"),
    ],
)
def test_admin_faults_are_one_line_with_their_reason(stack: Stack, arguments: list[str], reason: str) -> None:
    answer = stack.cli(*arguments)
    assert answer.code == 1, answer
    assert answer.error.split(":")[0] == reason


def register(stack: Stack, directory: Path, *more: str) -> str:
    arguments = ("--tenant", "initech", "--name", "broken", "--base", "tiny", *more)
    answer = stack.cli("adapter", "register", str(directory), *arguments)
    assert answer.code == 1, answer
    return answer.error


def test_directories_that_cannot_be_read_are_named(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "Not a directory" in register(stack, file)
    assert "No such file or directory" in register(stack, tmp_path / "nowhere")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    try:
        closed.iterdir().__next__()
    except PermissionError:
        assert "Permission denied" in register(stack, closed)
    except StopIteration:
        pass  # root reads everything
    finally:
        closed.chmod(0o700)


def test_an_unknown_base_or_signer_is_named(stack: Stack, world_dir: Path) -> None:
    bundle = world_dir / "bundles" / "alpha_1"
    arguments = ("--tenant", "initech", "--name", "x", "--base", "unknown")
    assert stack.cli("adapter", "register", str(bundle), *arguments).error.startswith("BASE_MODEL_NOT_FOUND")
    assert "loraport signer create --tenant initech" in register(stack, bundle, "--signer", "unknown")


def test_a_revoked_revision_stops_serving(stack: Stack, world_dir: Path) -> None:
    made = publish(stack, world_dir / "bundles" / "alpha_64", "initech", "doomed")
    with Client.local(stack.data, tenant="initech") as client:
        assert client.generate("a", adapter="doomed", max_tokens=1).revision_id == made["revision_id"]
        stack.ok("adapter", "revoke", made["revision_id"], "--reason", "test")
        error = first_failure(lambda: client.generate("a", adapter="doomed", max_tokens=1))
        assert error.reason in ("REVISION_NOT_ACTIVE", "ADAPTER_NOT_FOUND")
