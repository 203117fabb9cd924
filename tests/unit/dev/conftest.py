from pathlib import Path

import pytest

from loraport.bundle.base import BaseModule, BaseSpec
from loraport.dev.bases import StackBase, plan_executors
from loraport.dev.commands import StackPlan
from loraport.dev.layout import Layout, Ports

DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def stack_plan(tmp_path: Path) -> StackPlan:
    """A stack with one base and one executor; nothing of it is started."""
    spec = BaseSpec(
        weights_digest=DIGEST,
        config_digest=DIGEST,
        tokenizer_digest=DIGEST,
        dtype="F32",
        architecture="LlamaForCausalLM",
        tied_embeddings=False,
        vocab_size=8,
        max_positions=16,
        modules=(BaseModule("a", "linear", 2, 2),),
    )
    return StackPlan(
        layout=Layout.at(tmp_path),
        ports=Ports(7400),
        bases=(StackBase("tiny", tmp_path / "tiny", spec),),
        executors=plan_executors(["tiny"], per_base=1),
        dtype="float32",
    )
