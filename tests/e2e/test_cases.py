"""The adapter cases through a running stack: admitted ones answer token for token, refused ones never serve."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loraport import Client, Completion
from tests.e2e.harness import Stack, publish

pytestmark = pytest.mark.e2e

GREEDY_TOKENS = 24
AT_ONCE = 12


@pytest.fixture(scope="module")
def published(stack: Stack, cases_dir: Path, cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Case → revision id of everything that must be admitted, half of it acme's, half globex's."""
    admitted = [name for name, entry in cases.items() if entry["verdict"] == "admit"]
    return {
        name: publish(stack, cases_dir / "bundles" / name, owner(index), adapter_id(name))["revision_id"]
        for index, name in enumerate(admitted)
    }


def owner(index: int) -> str:
    return ("acme", "globex")[index % 2]


def adapter_id(case: str) -> str:
    return case.replace("_", "-")


def expected(cases_dir: Path, name: str) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads((cases_dir / "expected" / f"{name}.json").read_text())["prompts"]
    return prompts


def test_every_admitted_case_answers_token_for_token_in_mixed_batches(
    stack: Stack, cases_dir: Path, published: dict[str, str]
) -> None:
    clients = {tenant: Client.local(stack.data, tenant=tenant, timeout=120) for tenant in ("acme", "globex")}
    wanted: list[tuple[str | None, str, dict[str, Any]]] = [
        (name, owner(index), prompt) for index, name in enumerate(published) for prompt in expected(cases_dir, name)
    ]
    wanted += [(None, tenant, prompt) for tenant in clients for prompt in expected(cases_dir, "base-tiny")]
    # By prompt first, so that neighbours in time are of different adapters.
    wanted.sort(key=lambda item: len(item[2]["token_ids"]))

    def ask(item: tuple[str | None, str, dict[str, Any]]) -> Completion:
        name, tenant, prompt = item
        return clients[tenant].generate(
            prompt_token_ids=prompt["token_ids"],
            adapter=adapter_id(name) if name else None,
            max_tokens=GREEDY_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            logprobs=5,
        )

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, wanted))
    wrong = [
        (name, len(prompt["token_ids"]))
        for (name, _, prompt), answer in zip(wanted, answers, strict=True)
        if list(answer.token_ids) != prompt["greedy"]
    ]
    assert wrong == []
    for (name, _, prompt), answer in zip(wanted, answers, strict=True):
        assert answer.revision_id == (published[name] if name else "")
        assert list(answer.prompt_token_ids) == prompt["token_ids"]
        first = answer.logprobs[0]
        assert [entry.token_id for entry in first.top] == [token for token, _ in prompt["top5"]]
        # Differences of log-probabilities are those of logits.
        gaps = [entry.logprob - first.top[0].logprob for entry in first.top]
        assert gaps == pytest.approx([logit - prompt["top5"][0][1] for _, logit in prompt["top5"]], abs=2e-3)
    assert max(answer.max_batch_adapter_count for answer in answers) >= 2
    for client in clients.values():
        client.close()


def test_the_command_line_gives_the_same(stack: Stack, cases_dir: Path, published: dict[str, str]) -> None:
    name = next(iter(published))
    prompt = expected(cases_dir, name)[0]
    ids = ",".join(map(str, prompt["token_ids"]))
    for target in (["--adapter", adapter_id(name)], ["--revision", published[name]]):
        arguments = ["--tenant", "acme", *target, "--token-ids", ids, "--max-tokens", "24", "--temperature", "0"]
        answer = stack.ok("generate", *arguments, "--ignore-eos", "--logprobs", "2")
        assert answer["token_ids"] == prompt["greedy"]
        assert answer["revision_id"] == published[name]
        assert answer["finish_reason"] == "length"
        assert answer["executor"] == "tiny-0"
        assert len(answer["logprobs"]) == 24
        assert isinstance(answer["text"], str)


def test_streaming_adds_up_to_the_whole(stack: Stack, published: dict[str, str]) -> None:
    name = next(iter(published))
    arguments = ["generate", "a b c", "--tenant", "acme", "--adapter", adapter_id(name), "--temperature", "0"]
    whole = stack.ok(*arguments, "--max-tokens", "16")
    lines = stack.cli(*arguments, "--max-tokens", "16", "--stream", "--json").out.splitlines()
    events = [json.loads(line) for line in lines]
    assert events[0]["event"] == "started"
    assert events[-1]["event"] == "finished"
    tokens = [event for event in events if event["event"] == "tokens"]
    assert [token for event in tokens for token in event["token_ids"]] == whole["token_ids"]
    assert "".join(event["text"] for event in tokens) == whole["text"]


def test_every_refused_case_is_refused_before_and_by_registration(
    stack: Stack, cases_dir: Path, cases: dict[str, dict[str, Any]], published: dict[str, str]
) -> None:
    base = str(cases_dir / "bases" / "tiny")
    for name, entry in cases.items():
        if entry["verdict"] != "refuse":
            continue
        bundle = str(cases_dir / "bundles" / name)
        verified = stack.cli("adapter", "verify", bundle, "--base", base, "--json")
        assert (verified.code, verified.json["verdict"]) == (1, "refuse"), name
        arguments = ("--tenant", "acme", "--name", adapter_id(name), "--base", "tiny", "--approve", "--json")
        registered = stack.cli("adapter", "register", bundle, *arguments)
        assert registered.code == 1, name
        assert registered.json["state"] in ("REFUSED", "QUARANTINED"), name
        reasons = registered.json["reasons"]
        assert reasons, name
        assert all(reason["code"] and reason["detail"] for reason in reasons), name
        told = json.dumps(verified.json["reasons"])
        assert not [offender for offender in entry["fields"].get("offenders", []) if offender not in told], name
        marker = entry["fields"].get("marker")
        assert marker is None or not Path(marker).exists(), name
    assert stack.ok("dev", "status")["running"] is True
    known = {row["adapter"] for tenant in ("acme", "globex") for row in stack.ok("adapter", "list", "--tenant", tenant)}
    assert not known & {adapter_id(name) for name, entry in cases.items() if entry["verdict"] == "refuse"}


def test_publishing_the_same_bytes_again_changes_nothing(
    stack: Stack, cases_dir: Path, published: dict[str, str]
) -> None:
    name = next(iter(published))
    again = publish(stack, cases_dir / "bundles" / name, "acme", adapter_id(name))
    assert (again["revision_id"], again["version"]) == (published[name], 1)


def test_adapters_are_shown_with_their_revisions(stack: Stack, published: dict[str, str]) -> None:
    name = next(iter(published))
    shown = stack.ok("adapter", "show", f"acme/{adapter_id(name)}")
    assert shown["aliases"] == [{"alias": "prod", "revision_id": published[name], "version": 1}]
    assert [(row["version"], row["state"]) for row in shown["revisions"]] == [(1, "ACTIVE")]
    revision = stack.ok("adapter", "show", published[name])
    assert (revision["adapter"], revision["base"]) == (adapter_id(name), "tiny")
    (executor,) = stack.ok("residency")
    assert executor["executor"] == "tiny-0"
    assert executor["serving"] is True
