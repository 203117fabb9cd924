"""A publisher signs that its malformed bundles are fine and uploads them, while another tenant's streams run on."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from loraport import Client, LoraportError
from loraport.admin import AdminClient
from loraport.bundle.base import BaseSpec
from loraport.bundle.digest import parse_digest, sha256_digest
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, sign_envelope
from loraport.bundle.manifest import build_manifest
from loraport.bundle.verdict import Verdict
from loraport.bundle.verify import verify_bundle
from loraport.dev.layout import Layout
from loraport.publish import CHUNK_BYTES, state_name, upload_parts
from tests.e2e.harness import Stack, add_tenant, publish, wait_until
from tests.loader_rig import stored
from tests.security.corpus import Case, Kit, corpus

pytestmark = pytest.mark.e2e

HOSTILE = "mallory"
PROMPT = [7 + number * 5 % 200 for number in range(20)]
LENGTH = 64


@pytest.fixture(scope="module")
def spec(stack: Stack) -> BaseSpec:
    """The base as the stack knows it; the hostile tenant is there as well."""
    add_tenant(stack, HOSTILE)
    with AdminClient.local(stack.data) as admin:
        return admin.base_spec("tiny")


def representatives(spec: BaseSpec) -> list[Case]:
    """One case for each set of codes, of those that can be sent at all."""
    found: dict[frozenset[str], Case] = {}
    for case in corpus(spec):
        config, weights = case.config or b"", case.weights or b""
        if case.disturb is None and 0 < len(config) <= CHUNK_BYTES // 4 and 0 < len(weights) < 2**20:
            found.setdefault(case.codes, case)
    return list(found.values())


def claim(spec: BaseSpec, mark: str, config: bytes, weights: bytes, **lies: Any) -> Verdict:
    """What an honest verification of these bytes would say if they were an honest bundle, but for the lies."""
    kit = Kit(spec)
    honest = verify_bundle(kit.good_config, kit.good_weights, base=spec, tenant=HOSTILE, training={"mark": mark})
    assert honest.identity is not None
    facts = {"sha256": parse_digest(sha256_digest(weights)), "size_bytes": len(weights)}
    return replace(
        honest,
        identity={**honest.identity, "weights": facts, **lies},
        weights_digest=sha256_digest(weights),
        weights_size=len(weights),
        config_digest=sha256_digest(config),
        config_size=len(config),
    )


def send(stack: Stack, admin: AdminClient, adapter: str, verdict: Verdict, config: bytes, weights: bytes) -> Any:
    """Signs a verdict, announces it and sends the bytes; returns (revision id, the loader's answer)."""
    key = SigningKey.load(Layout.at(stack.data).signer_key(HOSTILE, "default"))
    manifest = build_manifest(
        verdict,
        adapter=adapter,
        version=1,
        created_time="2026-01-01T00:00:00Z",
        source={"kind": "directory", "uri": "x"},
    )
    registered = admin.register_revision(HOSTILE, sign_envelope(IN_TOTO_PAYLOAD_TYPE, manifest, key))
    parts = upload_parts(registered.upload_session, config, io.BytesIO(weights))
    return registered.revision.revision_id, admin.upload(parts)


@contextmanager
def witness(stack: Stack, expected: tuple[int, ...]) -> Iterator[list[int]]:
    """Streams one adapter of another tenant again and again; yields the growing list of whole answers' lengths."""
    stop, done, wrong = threading.Event(), [], []

    def run() -> None:
        try:
            with Client.local(stack.data, tenant="globex") as client:
                while not stop.is_set():
                    answer = client.generate(prompt_token_ids=PROMPT, adapter="witness", **_options())
                    assert answer.token_ids == expected
                    done.append(len(answer.token_ids))
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert wrong == []


def _options() -> dict[str, Any]:
    return {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}


def living(stack: Stack) -> dict[str, tuple[int, float]]:
    """Name → pid and start time of every process, each of which lives."""
    found = {}
    for name, pid in stack.processes().items():
        process = psutil.Process(pid)
        assert process.status() != psutil.STATUS_ZOMBIE, name
        found[name] = (pid, process.create_time())
    return found


def test_signed_lies_are_quarantined_while_others_stream(stack: Stack, spec: BaseSpec, world_dir: Path) -> None:
    publish(stack, world_dir / "bundles" / "alpha_8", "globex", "witness")
    with Client.local(stack.data, tenant="globex") as client:
        undisturbed = client.generate(prompt_token_ids=PROMPT, adapter="witness", **_options()).token_ids
    before, cases = living(stack), representatives(spec)
    assert len(cases) >= 30
    with AdminClient.local(stack.data) as admin, witness(stack, undisturbed) as answers:
        for number, case in enumerate(cases):
            check_quarantined(stack, admin, spec, f"bad-{number}", case)
        rows = {row.name: row for number in range(len(cases)) for row in admin.list_revisions(HOSTILE, f"bad-{number}")}
    assert len(answers) >= 1
    assert living(stack) == before
    assert len(rows) == len(cases)
    assert {state_name(row) for row in rows.values()} == {"QUARANTINED"}
    wait_until(lambda: not stored(stack.data / "s3", "quarantine"), within_s=120, what="an empty quarantine")
    print(
        f"\n{len(cases)} malformed uploads quarantined while {len(answers)} answers of another tenant stayed the same"
    )


def check_quarantined(stack: Stack, admin: AdminClient, spec: BaseSpec, adapter: str, case: Case) -> None:
    """Sends a case; the loader's reasons are those of the offline verification, and the revision never serves."""
    assert case.config is not None
    assert case.weights is not None
    verdict = claim(spec, adapter, case.config, case.weights)
    revision_id, answer = send(stack, admin, adapter, verdict, case.config, case.weights)
    assert not answer.admitted, case.name
    assert {item.code for item in answer.violations} == case.codes, (case.name, answer.violations)
    with pytest.raises(LoraportError):
        admin.approve_revision(revision_id)
    assert [item.code for item in admin.get_revision(revision_id).reasons], case.name


def test_lies_about_an_honest_bundle_are_quarantined_too(stack: Stack, spec: BaseSpec) -> None:
    kit = Kit(spec)
    rows = claim(spec, "x", kit.good_config, kit.good_weights).identity["modules"]  # type: ignore[index]
    lies: dict[str, dict[str, Any]] = {
        "louder": {"modules": [{**rows[0], "scaling": (64.0).hex()}, *rows[1:]]},
        "other-alpha": {"modules": [{**row, "alpha": "8"} for row in rows]},
        "fewer-modules": {"modules": rows[1:]},
        "other-path": {"modules": [{**rows[0], "path": "model.layers.0.self_attn.o_proj"}, *rows[1:]]},
        "other-dtype": {"dtype": "BF16"},
    }
    with AdminClient.local(stack.data) as admin:
        for name, lie in lies.items():
            verdict = claim(spec, name, kit.good_config, kit.good_weights, **lie)
            revision_id, answer = send(stack, admin, name, verdict, kit.good_config, kit.good_weights)
            assert not answer.admitted, name
            assert {item.code for item in answer.violations} == {"IDENTITY_MISMATCH"}, (name, answer.violations)
            assert state_name(admin.get_revision(revision_id)) == "QUARANTINED"


def test_a_config_that_is_too_large_is_cut_off(stack: Stack, spec: BaseSpec) -> None:
    kit = Kit(spec)
    config = kit.good_config + b" " * (CHUNK_BYTES - len(kit.good_config))
    with AdminClient.local(stack.data) as admin:
        verdict = claim(spec, "large", config, kit.good_weights)
        with pytest.raises(LoraportError) as caught:
            send(stack, admin, "large", verdict, config, kit.good_weights)
        assert caught.value.reason == "UPLOAD_TOO_LARGE"
        (row,) = admin.list_revisions(HOSTILE, "large")
        assert state_name(row) == "PENDING"
        with pytest.raises(LoraportError):
            admin.approve_revision(row.revision_id)
