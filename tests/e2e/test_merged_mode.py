"""A dedicated stack by its command line: one revision in the weights, everybody else refused, and back."""

from pathlib import Path

import pytest

from loraport import Client, LoraportError
from tests.e2e.harness import add_tenant, publish, running
from tests.small_world import write_tokenizer
from tests.support.tiny import greedy, make_adapter, make_base, prompt_of, with_adapter

pytestmark = pytest.mark.e2e

PROMPT = prompt_of(24)
NEW = 8


def test_merged_for_one_revision_and_back(tmp_path: Path) -> None:
    base = make_base(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    expected = {}
    for seed, name in enumerate(("in", "out")):
        make_adapter(base, tmp_path / name, seed=seed, r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
        expected[name] = greedy(with_adapter(base, tmp_path / name), PROMPT, NEW)
    with running(tmp_path / "stack", "--base", f"tiny={tmp_path / 'tiny'}", "--dedicated") as stack:
        add_tenant(stack, "acme")
        made = {name: publish(stack, tmp_path / name, "acme", name, base="tiny")["revision_id"] for name in expected}
        (executor,) = stack.ok("executor", "list")
        assert (executor["mode"], executor["decoder"], executor["error"]) == ("grouped", "native", None)

        with Client.local(stack.data, tenant="acme", timeout=60) as client:

            def answer(name: str) -> list[int]:
                found = client.generate(
                    prompt_token_ids=list(PROMPT), adapter=name, max_tokens=NEW, temperature=0.0, ignore_eos=True
                )
                assert found.revision_id == made[name]
                return list(found.token_ids)[: len(expected[name])]

            merged = stack.ok("executor", "merge", executor["executor"], "acme/in")
            assert (merged["mode"], merged["merged_revision_id"]) == ("merged", made["in"])
            assert answer("in") == expected["in"]
            with pytest.raises(LoraportError):
                answer("out")
            assert stack.ok("executor", "unmerge", executor["executor"])["mode"] == "grouped"
            assert [answer(name) for name in expected] == list(expected.values())

        assert "there are: tiny-0" in stack.cli("executor", "merge", "nobody", "acme/in").error
        # What a stack was started as is not silently changed.
        assert "--dedicated" in stack.up("--shared").error
