"""`loraport rollout` and `adapter history` against a real registry."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from loraport.cli.main import run
from loraport.cli.rollouts import read_prompts, read_span
from loraport.dev.layout import ENDPOINTS_SCHEMA
from tests.contract.registry_rig import LEAVES, serving, write_config
from tests.contract.rollout_rig import Hands, make_hands, requests

Cli = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[tuple[Hands, Cli]]:
    """An adapter with two revisions, and what runs a command and gives (exit code, stdout, stderr)."""
    async with serving(write_config(tmp_path, rollout_interval_s=0.02)) as rig:
        (tmp_path / "admin.pem").write_bytes(LEAVES["admin"][0])
        (tmp_path / "admin.key").write_bytes(LEAVES["admin"][1])
        endpoints = {
            "schema": ENDPOINTS_SCHEMA,
            **dict.fromkeys(("registry", "router_admin", "loader_upload"), rig.address),
            "credentials": {"ca": "ca.pem", "admin_certificate": "admin.pem", "admin_key": "admin.key"},
        }
        (tmp_path / "endpoints.json").write_text(json.dumps(endpoints))

        async def call(*words: str) -> tuple[int, str, str]:
            capsys.readouterr()
            code = await asyncio.to_thread(run, [*words, "--data", str(tmp_path)])
            out, err = capsys.readouterr()
            return code, "\n".join(line for line in out.splitlines() if "[info" not in line), err

        yield await make_hands(rig), call


QUICK = [
    *("--steps", "50,100", "--min-samples", "20", "--min-time", "0", "--retention", "0s"),
    *("--tolerance", "500", "--error-margin", "60"),
]


async def test_a_rollout_from_plan_to_story(world: tuple[Hands, Cli], tmp_path: Path) -> None:
    hands, cli = world
    golden = tmp_path / "golden.txt"
    golden.write_text('the quick brown fox\n\n{"token_ids": [1, 2, 3]}\n')
    start = ["rollout", "start", "acme/bot@v2", "--golden", str(golden), *QUICK]
    code, out, _ = await cli(*start, "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "nothing is started; r1 would:")
    assert "probe: 2 golden prompts on each" in out
    assert (await cli("rollout", "list"))[1].startswith("no rollouts")
    code, out, _ = await cli(*start, "--json")
    made = json.loads(out)
    assert (code, made["state"], made["step_percents"]) == (0, "PRELOADING", [50.0, 100.0])
    name = f"tenants/acme/adapters/bot/rollouts/{made['rollout']}"
    watching = asyncio.create_task(cli_apart(tmp_path, "rollout", "watch", "acme/bot"))
    for executor in ("e0", "e1"):
        await hands.ready(name, executor)
    await hands.until(name, lambda item: len(item.story) >= 2)
    for executor in ("e0", "e1"):
        await hands.probed(name, executor)
    await hands.until(name, lambda item: item.share_percent == 50)
    await hands.observe(name, 0, requests(15))
    code, out, _ = await cli("rollout", "status", "acme/bot")
    assert code == 0
    for piece in ("[50 %] → 100 %", "e0 ready, probed within 0.001", "control ", "first token ", "judge: WAIT"):
        assert piece in out
    await hands.observe(name, 0, requests(40, seed=1))
    await hands.until(name, lambda item: item.share_percent == 100)
    await hands.observe(name, 1, requests(40, seed=2))
    code, out = await watching
    assert code == 0
    assert [line.split("  ")[1] for line in out.splitlines() if line.startswith("20")][-2:] == [
        "RETAINING",
        "SUCCEEDED",
    ]
    code, out, _ = await cli("adapter", "history", "acme/bot")
    told = [line.split("  ", 1)[1] for line in out.splitlines()]
    assert told[0].startswith("v1 is announced")
    assert any(line.startswith("rollout r1: prod is to move from v1 to v2") for line in told)
    assert told[-1].startswith("rollout r1: done")


async def cli_apart(data: Path, *words: str) -> tuple[int, str]:
    """Runs a command in a process of its own, whose output nobody else reads."""
    import sys

    script = "import sys; from loraport.cli.main import run; sys.exit(run(sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *words, "--data", str(data), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode()


async def test_by_hand(world: tuple[Hands, Cli]) -> None:
    _, cli = world
    await cli("rollout", "start", "acme/bot", *QUICK)
    code, _, err = await cli("rollout", "advance", "acme/bot", "--reason", "hurry")
    assert (code, "QUORUM_MISSING" in err, "see: loraport rollout status" in err) == (1, True, True)
    code, _, err = await cli("alias", "set", "acme/bot", "prod", "--now", "--reason", "hurry")
    assert (code, "see: loraport rollout list" in err) == (1, True)
    assert (await cli("rollout", "abort", "acme/bot"))[0] == 2, "a reason is needed"
    assert "held (BY_HAND): lunch" in (await cli("rollout", "pause", "acme/bot", "--reason", "lunch"))[1]
    assert "is PRELOADING: goes on: by hand" in (await cli("rollout", "resume", "acme/bot"))[1]
    assert "is ROLLED_BACK" in (await cli("rollout", "rollback", "acme/bot", "--reason", "no"))[1]
    told = (await cli("adapter", "history", "acme/bot"))[1]
    assert "is ROLLED_BACK" in (await cli("rollout", "rollback", "acme/bot", "--reason", "again"))[1]
    assert (await cli("adapter", "history", "acme/bot"))[1] == told, "what is over is not over once more"
    assert (await cli("rollout", "watch", "acme/bot"))[0] == 1, "it has not succeeded"
    rows = json.loads((await cli("rollout", "list", "acme/bot", "--json"))[1])
    assert [(row["rollout"], row["state"]) for row in rows] == [("r1", "ROLLED_BACK")]
    assert json.loads((await cli("rollout", "list", "--running", "--json"))[1]) == []
    code, _, err = await cli("rollout", "status", "acme/bot", "--rollout", "r7")
    assert (code, "ROLLOUT_NOT_FOUND" in err) == (1, True)
    code, out, _ = await cli("adapter", "history", "acme/bot", "--refused", "--json")
    refused = [row["what"] for row in json.loads(out) if row["decision"] == "refused"]
    assert refused == [
        "rollout r1: ControlRollout was refused, QUORUM_MISSING",
        "alias prod: SetAlias was refused, ROLLOUT_RUNNING",
    ]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("ghost/bot", "there is no tenant ghost"),
        ("acme/ghost", "acme has no adapter ghost"),
        ("acme/bot@v9", "acme/bot has no v9"),
        ("ghost/bot@v1", "there is no tenant ghost"),
    ],
)
async def test_an_unknown_target_says_which_part_is_unknown(world: tuple[Hands, Cli], target: str, said: str) -> None:
    code, _, err = await world[1]("rollout", "start", target)
    assert (code, said in err) == (1, True), err


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("10min", 600), ("2h", 7200), ("50ms", 0.05)])
def test_spans(text: str, seconds: float) -> None:
    assert read_span(text) == seconds


@pytest.mark.parametrize("line", ['{"text": ', '{"words": 1}', '{"token_ids": "no"}'])
def test_a_line_that_is_no_prompt_is_wrong_use(tmp_path: Path, line: str) -> None:
    (tmp_path / "f").write_text(f"fine\n{line}\n")
    with pytest.raises(Exception, match="line 2"):
        read_prompts(tmp_path / "f")


def test_a_file_without_a_prompt_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("\n  \n")
    with pytest.raises(Exception, match="holds no prompt"):
        read_prompts(tmp_path / "f")
