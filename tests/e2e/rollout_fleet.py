"""A stack with two executors that a test makes faulty, traffic without pause, and what must hold of every answer."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from loraport import Client
from loraport.errors import LoraportError
from tests.e2e.harness import Stack, add_tenant, running, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT, TOKENS = "the quick brown fox", 6
WORKERS = 4
WITHIN_S = 120
# A handful of requests decides here: the judge's own figures are what `make bench-rollout` measures.
FAST = (
    "--steps", "20,50,100", "--min-samples", "12", "--min-time", "500ms", "--margin", "25", "--tolerance", "1000",
    "--error-margin", "20", "--retention", "2s",
)  # fmt: skip


@dataclass
class Sent:
    """One request and what became of it."""

    at: float
    adapter: str
    session: str
    revision_id: str = ""
    arm: str = ""
    token_ids: tuple[int, ...] = ()
    error: str = ""
    ended: float = 0.0


@dataclass
class Traffic:
    """Asks from several threads until stopped, of each adapter in turn, with so little pause.

    With `talks` every second request is of one of so many conversations; every other one is the only one of its.
    """

    stack: Stack
    adapters: tuple[str, ...] = ("bot",)
    talks: int = 0
    pause_s: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def goes_on(self, at: float) -> None:
        """Waits until some requests that were sent after a moment have ended."""
        wait_until(
            lambda: sum(sent.at > at for sent in list(self.sent)) >= 2 * WORKERS, within_s=120, what="further traffic"
        )

    def run(self, number: int) -> None:
        adapter = self.adapters[number % len(self.adapters)]
        with Client.local(self.stack.data, tenant="acme", timeout=120) as client:
            turn = 0
            while not self.stop.is_set():
                turn += 1
                again = self.talks and turn % 2 == 0
                session = f"{number}-talk-{turn // 2 % self.talks}" if again else f"{number}-{turn}"
                sent = Sent(time.monotonic(), adapter, session)
                try:
                    answer = client.generate(
                        PROMPT, adapter=adapter, max_tokens=TOKENS, temperature=0.0, ignore_eos=True,
                        session_id=session,
                    )  # fmt: skip
                    sent.revision_id, sent.arm, sent.token_ids = (
                        answer.revision_id,
                        answer.rollout_arm,
                        answer.token_ids,
                    )
                except LoraportError as error:
                    sent.error = error.reason or type(error).__name__
                sent.ended = time.monotonic()
                self.sent.append(sent)
                time.sleep(self.pause_s)


@contextmanager
def traffic(stack: Stack, *adapters: str, talks: int = 0, pause_s: float = 0.0) -> Iterator[Traffic]:
    flow = Traffic(stack, adapters or ("bot",), talks, pause_s)
    threads = [threading.Thread(target=flow.run, args=(number,)) for number in range(max(WORKERS, len(adapters)))]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(flow.sent) >= 2 * WORKERS, within_s=120, what="traffic")
        yield flow
    finally:
        flow.stop.set()
        for thread in threads:
            thread.join()


@dataclass
class Fleet:
    """The stack, where its executors read their faults, and the revisions by version."""

    stack: Stack
    faults: Path
    work: Path
    source: Path
    golden: Path
    evals: Path
    # What `prod` points to.
    current: int = 1
    revisions: dict[int, str] = field(default_factory=dict)
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def publish(self, version: int, *options: str, adapter: str = "bot") -> str:
        """Registers the bundle with numbers that only this version has, unless that was done."""
        if version in self.revisions:
            return self.revisions[version]
        folder = self.work / f"v{version}"
        shutil.copytree(self.source, folder)
        weights = load_file(folder / "adapter_model.safetensors")
        # With these numbers the second version is no worse at the prompts than the first, on either tiny base.
        rng = np.random.default_rng(40 + version)
        changed = {
            name: (w * (1 + 0.4 * rng.standard_normal(w.shape))).astype(w.dtype) if "lora_B" in name else w
            for name, w in weights.items()
        }
        save_file(changed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        published = self.stack.ok(
            "adapter", "register", str(folder), "--tenant", "acme", "--name", adapter, "--base", "tiny", "--approve",
            *options,
        )  # fmt: skip
        revision: str = published["revision_id"]
        self.revisions[version] = revision
        return revision

    def learn(self, version: int) -> None:
        """Asks for a revision by its id: what it answers when nothing is wrong with it."""
        with Client.local(self.stack.data, tenant="acme", timeout=120) as client:
            revision = self.revisions[version]
            answer = client.generate(PROMPT, revision_id=revision, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            self.expected[revision] = answer.token_ids

    def fault(self, version: int, kind: str) -> None:
        self.set_faults({version: kind})

    def set_faults(self, kinds: Mapping[int, str]) -> None:
        new = self.faults.with_suffix(".new")
        new.write_text(json.dumps({self.revisions[version]: kind for version, kind in kinds.items()}))
        new.replace(self.faults)  # executors read it all the time, and half a file is no fault

    def start(self, version: int, *options: str, adapter: str = "bot") -> None:
        target = (f"acme/{adapter}", "--revision", self.revisions[version])
        self.stack.ok("rollout", "start", *target, "--golden", str(self.golden), *FAST, *options)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.stack.ok("rollout", "status", "acme/bot")
        return found

    def wait(self, *states: str, share: float = 0.0) -> dict[str, Any]:
        deadline = time.monotonic() + WITHIN_S
        while True:
            found = self.status()
            if found["state"] in states and found["share_percent"] >= share:
                return found
            ended = found["state"] in ("SUCCEEDED", "ROLLED_BACK", "ABORTED")
            assert not ended, found
            assert time.monotonic() < deadline, found
            time.sleep(0.3)

    def prod(self, adapter: str = "bot") -> str:
        """Returns the id of the revision that the alias points to."""
        shown = self.stack.ok("adapter", "show", f"acme/{adapter}")
        (revision,) = (alias["revision_id"] for alias in shown["aliases"] if alias["alias"] == "prod")
        return str(revision)

    def kill(self, process: str) -> None:
        """Kills a process; of an executor the process itself, which its keeper starts again."""
        pid = self.stack.processes()[process]
        if process.startswith("tiny-"):
            for child in psutil.Process(pid).children():
                child.kill()
        else:
            os.kill(pid, signal.SIGKILL)

    def youngest(self) -> str:
        """Returns the executor that has ended least often: a keeper gives up what ends again and again."""
        return min(("tiny-0", "tiny-1"), key=self.deaths)

    def serving(self) -> None:
        """Waits until all executors serve."""

        def all_serve() -> bool:
            answer = self.stack.cli("residency", "--json")
            return answer.code == 0 and all(row["serving"] for row in answer.json)

        wait_until(all_serve, within_s=150, what="the executors' return")

    def deaths(self, executor: str = "*") -> int:
        """Returns how often an executor, or any of them, has ended and was started again."""
        logs = (self.stack.data / "logs").glob("tiny-*.log" if executor == "*" else f"{executor}.log")
        return sum(log.read_text(errors="replace").count("it ended and is started again") for log in logs)


def check(flow: Traffic, fleet: Fleet, *, old: int, new: int, failing: frozenset[str] = frozenset()) -> None:
    """Every answer is of the revision of its arm and of no other; only what `failing` names may have failed."""
    for sent in flow.sent:
        if sent.error:
            assert sent.error in failing, sent
            continue
        wanted = {"new": {fleet.revisions[new]}, "control": {fleet.revisions[old]}, "old": {fleet.revisions[old]}}
        assert sent.revision_id in wanted.get(sent.arm, {fleet.revisions[old], fleet.revisions[new]}), sent
        assert sent.token_ids == fleet.expected[sent.revision_id], sent


@contextmanager
def faulty_fleet(world_dir: Path, work: Path) -> Iterator[Fleet]:
    """The stack, with the first revision behind `prod`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXECUTOR_FAULTS", str(work / "faults.json"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "support" / "faulty"), str(ROOT)]))
        base = f"tiny={world_dir / 'bases' / 'tiny'}"
        with running(work / "data", "--base", base, "--dtype", "float32", "--executors", "2") as stack:
            add_tenant(stack, "acme")
            golden = work / "golden.txt"
            golden.write_text("the quick brown fox jumps\na lazy dog and a fox\n")
            evals = work / "eval.txt"
            evals.write_text("a lazy dog jumps over the quick brown fox\n")
            fleet = Fleet(stack, work / "faults.json", work, world_dir / "bundles" / "alpha_8", golden, evals)
            fleet.publish(1, "--alias", "prod")
            fleet.learn(1)
            yield fleet
