"""How commands show things: JSON for scripts, tables and lines for people."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import typer

from loraport.dev import layout

Data = Annotated[
    Path, typer.Option("--data", envvar="LORAPORT_DATA", help="Data directory of the local stack.", show_default=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tenant = Annotated[str, typer.Option("--tenant", "-t", help="Tenant.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar="LORAPORT_TOKEN_FILE", help="File with an access token, instead of the API key."
    ),
]
OptionalTenant = Annotated[str | None, typer.Option("--tenant", "-t", help="Tenant.")]
DEFAULT_DATA = Path(layout.DEFAULT_DATA)


def print_json(value: Any) -> None:
    """Prints one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_rows(rows: Sequence[Mapping[str, Any]], *, as_json: bool, columns: Sequence[str], empty: str) -> None:
    """Prints a list: with `as_json` all fields, else a table of `columns`, or the line `empty`."""
    if as_json:
        print_json(list(rows))
    elif not rows:
        say(empty)
    else:
        print_table(columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; its cells are plain text and never cut or folded, so that a row is a line for grep."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), no_wrap=True)
    for row in rows:
        table.add_row(*[Text(plain(cell)) for cell in row])
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, needed)
    console.print(table)


def plain(text: str) -> str:
    """Returns text that cannot steer a terminal: much of what is shown was written by others."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def say(text: str) -> None:
    """Prints a line."""
    sys.stdout.write(plain(text) + "\n")


def note(text: str) -> None:
    """Prints a line that is not the result: to stderr."""
    sys.stderr.write(plain(text) + "\n")


def wrong_use(text: str) -> Exception:
    """Returns the error of a command line that cannot be right; exit code 2."""
    return typer.BadParameter(text)


def last_part(name: str) -> str:
    """Returns the last segment of a resource name."""
    return name.rsplit("/", 1)[-1]


def time_text(message: Any, field: str) -> str | None:
    """Returns a Timestamp field as RFC 3339 in seconds, None when it is unset."""
    if not message.HasField(field):
        return None
    return str(getattr(message, field).ToDatetime(tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


def reasons(violations: Sequence[Any]) -> list[dict[str, str]]:
    """Returns violations or warnings as JSON objects."""
    return [{"code": item.code, "detail": item.detail, "subject": item.subject} for item in violations]


def print_reasons(title: str, violations: Sequence[Any]) -> None:
    """Prints violations or warnings, one a line."""
    for item in violations:
        say(f"  {title} {item.code}: {item.detail}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
