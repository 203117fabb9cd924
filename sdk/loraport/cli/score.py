"""`loraport score`: how likely a text is, for an adapter of a tenant or for the base model."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraport.cli.references import is_revision_id
from loraport.cli.views import DEFAULT_DATA, Data, Json, Tenant, TokenFile, note, print_json, print_rows, wrong_use

if TYPE_CHECKING:
    from loraport.client import Client


def score(
    tenant: Tenant,
    prompt: Annotated[str, typer.Argument(help="What the continuation follows: text, or token ids with --token-ids.")],
    continuation: Annotated[str, typer.Argument(help="What is scored, in the same form.")],
    adapter: Annotated[
        str | None,
        typer.Option(help="Adapter of the tenant, or tenants/T/adapters/A that T shares. Default: the base itself."),
    ] = None,
    alias: Annotated[str | None, typer.Option(help="Alias to follow. Default: prod.")] = None,
    revision: Annotated[str | None, typer.Option(help="Exactly this revision, sha256:…")] = None,
    base_model: Annotated[str | None, typer.Option(help="Base model, where there are several.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Both arguments are token ids, e.g. 1,2,3.")] = False,
    top: Annotated[int, typer.Option(help="Alternatives to report with each token.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 120.0,
    token_file: TokenFile = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Show the log-probability of each token of a continuation."""
    from loraport.client import Client

    if revision is not None and not is_revision_id(revision):
        raise wrong_use("--revision must be sha256: and 64 hex digits; see: loraport adapter show")
    target = {"adapter": adapter, "alias": alias, "revision_id": revision, "base_model": base_model}
    with Client.local(data, tenant=tenant, token_file=token_file, timeout=timeout) as client:
        if token_ids:
            before, scored = _ids(prompt), _ids(continuation)
        else:
            before, scored = _split(client, prompt, continuation, target)
        result = client.score(before, scored, top_logprobs=top, **target)  # type: ignore[arg-type]
    if as_json:
        print_json({**asdict(result), "logprob": result.logprob})
        return
    rows = [
        {
            "token_id": position.chosen.token_id,
            "logprob": f"{position.chosen.logprob:.4f}",
            "likeliest": " ".join(f"{entry.token_id}:{entry.logprob:.4f}" for entry in position.top),
        }
        for position in result.logprobs
    ]
    columns = ("token_id", "logprob", "likeliest") if top else ("token_id", "logprob")
    print_rows(rows, as_json=False, columns=columns, empty="")
    made_by = result.revision_id or "the base model"
    note(f"[{made_by} on {result.executor}, {len(rows)} tokens, {result.logprob:.4f} together]")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise wrong_use(f"with --token-ids, both arguments are numbers and commas, not {text!r:.80}") from None


def _split(client: "Client", prompt: str, continuation: str, target: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Returns the ids of both texts, cut where the prompt ends in the ids of the whole."""
    before = client.count_tokens(prompt, **target).token_ids
    whole = client.count_tokens(prompt + continuation, **target).token_ids
    if whole[: len(before)] != before or len(whole) == len(before):
        raise wrong_use("the continuation does not begin at a token's edge; move the cut, or give --token-ids")
    return list(before), list(whole[len(before) :])
