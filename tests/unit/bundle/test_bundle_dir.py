"""A bundle on disk: two names are opened, no link is followed, the rest is listed."""

import os
from pathlib import Path

import pytest

from loraport.bundle.bundle_dir import BundleDirError, read_bundle_dir, verify_dir
from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME
from loraport.bundle.verdict import Verdict
from tests.bundle_files import codes, config, encode, small_base, verify, warned, weights


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / CONFIG_NAME).write_bytes(encode(config()))
    (folder / WEIGHTS_NAME).write_bytes(weights())
    return folder


def check(folder: Path) -> Verdict:
    return verify_dir(folder, base=small_base(), tenant="acme")


def test_a_directory_is_judged_like_its_bytes(bundle: Path) -> None:
    assert check(bundle) == verify()


def test_other_files_are_listed_and_not_opened(bundle: Path) -> None:
    (bundle / "README.md").write_text("card")
    (bundle / "optimizer.pt").write_bytes(b"pickle")
    (bundle / "tokenizer.json").symlink_to("/nowhere")
    os.mkfifo(bundle / "pipe")
    verdict = check(bundle)
    assert codes(verdict) == set()
    assert [(warning.code, warning.subject) for warning in verdict.warnings] == [
        ("IGNORED_FILE", "README.md"),
        ("IGNORED_FILE", "optimizer.pt"),
        ("IGNORED_FILE", "pipe"),
        ("IGNORED_TOKENIZER", "tokenizer.json"),
    ]
    assert verdict.revision_id == verify().revision_id


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_links_pipes_and_folders_are_refused_by_name(bundle: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    (bundle / name).rename(target)
    missing = "NO_CONFIG" if name == CONFIG_NAME else "NO_WEIGHTS"
    assert missing in codes(check(bundle))
    (bundle / name).symlink_to(target)
    assert codes(check(bundle)) == {"BAD_FILE"}
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    assert codes(check(bundle)) == {"BAD_FILE"}
    (bundle / name).unlink()
    (bundle / name).mkdir()
    assert codes(check(bundle)) == {"BAD_FILE"}


def test_only_a_pickle(bundle: Path) -> None:
    (bundle / WEIGHTS_NAME).rename(bundle / "adapter_model.bin")
    verdict = check(bundle)
    assert codes(verdict) == {"NO_WEIGHTS", "PICKLE_ONLY"}
    assert any("adapter_model.bin" in found.detail for found in verdict.violations)


def test_a_pickle_under_the_right_name_is_no_safetensors_file(bundle: Path) -> None:
    (bundle / WEIGHTS_NAME).write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    assert codes(check(bundle)) == {"HEADER_LENGTH"}


def test_a_large_config_is_not_read_whole(bundle: Path) -> None:
    with (bundle / CONFIG_NAME).open("wb") as file:
        file.truncate(1 << 34)
    with read_bundle_dir(bundle) as files:
        assert files.config is not None
        assert len(files.config) == 64 * 1024 + 1
    assert codes(check(bundle)) == {"CONFIG_TOO_LARGE"}


def test_a_sparse_weights_file_over_the_limit_is_not_read(bundle: Path) -> None:
    with (bundle / WEIGHTS_NAME).open("r+b") as file:
        file.truncate(1 << 40)
    assert codes(check(bundle)) == {"FILE_TOO_LARGE"}


def test_many_files_are_listed_up_to_a_bound(bundle: Path) -> None:
    for index in range(300):
        (bundle / f"f{index}").touch()
    verdict = check(bundle)
    assert codes(verdict) == set()
    assert len(verdict.warnings) == 200
    assert warned(verdict) == {"IGNORED_FILE"}


def test_what_is_not_a_directory_is_one_clear_error(bundle: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", bundle / CONFIG_NAME):
        with pytest.raises(BundleDirError, match=str(path)):
            check(path)


def test_a_bad_tenant_is_the_callers_fault(bundle: Path) -> None:
    with pytest.raises(ValueError, match="tenant"):
        verify_dir(bundle, base=small_base(), tenant="No Such")
