"""Scores agree with what generation says of the same tokens, also from an executor that was just started again."""

import os
import signal
from pathlib import Path

import pytest

from loraport import Client
from tests.e2e.harness import add_tenant, publish, running, wait_until

pytestmark = pytest.mark.e2e


def test_scores_are_those_of_generation_before_and_after_the_executor_is_started_again(
    tmp_path: Path, tiny: str, world_dir: Path
) -> None:
    with running(tmp_path / "data", "--base", tiny) as stack:
        add_tenant(stack, "acme")
        revision = publish(stack, world_dir / "bundles" / "alpha_8", "acme", "steady")["revision_id"]
        with Client.local(stack.data, tenant="acme", timeout=300, patience=120) as client:
            made = client.generate("a b", adapter="steady", max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
            wanted = [p.chosen.logprob for p in made.logprobs]

            def check() -> None:
                got = client.score(made.prompt_token_ids, made.token_ids, adapter="steady", top_logprobs=2)
                assert got.revision_id == made.revision_id == revision
                assert [p.chosen.token_id for p in got.logprobs] == list(made.token_ids)
                assert [p.chosen.logprob for p in got.logprobs] == pytest.approx(wanted, abs=1e-3)
                base = client.score(made.prompt_token_ids, made.token_ids)
                assert base.revision_id == ""
                assert base.logprob != pytest.approx(got.logprob, abs=1e-3)

            check()
            before = stack.ok("residency")[0]["epoch"]
            assert stack.ok("dev", "restart", "tiny-0")["name"] == "tiny-0"
            check()
            again = stack.ok("residency")[0]["epoch"]
            assert again > before
            # The process itself, not its keeper: the keeper starts another, and whoever is patient waits for it.
            keeper = stack.processes()["tiny-0"]
            child = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])
            os.kill(child, signal.SIGKILL)
            check()
            wait_until(lambda: stack.ok("residency")[0]["epoch"] > again, within_s=120, what="a new epoch")
        ids = ",".join(map(str, made.prompt_token_ids)), ",".join(map(str, made.token_ids))
        shown = stack.ok("score", *ids, "--token-ids", "--tenant", "acme", "--adapter", "steady")
        assert shown["logprob"] == pytest.approx(sum(wanted), abs=1e-2)
        assert stack.cli("dev", "restart", "nobody").code == 2
        assert stack.ok("dev", "status")["running"] is True
