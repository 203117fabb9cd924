"""Six rollouts side by side, one held in each state, so that whatever dies dies in every step at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.harness import wait_until
from tests.e2e.rollout_fleet import Fleet, Sent, Traffic

TALKS = 8
# What a request may end with whose router, registry or executor is killed.
AWAY = frozenset({"EXECUTOR_UNAVAILABLE", "REGISTRY_UNAVAILABLE", "UNREACHABLE", "DEADLINE_EXCEEDED", "DRAINING"})
ENDED = frozenset({"SUCCEEDED", "ROLLED_BACK", "ABORTED"})
# A handful of requests of each arm decides where something is judged.
SOON = ("--steps", "50,100", "--min-samples", "6")
# However slow the machine is; nothing is asserted of how long anything takes.
PATIENCE_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A rollout of an adapter: in which state it stays, by what, and which command lets it go. `old` and `new` are versions."""

    adapter: str
    state: str
    old: int
    options: tuple[str, ...] = ()
    fault: str = ""
    command: str = ""
    end: str = "SUCCEEDED"

    @property
    def new(self) -> int:
        return self.old + 1


TRIALS = (
    Trial(adapter="loading", state="PRELOADING", old=21, fault="no-load", options=SOON),
    Trial(
        adapter="lacking", state="PRELOADING", old=23, options=("--quorum", "3"), command="abort", end="ABORTED"
    ),
    Trial(adapter="probing", state="PROBING", old=25, fault="no-probe", options=SOON),
    Trial(
        adapter="shadowed", state="SHADOWING", old=27,
        options=(*SOON, "--shadow", "100", "--shadow-time", "1h"), command="advance",
    ),
    Trial(
        adapter="split", state="SPLITTING", old=29,
        options=("--steps", "50,100", "--min-samples", "8000"), command="advance",
    ),
    Trial(
        adapter="kept", state="RETAINING", old=31,
        options=("--steps", "100", "--min-samples", "0", "--min-time", "0s", "--retention", "1h"),
        command="rollback", end="ROLLED_BACK",
    ),
)  # fmt: skip

NAMES = tuple(trial.adapter for trial in TRIALS)


