"""The `loraport` command: its parts, and the one place where failures become one line.

Exit codes: 0 done, 1 refused or failed, 2 wrong use, 130 interrupted.
"""

import os
import sys
from typing import Annotated, Any

import typer

from loraport.cli import (
    adapters,
    aliases,
    audit,
    bases,
    dev,
    doctor,
    executors,
    fleet,
    generate,
    history,
    imports,
    log,
    quotas,
    report,
    rollouts,
    score,
    sharing,
    signers,
    tenants,
    top,
    trace,
    trust,
)
from loraport.cli.views import note

app = typer.Typer(
    name="loraport",
    help="Publish signed LoRA adapters and generate text with them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tenants.tenant_app.command("show")(quotas.show_tenant)
tenants.tenant_app.command("set-quota")(quotas.set_quota)
tenants.key_app.command("rotate")(quotas.rotate_key)
app.add_typer(tenants.tenant_app, name="tenant")
app.add_typer(tenants.key_app, name="key")
app.add_typer(signers.app, name="signer")
app.add_typer(trust.app, name="trust")
app.add_typer(bases.app, name="base")
adapters.app.command("import")(imports.import_adapter)
adapters.app.command("share")(sharing.share_adapter)
adapters.app.command("history")(history.history)
app.add_typer(adapters.app, name="adapter")
app.add_typer(aliases.app, name="alias")
app.add_typer(rollouts.app, name="rollout")
app.add_typer(log.app, name="log")
app.add_typer(audit.app, name="audit")
app.command("generate")(generate.generate)
app.command("score")(score.score)
app.command("residency")(fleet.residency)
app.command("queues")(fleet.queues)
app.command("fairness")(fleet.fairness)
app.command("trace")(trace.trace)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.add_typer(report.app, name="report")
app.add_typer(executors.app, name="executor")
app.add_typer(dev.app, name="dev")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"loraport {version('loraport')}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Publish signed LoRA adapters and generate text with them."""


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    try:
        code = app(args=arguments, prog_name="loraport", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader has gone, as in `loraport adapter list | head -1`; nothing is left to be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("LORAPORT_DEBUG"):
            raise
        return _explain(error)


def _explain(error: Exception) -> int:
    """Prints the one line of an error and returns the exit code."""
    # Usage errors come from the parser that typer carries, whose module differs between releases.
    message = getattr(error, "format_message", None)
    if message is not None:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message(), file=sys.stderr)
        else:
            note(f"error: {_one_line(message())}{_hint(error)}")
        return 2
    note(f"error: {describe(error)}")
    return 1


def describe(error: Exception) -> str:
    """Returns one line for a person."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return _one_line(f"{error.strerror}{where}")
    text = _one_line(str(error) or type(error).__name__)
    # One bracket is enough: an error of this program's own may name the next command already.
    advice = "" if text.endswith(")") else _ADVICE.get(getattr(error, "reason", ""), "")
    if request := getattr(error, "request_id", ""):
        text = f"{text.rstrip('.')}, request {request}"
    return f"{text.rstrip('.')} ({advice})" if advice else text


# What to do about it, for the reasons where a command of this program helps.
_ADVICE = {
    "TENANT_NOT_FOUND": "make one with: loraport tenant create NAME",
    "BASE_MODEL_NOT_FOUND": "see: loraport base list",
    "UNTRUSTED_SIGNER": "see: loraport signer list --tenant TENANT",
    "INVALID_TRUST_ROOT": "see: loraport trust show",
    "INVALID_CREDENTIAL": "make one with: loraport key create --tenant TENANT",
    "UNREACHABLE": "see: loraport dev status",
    "EXECUTOR_UNAVAILABLE": "see: loraport dev status",
    "LOADER_UNAVAILABLE": "see: loraport dev status",
    "REGISTRY_UNAVAILABLE": "see: loraport dev status",
    "STORE_UNAVAILABLE": "see: loraport dev status",
    "ADAPTER_NOT_FOUND": "see: loraport adapter list, loraport alias list, loraport base list",
    "REVISION_NOT_FOUND": "see: loraport adapter show NAME --tenant TENANT",
    "SOURCE_NOT_ALLOWED": "the loader's operator lists what it may fetch under `imports` in its configuration",
    "LOG_DAMAGED": "see: loraport log verify",
    "LOG_SPLIT_VIEW": "see: loraport log verify",
    "CHECKPOINT_ROLLBACK": "see: loraport log verify",
    "SHARED_EXECUTOR": "start the stack with: loraport dev up --dedicated",
    "ALIAS_LIVE": "see: loraport rollout start; or move it at once with --now --reason TEXT",
    "ROLLOUT_RUNNING": "see: loraport rollout list",
    "ROLLOUT_NOT_FOUND": "see: loraport rollout list",
    "QUORUM_MISSING": "see: loraport rollout status",
}


def _hint(error: Any) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "")
    return f" (see: {path} --help)" if path else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
