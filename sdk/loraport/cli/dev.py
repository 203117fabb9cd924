"""`loraport dev`: the local stack."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, note, print_json, print_rows, say
from loraport.dev.layout import default_data

app = typer.Typer(
    help="The whole fleet on this machine: Valkey, an S3 server, four services, on loopback.", no_args_is_help=True
)


@app.command("up")
def up(
    base: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DIR",
            help="Base model, a Hugging Face causal-LM directory; may be repeated. Default: SmolLM2-135M-Instruct.",
        ),
    ] = None,
    executors: Annotated[
        int | None, typer.Option(min=1, help="Executors for each base model. Default: 1.", show_default=False)
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="What the executors compute in. Default: float32, in which answers equal PEFT's exactly."),
    ] = None,
    dedicated: Annotated[
        bool | None,
        typer.Option(
            "--dedicated/--shared",
            help="Executors may fold one revision into their weights: loraport executor merge. Default: shared.",
            show_default=False,
        ),
    ] = None,
    port_base: Annotated[
        int | None,
        typer.Option(
            envvar="LORAPORT_PORT_BASE", help="First of the ports; the others are up to 39 above. Default: 7400."
        ),
    ] = None,
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Start the local stack and leave it running. Where it runs already, say so.

    Exit code 2 when it cannot be started, or when the one that runs has other options.
    """
    with _one_line_errors(), _progress() as progress:
        from loraport.dev.stack import UpOptions, up

        options = UpOptions(
            data=data,
            port_base=port_base,
            bases=tuple(base or ()),
            executors=executors,
            dtype=dtype,
            dedicated=dedicated,
        )
        endpoints, ran_already = up(options, progress)
    if as_json:
        print_json({**endpoints, "already_running": ran_already})
        return
    say(f"the stack at {data} {'is running already' if ran_already else 'is up'}")
    say(f"  router    {endpoints['router']} (TLS, API key)")
    say(f"  registry  {endpoints['registry']} (admin certificate {endpoints['credentials']['admin_certificate']})")
    say(f"  executors {', '.join(endpoints['executors'])} on {', '.join(endpoints['bases'])}, {endpoints['dtype']}")
    if not ran_already:
        say(f"next: loraport tenant create NAME{_data(data)}; stop it with: loraport dev down{_data(data)}")


@app.command("status")
def status(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Show the processes of the local stack. Exit code 1 unless all of them are serving."""
    with _one_line_errors():
        from loraport.dev.stack import status

        rows = [asdict(process) for process in status(data)]
    serving = bool(rows) and all(row["state"] == "serving" for row in rows)
    if as_json:
        print_json({"running": serving, "processes": rows})
    else:
        columns = ("name", "state", "pid", "port", "log")
        empty = f"no stack at {data}; start one with: loraport dev up{_data(data)}"
        print_rows(rows, as_json=False, columns=columns, empty=empty)
    raise typer.Exit(0 if serving else 1)


@app.command("restart")
def restart(
    name: Annotated[str, typer.Argument(help="The process, as in: loraport dev status.")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Stop one process of the local stack and start it again; the others run on."""
    with _one_line_errors(), _progress() as progress:
        from loraport.dev.stack import restart

        record = restart(data, name, progress)
    if as_json:
        print_json(asdict(record))
    else:
        say(f"{name} is serving again")


@app.command("down")
def down(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Stop the local stack: running requests may end, then every process does."""
    with _one_line_errors():
        from loraport.dev.stack import down

        stopped = down(data)
    if as_json:
        print_json({"stopped": stopped})
    elif stopped:
        say(f"stopped {', '.join(stopped)}")
    else:
        say(f"nothing was running at {data}")


def _data(data: Path) -> str:
    """Returns the option that leads a further command to the same stack; nothing where it finds it anyway."""
    return "" if data == default_data() else f" --data {data}"


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Ends the command with one line and exit code 2 when a stack cannot be started, found or stopped."""
    from loraport.dev.layout import StackError

    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except StackError as error:
        note(f"error: {' '.join(str(error).split())}")
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        note(f"error: the local stack needs the package {error.name}; install it with: pip install 'loraport[all]'")
        raise typer.Exit(2) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows what is happening: one changing line on a terminal, else a line per change."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("") as line:
            yield lambda text: line.update(Text(text))
        return
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            note(text)

    yield show


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
