"""A base that transformers computes, from registration to answers; and every family of the suite as a registered base."""

from pathlib import Path

import pytest

from loraport import Client
from tests.e2e.harness import add_tenant, publish, running
from tests.small_world import write_tokenizer
from tests.support.families import FAMILIES, linears, make_family
from tests.support.tiny import greedy, make_adapter, prompt_of, with_adapter

pytestmark = pytest.mark.e2e

PROMPT = prompt_of(40, vocab=512)
NEW = 8


def test_a_gemma_like_base_serves_what_peft_computes(tmp_path: Path) -> None:
    base = make_family(tmp_path / "gemma", "gemma3", vocab_size=512)
    write_tokenizer(tmp_path / "gemma")
    wanted = {"linears": linears(base), "words": ["embed_tokens", "v_proj"]}
    expected = {"": greedy(base, PROMPT, NEW)}
    for seed, (name, modules) in enumerate(wanted.items()):
        make_adapter(base, tmp_path / name, seed=seed, r=3, lora_alpha=6, target_modules=modules)
        expected[name] = greedy(with_adapter(base, tmp_path / name), PROMPT, NEW)
    data = tmp_path / "stack"
    with running(data, "--base", f"gemma={tmp_path / 'gemma'}", "--dtype", "float32") as stack:
        add_tenant(stack, "acme")
        made = {name: publish(stack, tmp_path / name, "acme", name, base="gemma")["revision_id"] for name in wanted}
        with Client.local(stack.data, tenant="acme", timeout=60) as client:
            for name, revision_id in made.items():
                answer = client.generate(
                    prompt_token_ids=list(PROMPT), adapter=name, max_tokens=NEW, temperature=0.0, ignore_eos=True
                )
                assert list(answer.token_ids)[: len(expected[name])] == expected[name], name
                assert answer.revision_id == revision_id
        assert "path=transformers" in (data / "logs" / "gemma-0.log").read_text().replace('"path": "', "path=")
        for name in FAMILIES:
            make_family(tmp_path / "bases" / name, name)
            added = stack.ok("base", "add", f"{name}={tmp_path / 'bases' / name}")
            assert added["base"] == name
