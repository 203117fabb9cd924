#!/usr/bin/env python3
"""The main job, end to end: two tenants' signed adapters, served in one batch on one base model.

    python examples/demo.py [--data DIR] [--port-base N]

Starts the local stack, creates the tenants acme and globex, publishes the three example adapters through the command
line's own code, sends eight prompts at once over the base model and all adapters, and prints who answered what. Then
it checks what it claims: every answer equals what PEFT gives for the same bytes, acme cannot see globex's adapter, and
a tampered adapter is not admitted. Writes DATA/demo.json. Exit code 0 only when all of it holds.

May be run again and again. Its stack is its own, below DATA/demo and on ports of its own: it neither finds nor leaves
tenants and keys in the stack that `loraport dev up` runs at DATA; only the converted base model is shared.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loraport import AsyncClient, Completion, LoraportError
from loraport.admin import AdminClient
from loraport.bundle.bundle_dir import read_bundle_dir
from loraport.cli import main as command_line
from loraport.cli.adapters import find_signer
from loraport.dev.bases import DEFAULT_BASE, ensure_default_base
from loraport.dev.layout import Layout, StackError, read_endpoints
from loraport.dev.stack import UpOptions, down, up
from loraport.publish import next_version, sign_manifest, state_name, upload_parts, verify_files

ADAPTERS = Path(__file__).resolve().parent / "adapters"
OWNERS = {"terse": "acme", "json": "acme", "pirate": "globex"}
PROMPTS = ("What is the capital of France?", "Why is the sky blue?")
# Tenant and adapter (None: the base model) of the answers to each prompt.
ASKED = (("acme", None), ("acme", "terse"), ("acme", "json"), ("globex", "pirate"))
MAX_TOKENS = 32


class DemoError(Exception):
    """A claim that does not hold, or a step that failed; one line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer, as it goes into demo.json, and what the table shows besides."""

    tenant: str
    adapter: str | None
    revision_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    matches_peft: bool | None
    batch_had_distinct_adapters: bool
    prompt: str
    version: str
    ms: float


class Clock:
    """Tells how long each step took."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def step(self, text: str) -> None:
        """Prints what was done and the time since the last step."""
        now = time.monotonic()
        print(f"  {now - self._last:5.1f} s  {text}", flush=True)
        self._last = now

    def total(self) -> float:
        """Returns the seconds since the beginning."""
        return time.monotonic() - self._start


