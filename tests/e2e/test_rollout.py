"""Rollouts under continuous traffic on two real executors: a good revision goes out, three bad ones come back.

Whatever happens meanwhile, no request that the old revision answers fails, and no answer is of another revision than it
says: each is compared with what that revision answers when it is asked for by its id.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loraport import Client
from loraport.errors import LoraportError
from tests.e2e.harness import Stack, environment, wait_until
from tests.e2e.rollout_fleet import PROMPT, Fleet, check, faulty_fleet, traffic
from tests.e2e.rollout_trials import NAMES, TALKS, Trials

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def fleet(world_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with faulty_fleet(world_dir, tmp_path_factory.mktemp("rollout")) as fleet:
        yield fleet


def test_a_good_revision_goes_out_while_registry_and_board_die(fleet: Fleet) -> None:
    fleet.publish(2)
    fleet.learn(2)
    with traffic(fleet.stack) as flow:
        fleet.start(2, "--eval", str(fleet.evals), "--shadow", "100", "--shadow-time", "1s")
        found = fleet.wait("SPLITTING")
        told = json.dumps(found["story"])
        assert "100 % of the requests are shadowed" in told
        copied = re.search(r"the shadow saw nothing wrong in (\d+) copies", told)
        assert copied is not None
        assert int(copied[1]) > 0
        assert all(0.5 < entry["perplexity_ratio"] <= 1.05 for entry in found["executors"])
        fleet.kill("registry")
        time.sleep(0.5)
        fleet.stack.ok("dev", "restart", "registry")
        fleet.wait("SPLITTING", "RETAINING", share=50)
        fleet.kill("valkey")
        fleet.wait("SUCCEEDED")
        wait_until(lambda: flow.sent[-1].revision_id == fleet.revisions[2], within_s=120, what="the new revision")
    fleet.stack.ok("dev", "restart", "valkey")
    check(flow, fleet, old=1, new=2)
    fleet.current = 2
    arms = {sent.arm for sent in flow.sent}
    assert {"new", "control", "old"} <= arms
    assert not any(sent.error for sent in flow.sent)
    assert fleet.prod() == fleet.revisions[2]


def test_a_slow_revision_comes_back_by_itself(fleet: Fleet) -> None:
    fleet.publish(3)
    fleet.learn(3)
    fleet.fault(3, "slow")
    with traffic(fleet.stack) as flow:
        fleet.start(3)
        back = fleet.wait("ROLLED_BACK")
        ended = time.monotonic()
        flow.goes_on(ended + 1.0)
    check(flow, fleet, old=fleet.current, new=3)
    assert not any(sent.error for sent in flow.sent)
    assert any(sent.revision_id == fleet.revisions[3] for sent in flow.sent)
    late = [sent for sent in flow.sent if sent.at > ended + 1.0]
    assert late
    assert {sent.revision_id for sent in late} == {fleet.revisions[fleet.current]}
    assert "token" in json.dumps(back["story"])


def test_a_wrongly_scaled_revision_never_meets_a_request(fleet: Fleet) -> None:
    fleet.publish(4)
    fleet.fault(4, "scale")
    with traffic(fleet.stack) as flow:
        fleet.start(4)
        back = fleet.wait("ROLLED_BACK")
    assert not any(sent.error for sent in flow.sent)
    assert {sent.revision_id for sent in flow.sent} == {fleet.revisions[fleet.current]}
    assert {sent.token_ids for sent in flow.sent} == {fleet.expected[fleet.revisions[fleet.current]]}
    assert any((entry["mean_logprob_difference"] or 0) > 0.02 for entry in back["executors"])


def test_a_failing_revision_fails_alone_and_comes_back(fleet: Fleet) -> None:
    fleet.publish(5)
    fleet.learn(5)
    fleet.fault(5, "crash")
    with traffic(fleet.stack) as flow:
        fleet.start(5)
        fleet.wait("ROLLED_BACK")
        ended = time.monotonic()
        flow.goes_on(ended + 1.0)
    check(flow, fleet, old=fleet.current, new=5, failing=frozenset({"INTERNAL"}))
    errors = [sent for sent in flow.sent if sent.error]
    assert errors, "the fault was never met"
    assert all(sent.at < ended + 1.0 for sent in errors)
    # What fails is what the new revision was to answer: about its share, and nobody else.
    share = len(errors) / len(flow.sent)
    assert share < 0.5, share


def test_a_revision_that_kills_executors_is_stopped_by_the_second_one(fleet: Fleet) -> None:
    fleet.publish(7)
    fleet.learn(7)
    fleet.fault(7, "kill")
    deaths = fleet.deaths()
    with traffic(fleet.stack) as flow:
        fleet.start(7)
        held = fleet.wait("PAUSED", "ROLLED_BACK")
        back = fleet.wait("ROLLED_BACK")
        ended = time.monotonic()
        fleet.serving()
        time.sleep(1.0)
    assert held["hold_reason"] == "EXECUTOR_LOST" or held["state"] == "ROLLED_BACK"
    assert "went away with work of the new revision" in json.dumps(back["story"])
    # Each time one executor; both at once only where both had begun a request of it in the same moment.
    assert 2 <= fleet.deaths() - deaths <= 3
    check(flow, fleet, old=fleet.current, new=7, failing=frozenset({"EXECUTOR_UNAVAILABLE"}))
    # It never answers anything; what it was asked ends with an error that says to ask again, what was on board with it
    # as well, and nothing else.
    assert {sent.revision_id for sent in flow.sent if not sent.error} == {fleet.revisions[fleet.current]}
    errors = [sent for sent in flow.sent if sent.error]
    assert errors
    assert all(sent.at < ended for sent in errors)
    print(f"\n{len(errors)} of {len(flow.sent)} requests ended with EXECUTOR_UNAVAILABLE")


def second_router(stack: Stack) -> tuple[subprocess.Popen[bytes], int]:
    """Starts one more router of the same fleet; returns it and its door's port. The caller ends it."""
    command = psutil.Process(stack.processes()["router"]).cmdline()
    place = command.index("--config") + 1
    config = json.loads(Path(command[place]).read_text())
    port = stack.port_base + 40
    config |= {"user_address": f"127.0.0.1:{port}", "admin_address": f"127.0.0.1:{port + 1}", "root_state_file": ""}
    config.get("telemetry", {}).pop("metrics_listen", None)
    file = stack.data / "router-2.json"
    file.write_text(json.dumps(config))
    command[place] = str(file)
    return subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL), port


