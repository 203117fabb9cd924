"""The adapter cases against the offline verification: every verdict, scale and offender."""

import json
from pathlib import Path
from typing import Any

import pytest

from loraport.bundle.base import BaseSpec
from loraport.bundle.base_dir import read_base_dir
from loraport.bundle.bundle_dir import verify_dir
from loraport.bundle.codes import VIOLATIONS, WARNINGS
from loraport.bundle.manifest import build_manifest, parse_manifest
from loraport.bundle.verdict import Verdict


@pytest.fixture(scope="module")
def cases(cases_dir: Path) -> list[dict[str, Any]]:
    return json.loads((cases_dir / "cases.json").read_text())


@pytest.fixture(scope="module")
def bases(cases_dir: Path, cases: list[dict[str, Any]]) -> dict[str, BaseSpec]:
    names = {case["fields"]["bind_to"] for case in cases}
    return {name: read_base_dir(cases_dir / "bases" / name) for name in names}


@pytest.fixture(scope="module")
def verdicts(cases_dir: Path, cases: list[dict[str, Any]], bases: dict[str, BaseSpec]) -> dict[str, Verdict]:
    return {
        case["case"]: verify_dir(
            cases_dir / "bundles" / case["case"], base=bases[case["fields"]["bind_to"]], tenant="acme"
        )
        for case in cases
    }


def test_every_case_gets_its_verdict(cases: list[dict[str, Any]], verdicts: dict[str, Verdict]) -> None:
    assert len(cases) > 40
    wrong = {
        case["case"]: (case["verdict"], verdicts[case["case"]].violations)
        for case in cases
        if case["verdict"] != "either" and verdicts[case["case"]].admitted != (case["verdict"] == "admit")
    }
    assert not wrong


def test_admitted_modules_and_scales_are_those_of_peft(
    cases: list[dict[str, Any]], verdicts: dict[str, Verdict]
) -> None:
    compared = 0
    for case in cases:
        verdict = verdicts[case["case"]]
        if case["expected"] is not None and verdict.admitted:
            assert {module.path: module.scaling for module in verdict.modules} == case["expected"], case["case"]
            assert len(verdict.modules) == case["fields"]["pairs"]
            compared += 1
    assert compared >= 10


def test_refusals_name_the_offender(cases: list[dict[str, Any]], verdicts: dict[str, Verdict]) -> None:
    for case in cases:
        verdict = verdicts[case["case"]]
        if not verdict.admitted:
            assert verdict.violations, case["case"]
        if case["verdict"] == "refuse":
            for offender in case["fields"].get("offenders", []):
                assert any(offender in found.detail for found in verdict.violations), (case["case"], offender)


def test_every_emitted_code_is_documented(verdicts: dict[str, Verdict]) -> None:
    for verdict in verdicts.values():
        assert {found.code for found in verdict.violations} <= VIOLATIONS.keys()
        assert {found.code for found in verdict.warnings} <= WARNINGS.keys()


def test_admitted_cases_have_distinct_ids_and_manifests(verdicts: dict[str, Verdict]) -> None:
    admitted = [verdict for verdict in verdicts.values() if verdict.admitted]
    assert len({verdict.revision_id for verdict in admitted}) == len(admitted)
    for verdict in admitted:
        data = build_manifest(
            verdict,
            adapter="some-adapter",
            version=1,
            created_time="2026-01-01T00:00:00Z",
            source={"kind": "upload", "uri": "file"},
        )
        assert parse_manifest(data).revision_id == verdict.revision_id
        assert parse_manifest(data).modules == verdict.modules


def test_no_pickle_was_loaded(cases: list[dict[str, Any]], verdicts: dict[str, Verdict], cases_dir: Path) -> None:
    for case in cases:
        marker = case["fields"].get("marker")
        if marker:
            assert not verdicts[case["case"]].admitted
            assert not Path(marker).exists()
            assert not (cases_dir / "bundles" / case["case"] / marker).exists()