@dataclass
class Trials:
    """What is done to them, and what must hold each time."""

    fleet: Fleet
    flow: Traffic = field(init=False)

    def begin(self) -> None:
        """Starts all, and waits until each is where it stays."""
        fleet = self.fleet
        for trial in TRIALS:
            fleet.publish(trial.old, "--alias", "prod", adapter=trial.adapter)
            fleet.publish(trial.new, adapter=trial.adapter)
            fleet.learn(trial.old)
            if trial.fault != "no-load":
                fleet.learn(trial.new)
        fleet.set_faults({trial.new: trial.fault for trial in TRIALS if trial.fault})
        for trial in TRIALS:
            fleet.start(trial.new, *trial.options, adapter=trial.adapter)
        self.in_place()

    def rows(self) -> dict[str, dict[str, Any]]:
        """Returns the newest rollout of each adapter."""
        found = self.fleet.stack.ok("rollout", "list", "--tenant", "acme")
        return {row["adapter"]: row for row in reversed(found) if row["adapter"] in NAMES}

    def in_place(self, *, lost: bool = False) -> None:
        """Waits until each is where it was, with its share, its alias right and its way back on both executors. After a
        loss what cannot be loaded is held instead, for it does not come back."""

        def there() -> bool:
            rows = self.rows()
            for trial in TRIALS:
                row = rows[trial.adapter]
                # None of them may ever end by itself: one lost executor is an accident.
                assert row["state"] not in ENDED, row
                held = lost and trial.fault == "no-load" and row["hold_reason"] == "EXECUTOR_LOST"
                share = {"SPLITTING": 50, "RETAINING": 100}.get(trial.state, 0)
                if not held and (row["state"], row["share_percent"]) != (trial.state, share):
                    return False
            return True

        wait_until(there, within_s=PATIENCE_S, what="each rollout's return to its state")
        for trial in TRIALS:
            version = trial.new if trial.state == "RETAINING" else trial.old
            assert self.fleet.prod(trial.adapter) == self.fleet.revisions[version], trial
        wait_until(self._held, within_s=PATIENCE_S, what="the revisions on both executors")

    def _held(self) -> bool:
        """Whether both executors have both revisions of each. Where one is kept from loading, the first executor is asked
        alone, so there one of them has the old revision."""
        resident = [{item["revision_id"] for item in row["revisions"]} for row in self.fleet.stack.ok("residency")]
        for trial in TRIALS:
            old, new = self.fleet.revisions[trial.old], self.fleet.revisions[trial.new]
            if trial.fault == "no-load":
                found = any(old in held for held in resident)
            else:
                found = all({old, new} <= held for held in resident)
            if not found:
                return False
        return True

    def survive(self, *processes: str) -> None:
        """Kills processes in one moment; what does not need them goes on; then they are back, and so is everything."""
        for process in processes:
            self.fleet.kill(process)
        if "router" not in processes:
            self.answered()
        for process in ("valkey", "registry", "router"):
            if process in processes:
                self.fleet.stack.ok("dev", "restart", process)
        self.fleet.serving()
        self.in_place(lost=processes[0].startswith("tiny-"))
        self.answered()

    def answered(self) -> None:
        """Waits until a request of every adapter that is asked from now on has been answered."""
        now = time.monotonic()

        def all_of_them() -> bool:
            sent = list(self.flow.sent)
            return {item.adapter for item in sent if item.at > now and not item.error} == {*NAMES}

        wait_until(all_of_them, within_s=PATIENCE_S, what="an answer of every adapter")

    def release(self) -> None:
        """Lets all go, and waits for the end of each."""
        self.fleet.set_faults({})
        wait_until(self._ended, within_s=2 * PATIENCE_S, what="the end of each rollout")
        rows = self.rows()
        for trial in TRIALS:
            assert rows[trial.adapter]["state"] == trial.end, rows[trial.adapter]
            version = trial.new if trial.end == "SUCCEEDED" else trial.old
            assert self.fleet.prod(trial.adapter) == self.fleet.revisions[version], trial
            self.fleet.learn(trial.new)
            # The old revision was never lost: it answers by its id, what it always did.
            before = self.fleet.expected[self.fleet.revisions[trial.old]]
            self.fleet.learn(trial.old)
            assert self.fleet.expected[self.fleet.revisions[trial.old]] == before, trial

    def _ended(self) -> bool:
        rows = self.rows()
        for trial in TRIALS:
            if trial.command and rows[trial.adapter]["state"] == trial.state:
                # It may have gone on in this moment, which refuses the command; then it is looked at once more.
                self.fleet.stack.cli("rollout", trial.command, f"acme/{trial.adapter}", "--reason", "seen enough")
        return all(row["state"] in ENDED for row in rows.values())

    def check(self, sent: Sequence[Sent], *, settled_at: float, lost_at: float, released_at: float) -> None:
        """Every answer is of the revision of its arm, whose numbers they are, and of an arm that its rollout had then."""
        for trial in TRIALS:
            mine = [item for item in sent if item.adapter == trial.adapter]
            old, new = self.fleet.revisions[trial.old], self.fleet.revisions[trial.new]
            for item in mine:
                if item.error:
                    assert item.error in AWAY, item
                    continue
                wanted = {"new": {new}, "control": {old}, "old": {old}}.get(item.arm, {old, new})
                assert item.revision_id in wanted, item
                assert item.token_ids == self.fleet.expected[item.revision_id], item
            held = [item for item in mine if not item.error and item.ended < released_at]
            only = {"SPLITTING": {old, new}, "RETAINING": {new}}.get(trial.state, {old})
            assert {item.revision_id for item in held} == only, trial
            if trial.state == "SPLITTING":
                # Until an executor is lost with it, each conversation has one revision, whichever process has died.
                talks = {
                    (item.session, item.revision_id)
                    for item in held
                    if "talk" in item.session and settled_at < item.at and item.ended < lost_at
                }
                assert talks
                assert len(talks) == len({session for session, _ in talks}), talks
