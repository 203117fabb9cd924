"""Arguments to requests, events to completions, and finding a local stack; what needs a router is in tests/contract."""

import json
from pathlib import Path

import pytest

from loraport import Client, InternalError, InvalidArgumentError, UnauthenticatedError, UnavailableError, wire
from loraport.completion import CompletionBuilder
from loraport.dev.layout import ENDPOINTS_SCHEMA
from loraport.dev.pki import make_ca
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.values import Finished, Started, Tokens, Usage

KEY = "lk_abcdefghij_" + "S" * 43
STARTED = Started(
    revision_id="r", version="v1", base_id="b", executor="e", queue_ms=1.0, load_ms=2.0, prompt_token_ids=(1,), rollout_arm="",
)  # fmt: skip


def finished(index: int = 0) -> Finished:
    return Finished(
        index=index, finish_reason="stop", usage=Usage(1, 2, 0), kernel_path="k", max_batch_adapter_count=1, stop_match="",
    )  # fmt: skip


def tokens(index: int, ids: tuple[int, ...], text: str) -> Tokens:
    return Tokens(index=index, token_ids=ids, text=text, logprobs=())


def test_arguments_become_a_request() -> None:
    request = wire.generate_request(
        "hi",
        {
            "adapter": "bot", "alias": "beta", "temperature": 0.0, "stop": "END", "stop_token_ids": [3], "max_tokens": 5,
            "logit_bias": {1: 2.0}, "seed": None, "session_id": "s", "priority": -1, "first_token_timeout": 0.5,
        },
    )  # fmt: skip
    assert (request.target.adapter, request.target.alias, request.prompt) == ("bot", "beta", "hi")
    sampling = request.sampling
    assert (sampling.HasField("temperature"), sampling.temperature, sampling.HasField("seed")) == (True, 0.0, False)
    assert (list(sampling.stop), list(sampling.stop_token_ids), dict(sampling.logit_bias)) == (["END"], [3], {1: 2.0})
    assert (request.session_id, request.priority, request.first_token_timeout.ToMilliseconds()) == ("s", -1, 500)
    base = wire.generate_request(None, {"messages": [{"role": "user", "content": "hi"}], "adapter": None})
    assert base.target.WhichOneof("selector") is None
    assert base.messages.messages[0].content == "hi"
    assert wire.generate_request("", {"adapter": ""}).target.WhichOneof("selector") == "adapter"


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (None, {}),
        ("x", {"prompt_token_ids": [1]}),
        ("x", {"messages": []}),
        ("x", {"adapter": "a", "revision_id": "r"}),
        ("x", {"colour": "red"}),
        ("x", {"temperature": "hot"}),
        ("x", {"max_tokens": 2**40}),
        (None, {"prompt_token_ids": [2**40]}),
        (None, {"prompt_token_ids": ["a"]}),
        (None, {"messages": [{"role": "user"}]}),
    ],
)
def test_arguments_that_cannot_be_right(prompt: str | None, options: dict) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        wire.generate_request(prompt, options)
    assert "\n" not in str(caught.value)


def test_events_become_a_completion() -> None:
    builder = CompletionBuilder()
    for event in (STARTED, tokens(1, (5,), "b"), tokens(0, (1,), "a"), finished(1), tokens(0, (2,), "c"), finished(0)):
        builder.add(event)
    done = builder.result()
    assert [(answer.text, answer.token_ids) for answer in done.answers] == [("ac", (1, 2)), ("b", (5,))]
    assert (done.text, done.token_ids, done.finish_reason, done.usage) == ("ac", (1, 2), "stop", Usage(1, 2, 0))
    assert (done.kernel_path, done.max_batch_adapter_count, done.stop_match, done.logprobs) == ("k", 1, "", ())


@pytest.mark.parametrize("events", [(), (STARTED,), (finished(),), (STARTED, tokens(0, (1,), "a"), finished(1))])
def test_a_stream_that_ends_early_is_no_completion(events: tuple) -> None:
    builder = CompletionBuilder()
    for event in events:
        builder.add(event)
    with pytest.raises(InternalError):
        builder.result()


def test_an_unknown_event_is_passed_over() -> None:
    events = [pb.GenerateResponse.Event(), pb.GenerateResponse.Event(tokens=pb.GenerateResponse.Tokens(text="a"))]
    assert wire.events_from_proto(pb.GenerateResponse(events=events), "id") == [
        Tokens(index=0, token_ids=(), text="a", logprobs=())
    ]


@pytest.mark.parametrize("tenant", ["../pki/admin", "", "/etc/passwd", "A", "a/b"])
def test_a_tenant_is_never_a_path(tmp_path: Path, tenant: str) -> None:
    endpoints = {"schema": ENDPOINTS_SCHEMA, "router": "127.0.0.1:1", "credentials": {"ca": "ca.pem"}}
    (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
    with pytest.raises(UnauthenticatedError, match="no tenant's id"):
        Client.local(tmp_path, tenant=tenant)


def test_local_looks_where_the_command_line_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPORT_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(UnavailableError, match="elsewhere"):
        Client.local(tenant="acme")


def test_local_finds_the_stack_and_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no local stack") as caught:
        Client.local(tmp_path, tenant="acme")
    assert caught.value.reason == "NO_LOCAL_STACK"
    endpoints = {"schema": ENDPOINTS_SCHEMA, "router": "127.0.0.1:1", "credentials": {"ca": "ca.pem"}}
    (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))
    (tmp_path / "ca.pem").write_bytes(make_ca("local")[0])
    with pytest.raises(UnauthenticatedError, match="loraport key create"):
        Client.local(tmp_path, tenant="acme")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "acme.key").write_text(KEY + "\n")
    with (
        Client.local(tmp_path, tenant="acme", timeout=60) as client,
        pytest.raises(UnavailableError, match=r"cannot reach 127\.0\.0\.1:1"),
    ):
        client.generate("hi")


def test_settings_hide_the_key_and_are_checked(tmp_path: Path) -> None:
    settings = wire.make_settings("host:1", api_key=f" {KEY}\n", ca_certificate=None, timeout=1.0, tenant="acme")
    assert KEY not in repr(settings)
    assert dict(settings.metadata("r1")) == {"authorization": f"Bearer {KEY}", "x-request-id": "r1"}
    assert settings.adapter_name("bot") == "tenants/acme/adapters/bot"
    for endpoint, key, ca in (("host", KEY, None), ("https://host:1", KEY, None), ("host:1", KEY, tmp_path / "no.pem")):
        with pytest.raises(InvalidArgumentError):
            Client(endpoint, api_key=key, ca_certificate=ca)
    for key in ("", "é", "a\nb"):
        with pytest.raises(UnauthenticatedError):
            Client("host:1", api_key=key)


def test_exactly_one_credential_and_tokens_are_asked_for_anew() -> None:
    options: dict = {"ca_certificate": None, "timeout": 1.0, "tenant": None}
    for wrong in ({"api_key": None}, {"api_key": KEY, "token": "a.b.c"}, {"api_key": None, "token": " "}):
        with pytest.raises(UnauthenticatedError):
            wire.make_settings("host:1", **wrong, **options)
    given = iter(["one", " two\n", ""])
    settings = wire.make_settings("host:1", api_key=None, token=lambda: next(given), **options)
    assert settings.metadata("r")[0] == ("authorization", "Bearer one")
    assert settings.metadata("r")[0] == ("authorization", "Bearer two")
    with pytest.raises(UnauthenticatedError):
        settings.metadata("r")
