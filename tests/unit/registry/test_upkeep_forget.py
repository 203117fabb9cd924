"""After a restore: what was signed last is forgotten, or it is said what is left to do."""

from pathlib import Path

from services.registry import upkeep


def test_what_cannot_be_removed_is_named_and_fails_nothing(tmp_path: Path) -> None:
    signed = tmp_path / "signed.json"
    signed.write_text("{}")
    assert upkeep._forget(str(signed)) == upkeep._forget(str(signed)) == upkeep._forget("") == ""
    assert not signed.exists()
    signed.mkdir()  # what unlink fails on, for root as well
    assert f"remove {signed} before a registry starts" in upkeep._forget(str(signed))
