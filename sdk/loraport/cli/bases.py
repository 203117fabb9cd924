"""`loraport base`: base models by digest."""

from typing import Annotated, Any

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, last_part, print_json, print_rows, say, time_text

app = typer.Typer(help="Base models, known by the digests of weights, config and tokenizer.", no_args_is_help=True)


@app.command("add")
def add(
    directory: Annotated[str, typer.Argument(metavar="[NAME=]DIR", help="A Hugging Face causal-LM directory.")],
    name: Annotated[str | None, typer.Option(help="Id. Default: the directory's name, made legal.")] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Register a base model, so that adapters of it can be registered. To serve it, start an executor for it."""
    from loraport.admin import AdminClient
    from loraport.bundle.base_dir import read_base_dir
    from loraport.dev.bases import parse_bases

    argument = f"{name}={directory}" if name else directory
    ((base, path),) = parse_bases([argument]).items()
    with AdminClient.local(data) as admin:
        model = admin.create_base_model(base, read_base_dir(path))
    if as_json:
        print_json(_row(model))
    else:
        say(f"base model {base} is registered: {model.base_id}")


@app.command("list")
def list_bases(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """List base models."""
    from loraport.admin import AdminClient

    with AdminClient.local(data) as admin:
        rows = [_row(model) for model in admin.list_base_models()]
    columns = ("base", "base_id", "create_time")
    print_rows(rows, as_json=as_json, columns=columns, empty="no base models; add one with: loraport base add DIR")


def _row(model: Any) -> dict[str, Any]:
    return {
        "base": last_part(model.name),
        "name": model.name,
        "base_id": model.base_id,
        "create_time": time_text(model, "create_time"),
    }