def main() -> int:
    parser = argparse.ArgumentParser(description="Publish and serve two tenants' adapters, and check the answers.")
    parser.add_argument("--data", type=Path, default=Path(".loraport"), help="data directory of the local stack")
    parser.add_argument("--port-base", type=int, default=7440, help="first port of the demo's own stack")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    clock = Clock()
    try:
        with local_stack(options.data, options.port_base, clock) as own:
            rows, claims = run(own, clock)
        write(rows, options.data / "demo.json")
    except (DemoError, StackError, LoraportError, OSError) as error:
        print(f"demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    for text, holds in claims.items():
        print(f"  {'yes' if holds else 'NO '}  {text}")
    good = all(claims.values())
    print(f"demo: {'everything holds' if good else 'FAILED'}, {clock.total():.1f} s, see {options.data / 'demo.json'}")
    return 0 if good else 1


@contextlib.contextmanager
def local_stack(data: Path, port_base: int, clock: Clock) -> Iterator[Path]:
    """Runs a local stack for the length of a `with` block and gives its data directory."""
    last = ""

    def progress(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            print(f"           {text}", flush=True)

    print("demo: starting the local stack (Valkey, S3, registry, loader, executor, router)", flush=True)
    base = ensure_default_base(Layout.at(data), progress)
    own = data / "demo"
    down(own)  # left behind by a demo that was killed
    up(UpOptions(data=own, port_base=port_base, bases=(f"{DEFAULT_BASE}={base}",)), progress)
    try:
        clock.step("the stack is up")
        yield own
    finally:
        down(own)
        clock.step("the stack is stopped")


def run(data: Path, clock: Clock) -> tuple[list[Row], dict[str, bool]]:
    """Does the job and returns the answers, and what is claimed and whether it holds."""
    base = read_endpoints(data)["bases"][DEFAULT_BASE]
    publish_all(data)
    clock.step("tenants, keys, signers, three adapters: registered, verified, approved, aliased")
    rows = asyncio.run(ask_all(data))
    clock.step(f"{len(rows)} prompts answered at once")
    hidden = asyncio.run(foreign_is_hidden(data))
    clock.step("acme asked for globex's adapter")
    refused = tampered_is_refused(data)
    clock.step("tampered copies offered")
    rows = compare_with_peft(rows, Path(base))
    clock.step("the same prompts answered by PEFT")
    show(rows)
    return rows, {
        "every answer equals PEFT's, token for token": all(row.matches_peft for row in rows),
        "answers of different adapters came out of one batch": all(row.batch_had_distinct_adapters for row in rows),
        "every answer names the revision that made it": revisions_are_named(data, rows),
        "acme cannot tell globex's adapter from one that never was": hidden,
        "a tampered adapter is not admitted": refused,
    }


def write(rows: list[Row], path: Path) -> None:
    """Writes what a script may want of the answers."""
    fields = ("tenant", "adapter", "revision_id", "prompt_token_ids", "token_ids", "text", "matches_peft")
    keep = (*fields, "batch_had_distinct_adapters")
    document = [{key: value for key, value in asdict(row).items() if key in keep} for row in rows]
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- publishing, through the command line's own code


def command(data: Path, *arguments: str, may_fail: bool = False) -> tuple[int, Any, str]:
    """Runs a `loraport` command in this process and returns its exit code, its JSON and its error line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line.run([*arguments, "--data", str(data), "--json"])
    if code != 0 and not may_fail:
        raise DemoError(f"loraport {' '.join(arguments)}: {err.getvalue().strip() or out.getvalue().strip()}")
    return code, json.loads(out.getvalue() or "null"), err.getvalue().strip()


def create(data: Path, *arguments: str) -> None:
    """Runs a command that creates something, unless an earlier demo did."""
    code, _, error = command(data, *arguments, may_fail=True)
    if code != 0 and "_EXISTS" not in error:
        raise DemoError(error)


def publish_all(data: Path) -> None:
    """Makes both tenants and puts the three adapters into service."""
    for tenant in sorted(set(OWNERS.values())):
        create(data, "tenant", "create", tenant)
        create(data, "signer", "create", "--tenant", tenant, "demo")
        if not Layout.at(data).api_key(tenant).exists():
            command(data, "key", "create", "--tenant", tenant)
    for adapter, tenant in OWNERS.items():
        named = ("--tenant", tenant, "--name", adapter, "--base", DEFAULT_BASE, "--signer", "demo", "--approve")
        _, published, _ = command(data, "adapter", "register", str(ADAPTERS / adapter), *named)
        target = ("--revision", published["revision_id"], "--now", "--reason", "demo")
        command(data, "alias", "set", f"{tenant}/{adapter}", "prod", *target)


# ---------------------------------------------------------------- asking, through the SDK


async def ask_all(data: Path) -> list[Row]:
    """Sends every prompt to the base model and to all adapters, at once."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            tenant: await stack.enter_async_context(AsyncClient.local(data, tenant=tenant))
            for tenant in set(OWNERS.values())
        }
        # The first request of an adapter waits for its load; bring all in, so that the eight meet in one batch.
        await asyncio.gather(*(ask(clients[tenant], tenant, name, "Hello", max_tokens=1) for tenant, name in ASKED))
        return await asyncio.gather(
            *(ask(clients[tenant], tenant, name, prompt) for prompt in PROMPTS for tenant, name in ASKED)
        )


async def ask(client: AsyncClient, tenant: str, adapter: str | None, prompt: str, max_tokens: int = MAX_TOKENS) -> Row:
    started = time.monotonic()
    messages = [{"role": "user", "content": prompt}]
    answer: Completion = await client.generate(
        messages=messages, adapter=adapter, max_tokens=max_tokens, temperature=0.0, timeout=120.0
    )
    return Row(
        tenant=tenant,
        adapter=adapter,
        revision_id=answer.revision_id,
        prompt_token_ids=list(answer.prompt_token_ids),
        token_ids=list(answer.token_ids),
        text=answer.text,
        matches_peft=None,
        batch_had_distinct_adapters=answer.max_batch_adapter_count >= 2,
        prompt=prompt,
        version=answer.version,
        ms=(time.monotonic() - started) * 1000,
    )


async def foreign_is_hidden(data: Path) -> bool:
    """Says whether acme gets one and the same answer for globex's adapter and for one that never was."""
    with AdminClient.local(data) as admin:
        (alias,) = admin.get_adapter("globex", "pirate").aliases
    async with AsyncClient.local(data, tenant="acme") as client:
        by_name = [await failure(client, adapter=name) for name in ("pirate", "never-was")]
        by_id = [await failure(client, revision_id=name) for name in (alias.revision_id, "sha256:" + "0" * 64)]
        listed = {adapter.adapter for adapter in await client.list_adapters()}
    answers = {*by_name, *by_id}
    return len(answers) == 1 and answers.pop()[1] == "ADAPTER_NOT_FOUND" and "pirate" not in listed


async def failure(client: AsyncClient, **target: str) -> tuple[str, ...]:
    """Returns everything that a caller learns from a request that fails."""
    try:
        answer = await client.generate("Hello", max_tokens=1, **target)  # type: ignore[arg-type]
    except LoraportError as error:
        return (type(error).__name__, error.reason, error.message, repr(error.faults), repr(error.metadata))
    return ("answered", answer.revision_id)


def revisions_are_named(data: Path, rows: list[Row]) -> bool:
    """Says whether every answer names the revision that the registry has under the adapter's alias."""
    with AdminClient.local(data) as admin:
        expected = {
            (tenant, name): next(
                alias.revision_id for alias in admin.get_adapter(tenant, name).aliases if alias.name.endswith("/prod")
            )
            for name, tenant in OWNERS.items()
        }
    return all(row.revision_id == (expected[row.tenant, row.adapter] if row.adapter else "") for row in rows)


# ---------------------------------------------------------------- tampering


def tampered_is_refused(data: Path) -> bool:
    """Offers a copy with a NaN in it, and signed bytes of which one is changed on the way."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "terse"
        shutil.copytree(ADAPTERS / "terse", copy)
        weights = copy / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + b"\xff\xff\xff\xff")  # NaN in every float format
        base = read_endpoints(data)["bases"][DEFAULT_BASE]
        _, verified, _ = command(data, "adapter", "verify", str(copy), "--base", base, may_fail=True)
        named = ("--tenant", "acme", "--name", "tampered", "--base", DEFAULT_BASE, "--signer", "demo")
        _, registered, _ = command(data, "adapter", "register", str(copy), *named, may_fail=True)
    refused_here = verified["verdict"] == "refuse" and registered["state"] == "REFUSED"
    return refused_here and changed_on_the_way_is_quarantined(data)


def changed_on_the_way_is_quarantined(data: Path) -> bool:
    """Signs a good adapter and uploads it with one bit changed; then tries to approve it."""
    with AdminClient.local(data) as admin, read_bundle_dir(ADAPTERS / "terse") as files:
        # Declared provenance is part of the identity, so every run has a revision of its own to lose.
        verdict = verify_files(
            files, base=admin.base_spec(DEFAULT_BASE), tenant="acme", training={"demo": uuid.uuid4().hex}
        )
        if files.config is None or files.weights is None or verdict.revision_id is None:
            raise DemoError("examples/adapters/terse is not a good bundle")
        signer, version = find_signer(data, "acme", "demo"), next_version(admin, "acme", "tampered")
        envelope = sign_manifest(verdict, signer, adapter="tampered", version=version, source="terse")
        changed = bytearray(files.weights.read())
        changed[-1] ^= 1
        session = admin.register_revision("acme", envelope).upload_session
        result = admin.upload(upload_parts(session, files.config, io.BytesIO(changed)))
        try:
            admin.approve_revision(verdict.revision_id)
        except LoraportError as error:
            approved = error.reason != "INVALID_STATE"
        else:
            approved = True
        state = state_name(admin.get_revision(verdict.revision_id))
    return not result.admitted and not approved and state == "QUARANTINED"


# ---------------------------------------------------------------- the same by PEFT


def compare_with_peft(rows: list[Row], base: Path) -> list[Row]:
    """Returns the rows with `matches_peft` set: greedy decoding by PEFT in float32, from the same files."""
    # Threads that spin while they wait, torch's default, slow each other down tenfold where cores are shared.
    os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    first, *others = OWNERS
    model = PeftModel.from_pretrained(model, ADAPTERS / first, adapter_name=first)
    for name in others:
        model.load_adapter(ADAPTERS / name, adapter_name=name)
    model.eval()
    return [replace(row, matches_peft=greedy(model, row) == row.token_ids) for row in rows]


def greedy(model: Any, row: Row) -> list[int]:
    """Returns what greedy decoding by `model` answers to a row's prompt, without the end token."""
    import torch

    if row.adapter is not None:
        model.set_adapter(row.adapter)
    prompt = torch.tensor([row.prompt_token_ids])
    with torch.inference_mode(), model.disable_adapter() if row.adapter is None else contextlib.nullcontext():
        out = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_TOKENS, do_sample=False
        )
    answer: list[int] = out[0, prompt.shape[1] :].tolist()
    ends = model.generation_config.eos_token_id
    return answer[:-1] if answer[-1] in (ends if isinstance(ends, list) else [ends]) else answer


def show(rows: list[Row]) -> None:
    """Prints the answers, and in full the revisions that made them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 110)
    for prompt in PROMPTS:
        table = Table(title=prompt, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("tenant", "adapter", "revision", "text", "tokens", "ms", "same as PEFT?"):
            table.add_column(column, justify="right" if column in ("tokens", "ms") else "left")
        for row in (row for row in rows if row.prompt == prompt):
            same = "yes" if row.matches_peft else "NO"
            counts = (str(len(row.token_ids)), f"{row.ms:.0f}")
            cells = (row.tenant, row.adapter or "(base)", row.version or "-", row.text.strip(), *counts, same)
            table.add_row(*map(Text, cells))
        console.print(table)
    for tenant, adapter, version, revision in sorted(
        {(row.tenant, row.adapter, row.version, row.revision_id) for row in rows if row.adapter}
    ):
        print(f"  {tenant}/{adapter} {version} is {revision}")


if __name__ == "__main__":
    sys.exit(main())
