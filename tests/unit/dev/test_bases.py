import os
import sys
from pathlib import Path

import pytest

from loraport.dev import bases
from loraport.dev.bases import ensure_default_base, parse_bases, plan_executors, read_bases
from loraport.dev.layout import Layout, StackError


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("SmolLM2-135M_Instruct", "smollm2-135m-instruct"),
        ("some/dir/tiny", "tiny"),
        ("7b", "base-7b"),
        ("llama=/models/x", "llama"),
        ("/models/a=b", "a-b"),
    ],
)
def test_a_base_is_named_by_its_argument(argument: str, name: str) -> None:
    (found,) = parse_bases([argument])
    assert found == name


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_bases(["tiny=models/tiny"]) == {"tiny": tmp_path / "models" / "tiny"}


@pytest.mark.parametrize("arguments", [["Bad Name=/x"], ["a=/x", "a=/y"], ["/x/same", "/y/same"]])
def test_names_that_cannot_be_are_refused_in_one_line(arguments: list[str]) -> None:
    with pytest.raises(StackError) as caught:
        parse_bases(arguments)
    assert "\n" not in str(caught.value)


def test_executors_are_named_after_their_base() -> None:
    plans = plan_executors(["a", "b"], per_base=2)
    assert [(plan.name, plan.base) for plan in plans] == [("a-0", "a"), ("a-1", "a"), ("b-0", "b"), ("b-1", "b")]
    (long,) = plan_executors(["x" * 63], per_base=1)
    assert len(long.name) <= 63


@pytest.mark.parametrize(("names", "count"), [(["a"], 8), (["a", "b"], 4), (["a"], 0)])
def test_a_stack_has_one_to_seven_executors(names: list[str], count: int) -> None:
    with pytest.raises(StackError, match="1 to 7 executors"):
        plan_executors(names, per_base=count)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="--base tiny: "):
        read_bases({"tiny": tmp_path}, lambda text: None)


def converter(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    (folder / "fake_converter.py").write_text(f"import sys, pathlib\nout = pathlib.Path(sys.argv[1])\n{body}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    monkeypatch.setattr(bases, "CONVERTER", "fake_converter")


def test_the_default_base_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.at(tmp_path / "data")
    converter(monkeypatch, tmp_path, "out.mkdir(); (out / 'done').write_text('1')")
    said: list[str] = []
    target = ensure_default_base(layout, said.append)
    assert (target / "done").exists()
    assert "converting" in said[0]
    converter(monkeypatch, tmp_path, "raise SystemExit('must not run again')")
    assert ensure_default_base(layout, said.append) == target


def test_a_failed_conversion_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.at(tmp_path / "data")
    converter(monkeypatch, tmp_path, "raise SystemExit('the wheel is not here')")
    with pytest.raises(StackError, match="the wheel is not here"):
        ensure_default_base(layout, lambda text: None)
    assert list((tmp_path / "data" / "bases").iterdir()) == []
