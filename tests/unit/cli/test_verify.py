"""`loraport adapter verify`: the JSON that scripts rely on."""

import json
from pathlib import Path

import pytest

from loraport.cli.main import run


@pytest.fixture(scope="session")
def cases(cases_dir: Path) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = json.loads((cases_dir / "cases.json").read_text())
    return entries


def verify(cases_dir: Path, case: str, base: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    code = run(
        ["adapter", "verify", str(cases_dir / "bundles" / case), "--base", str(cases_dir / "bases" / base), "--json"]
    )
    return code, json.loads(capsys.readouterr().out)


def test_every_case_gets_its_verdict(
    cases_dir: Path, cases: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    for entry in cases:
        code, answer = verify(cases_dir, str(entry["case"]), str(entry["base"]), capsys)
        assert {"verdict", "reasons", "warnings", "revision_id", "modules"} <= set(answer), entry["case"]
        if entry["verdict"] != "either":
            assert answer["verdict"] == entry["verdict"], entry["case"]
        admitted = answer["verdict"] == "admit"
        assert code == (0 if admitted else 1), entry["case"]
        assert (answer["revision_id"] is not None) == admitted, entry["case"]
        assert bool(answer["reasons"]) != admitted, entry["case"]


def test_scales_are_the_expected_ones(
    cases_dir: Path, cases: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    for entry in cases:
        if entry["verdict"] == "admit" and isinstance(entry["expected"], dict):
            _, answer = verify(cases_dir, str(entry["case"]), str(entry["base"]), capsys)
            scales = {module["path"]: module["scaling"] for module in answer["modules"]}  # type: ignore[attr-defined]
            assert scales == pytest.approx(entry["expected"]), entry["case"]


def test_the_norm_limit_is_said_and_can_be_the_loaders(
    cases_dir: Path, cases: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(entry for entry in cases if entry["verdict"] == "admit" and entry["expected"])
    _, answer = verify(cases_dir, str(entry["case"]), str(entry["base"]), capsys)
    assert answer["max_update_norm"] == 2.0**14
    words = ["adapter", "verify", str(cases_dir / "bundles" / str(entry["case"]))]
    words += ["--base", str(cases_dir / "bases" / str(entry["base"])), "--max-update-norm"]
    assert run([*words, "1e-9"]) == 1
    refused = capsys.readouterr().out
    assert "UPDATE_NORM" in refused
    assert "norm: 1e-09" in refused
    assert run([*words, "0"]) == 0
    assert "norm: none" in capsys.readouterr().out
