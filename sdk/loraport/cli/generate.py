"""`loraport generate`: what a tenant's user does, with the tenant's own API key."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import typer

from loraport.cli.references import is_revision_id
from loraport.cli.views import DEFAULT_DATA, Data, Json, Tenant, TokenFile, note, print_json, wrong_use

if TYPE_CHECKING:
    from loraport.values import Completion, Event


def generate(
    tenant: Tenant,
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Default: standard input.")] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Adapter of the tenant, or tenants/T/adapters/A that T shares. Default: the base itself."),
    ] = None,
    alias: Annotated[str | None, typer.Option(help="Alias to follow. Default: prod.")] = None,
    revision: Annotated[str | None, typer.Option(help="Exactly this revision, sha256:…")] = None,
    base_model: Annotated[str | None, typer.Option(help="Base model, where there are several.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's turn of a conversation.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system's turn before it.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="Prompt as token ids, e.g. 1,2,3; nothing is added.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate. Default 128.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass kept. Default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of likely tokens kept. Default: all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens. Default: random.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives to report with each token.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the whole answer.")] = 120.0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print as tokens come; with --json an event a line.")
    ] = False,
    token_file: TokenFile = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Generate text with an adapter of a tenant, or with the base model."""
    from loraport.client import Client

    if revision is not None and not is_revision_id(revision):
        raise wrong_use("--revision must be sha256: and 64 hex digits; see: loraport adapter show")
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    target = {"adapter": adapter, "alias": alias, "revision_id": revision, "base_model": base_model}
    with Client.local(data, tenant=tenant, token_file=token_file, timeout=timeout) as client:
        source = _input(prompt, chat=chat, system=system, token_ids=token_ids)
        events = client.stream(**source, **sampling, **target)  # type: ignore[arg-type]
        if stream:
            events = _shown(events, as_json)
        completion = _collect(events)
    if as_json and not stream:
        print_json(_row(completion))
    elif not stream:
        sys.stdout.write(_for_reader(completion.text) + "\n")
    if not as_json:
        made_by = completion.revision_id or "the base model"
        count = f"{len(completion.token_ids)} tokens, request {completion.request_id}"
        note(f"[{made_by} on {completion.executor}, {completion.finish_reason}, {count}]")


def _input(prompt: str | None, *, chat: bool, system: str | None, token_ids: str | None) -> dict[str, Any]:
    """Returns the one argument of the client that holds the prompt."""
    if token_ids is not None:
        if prompt is not None or chat:
            raise wrong_use("--token-ids replaces the prompt")
        try:
            return {"prompt_token_ids": [int(part) for part in token_ids.replace(",", " ").split()]}
        except ValueError:
            raise wrong_use(f"--token-ids must be numbers and commas, not {token_ids!r:.80}") from None
    if system is not None and not chat:
        raise wrong_use("--system needs --chat")
    if prompt is None:
        if sys.stdin.isatty():
            raise wrong_use("give a prompt, or send it to standard input")
        prompt = sys.stdin.read().removesuffix("\n")
    if not chat:
        return {"prompt": prompt}
    turns = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*turns, {"role": "user", "content": prompt}]}


def _collect(events: "Iterable[Event]") -> "Completion":
    from loraport.completion import CompletionBuilder

    builder = CompletionBuilder()
    for event in events:
        builder.add(event)
    return builder.result()


def _shown(events: "Iterable[Event]", as_json: bool) -> "Iterator[Event]":
    """Passes events on and prints each: its text, or with `as_json` a JSON object in one line."""
    import json

    from loraport.values import Tokens

    for event in events:
        if as_json:
            sys.stdout.write(json.dumps({"event": type(event).__name__.lower(), **asdict(event)}) + "\n")
        elif isinstance(event, Tokens):
            sys.stdout.write(_for_reader(event.text))
        sys.stdout.flush()
        yield event
    if not as_json:
        sys.stdout.write("\n")


def _for_reader(text: str) -> str:
    """Returns a model's text as it is for a file or a pipe; for a terminal without the controls that steer one."""
    if not sys.stdout.isatty():
        return text
    return "".join(letter if letter in "\n\t" or category(letter) != "Cc" else "\ufffd" for letter in text)


def _row(completion: "Completion") -> dict[str, Any]:
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "revision_id": completion.revision_id,
        "executor": completion.executor,
        "logprobs": [asdict(position) for position in completion.logprobs],
        "version": completion.version,
        "base_id": completion.base_id,
        "prompt_token_ids": list(completion.prompt_token_ids),
        "kernel_path": completion.kernel_path,
        "max_batch_adapter_count": completion.max_batch_adapter_count,
        "queue_ms": completion.queue_ms,
        "load_ms": completion.load_ms,
        "usage": asdict(completion.usage),
        "request_id": completion.request_id,
    }
