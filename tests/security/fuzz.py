"""The laws of test_laws.py under a coverage-guided fuzzer: `make fuzz` (`ARGS="--runs N"`), or one law by its name.

atheris watches which branches of `loraport.bundle` an input reaches and changes the inputs that reach new ones;
hypothesis turns its bytes into the law's arguments. Each law runs in a process of its own, which ends with a traceback
and a file that reproduces the input when the law does not hold. atheris has wheels for few platforms, so it is not
among the requirements.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

SLOW = "test_what_is_admitted_means_the_same_to_peft"  # it asks PEFT for an opinion on every bundle that is admitted
LAWS = {
    "test_any_bytes_get_a_verdict": 20_000,
    "test_any_structure_gets_a_verdict": 20_000,
    "test_what_is_signed_and_then_changed_is_not_accepted": 20_000,
    SLOW: 500,
}


def fuzz(law: str, runs: int) -> None:
    """Run one law; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["loraport.bundle"]):
        from tests.security import test_laws
    # An example takes some hundred bytes: a fuzzer that begins with none would spend its runs on inputs that are too short.
    seeds = Path(tempfile.mkdtemp(prefix="loraport-fuzz-"))
    numbers = random.Random(0)
    for i in range(64):
        (seeds / f"{i}").write_bytes(numbers.randbytes(64 * (1 + i)))
    test = getattr(test_laws, law)
    if law == SLOW:  # pytest gives it a base; so it is given one here
        model = test_laws.make_llama(Path(tempfile.mkdtemp(prefix="loraport-fuzz-")))

        @test_laws.law(1)
        @given(test_laws.bundles(), st.sampled_from(["F32", "F16", "BF16"]))
        def test(bundle: Any, dtype: str) -> None:
            test_laws.test_what_is_admitted_means_the_same_to_peft.hypothesis.inner_test(model, bundle, dtype)

    atheris.Setup(
        [sys.argv[0], f"-atheris_runs={runs}", "-max_len=4096", "-len_control=0", str(seeds)],
        test.hypothesis.fuzz_one_input,
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the laws of admission under atheris.")
    parser.add_argument("law", nargs="?", choices=sorted(LAWS), help="only this one")
    parser.add_argument("--runs", type=int, help="inputs per law; by default 20,000, for the slow one 500")
    options = parser.parse_args()
    if options.law:
        fuzz(options.law, options.runs or LAWS[options.law])
        return 0
    broken = []
    for law, runs in LAWS.items():
        with tempfile.TemporaryFile() as output:
            command = [sys.executable, "-m", "tests.security.fuzz", law, "--runs", str(options.runs or runs)]
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
            output.seek(0)
            text = output.read().decode(errors="replace")
        covered = [line for line in text.splitlines() if "cov:" in line]
        print(
            f"{'PASS' if code == 0 else 'FAIL'}  {law}  {options.runs or runs} runs  {covered[-1].strip() if covered else ''}"
        )
        if code != 0:
            broken.append(law)
            print(text[-4000:], file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
