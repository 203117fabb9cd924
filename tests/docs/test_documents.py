"""The documents are part of the product: links lead somewhere, commands exist, decisions are listed."""

import re
import subprocess
from pathlib import Path

import pytest

from loraport.cli.main import app
from services.shared.errors import REASONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])


def code_blocks(page: Path, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_decision_is_listed() -> None:
    listed = (ROOT / "docs/adr/README.md").read_text()
    for record in (ROOT / "docs/adr").glob("0*.md"):
        assert f"({record.name})" in listed, record.name
        text = record.read_text()
        assert all(
            part in text for part in ("**Status**", "## Decision" if "## Decision" in text else "|", "## Considered")
        )


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.M):
            assert target in targets, f"{page.name}: make {target}"


def _commands(command: object, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    found = {words: command}
    for name, child in getattr(command, "commands", {}).items():
        found |= _commands(child, (*words, name))
    return found


def test_commands_and_options_in_the_readme_exist() -> None:
    import typer.main

    known = _commands(typer.main.get_command(app))
    text = "\n".join(code_blocks(ROOT / "README.md", "bash"))
    lines = [line.split("#")[0] for line in text.splitlines() if line.startswith("loraport ")]
    assert len(lines) >= 8
    for line in lines:
        words = line.split()[1:]
        path: tuple[str, ...] = ()
        while words and (*path, words[0]) in known:
            path = (*path, words.pop(0))
        options = {option for parameter in known[path].params for option in parameter.opts}
        assert path, line
        assert {word for word in words if word.startswith("--")} <= options, line


def test_the_hooks_and_scripts_that_documents_name_exist() -> None:
    for page in PAGES:
        for path in re.findall(
            r"`((?:scripts|services|tests|protos|sdk|examples|bench|deploy)/[\w./]+)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_reasons_named_in_the_documents_exist() -> None:
    pages = [page for page in PAGES if page.name != "errors.md"]
    known = set(REASONS) | {"NOT_FOUND", "UNIMPLEMENTED", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    for page in pages:
        for word in re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", page.read_text()):
            if word.endswith(("_EXISTS", "_NOT_FOUND", "_REQUIRED", "_EXCEEDED", "_UNAVAILABLE")):
                assert word in known, f"{page.name} names the reason {word}"


def test_the_change_log_has_an_unreleased_part() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_python_blocks_compile() -> None:
    for page in PAGES:
        for block in code_blocks(page, "python"):
            compile(block, str(page), "exec")


def test_nothing_names_this_machine() -> None:
    """No absolute path of a developer's machine and no address of a package index in what is committed."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        path = ROOT / name
        if path.suffix in {".md", ".py", ".toml", ".txt", ".json", ".proto"} or path.name == "Makefile":
            text = path.read_text()
            found = re.search(r"(?<![\w.])/(?:work|root|home)/\w|pypi\.org|index-url", text)
            assert not found or path == Path(__file__), f"{name}: {found.group(0) if found else ''}"