def test_a_rollback_by_hand_is_every_routers_at_once(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.publish(6)
    fleet.learn(6)
    process, port = second_router(fleet.stack)
    key = (fleet.stack.data / "keys" / "acme.key").read_text().strip()
    try:
        with (
            Client.local(fleet.stack.data, tenant="acme", timeout=30) as first,
            Client(
                f"127.0.0.1:{port}", api_key=key, ca_certificate=fleet.stack.data / "pki" / "ca.pem", timeout=30
            ) as second,
        ):

            def answered(client: Client) -> str:
                try:
                    return client.generate(PROMPT, adapter="bot", max_tokens=1, temperature=0.0).revision_id
                except LoraportError:
                    return ""

            wait_until(
                lambda: answered(second) == fleet.revisions[fleet.current], within_s=120, what="the second router"
            )
            fleet.start(6, "--steps", "100", "--min-time", "1h")
            fleet.wait("SPLITTING")
            for client in (first, second):
                wait_until(lambda c=client: answered(c) == fleet.revisions[6], within_s=120, what="the split")
            began = time.monotonic()
            fleet.stack.ok("rollout", "rollback", "acme/bot", "--reason", "by hand")
            decided = time.monotonic()
            for client in (first, second):
                wait_until(
                    lambda c=client: answered(c) == fleet.revisions[fleet.current], within_s=120, what="the way back"
                )
            seen = time.monotonic()
    finally:
        process.terminate()
        process.wait(timeout=120)
    assert fleet.status()["state"] == "ROLLED_BACK"
    # In a hurry, but not before both executors have it.
    fleet.stack.ok("alias", "set", "acme/bot", "prod", "--revision", fleet.revisions[6], "--now", "--reason", "hurry")
    assert fleet.prod() == fleet.revisions[6]
    assert "executors have the new revision READY" in json.dumps(fleet.status()["story"])
    fleet.current = 6
    with capsys.disabled():
        print(f"\nrollback: both routers {seen - began:.3f} s after it was asked for, {seen - decided:.3f} s after")


def test_whatever_dies_dies_in_every_state_and_each_rollout_goes_on(fleet: Fleet) -> None:
    """Router, registry, board and an executor, all in one moment and then one by one, while a rollout is in each state."""
    trials = Trials(fleet)
    trials.begin()
    with traffic(fleet.stack, *NAMES, talks=TALKS, pause_s=0.05) as flow:
        trials.flow = flow
        trials.survive("router", "registry", "valkey", fleet.youngest())
        settled_at = time.monotonic()
        for process in ("registry", "valkey", "router"):
            trials.survive(process)
        lost_at = time.monotonic()
        trials.survive(fleet.youngest())
        released_at = time.monotonic()
        trials.release()
        trials.answered()
    trials.check(flow.sent, settled_at=settled_at, lost_at=lost_at, released_at=released_at)
