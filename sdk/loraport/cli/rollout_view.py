"""How a rollout is shown: one JSON object, a few lines, or a live view that is drawn anew."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from loraport.cli.views import last_part, plain, print_json, say, time_text

_PERCENT = ("errors", "empty", "rejected")


def state_of(rollout: Any) -> str:
    """Returns the state's word."""
    from loraport.registry.v1.rollout_service_pb2 import Rollout

    return str(Rollout.State.Name(rollout.state)).removeprefix("STATE_")


def rollout_row(rollout: Any) -> dict[str, Any]:
    """Returns a rollout as a JSON object."""
    _, tenant, _, adapter, _, name = rollout.name.split("/")
    return {
        "rollout": name,
        "tenant": tenant,
        "adapter": adapter,
        "alias": rollout.alias,
        "state": state_of(rollout),
        "hold_reason": rollout.hold_reason or None,
        "share_percent": rollout.share_percent,
        "step_index": rollout.step_index,
        "step_percents": list(rollout.step_percents),
        "from_revision_id": rollout.from_revision_id,
        "to_revision_id": rollout.to_revision_id,
        "verdict": rollout.verdict or None,
        "executors": [_fields(item) for item in rollout.executors],
        "arms": [_fields(item) for item in rollout.arms],
        "comparisons": [_fields(item) for item in rollout.comparisons],
        "story": [_line(item) for item in rollout.story],
        "plan": list(rollout.plan),
        "create_time": time_text(rollout, "create_time"),
        "update_time": time_text(rollout, "update_time"),
        "etag": rollout.etag,
    }


def _fields(message: Any) -> dict[str, Any]:
    """Returns every field; what is unset is None where that differs from zero."""
    return {
        field.name: getattr(message, field.name) if not field.has_presence or message.HasField(field.name) else None
        for field in message.DESCRIPTOR.fields
    }


def _line(line: Any) -> dict[str, Any]:
    return {
        "time": time_text(line, "decide_time"),
        "state": state_of(line),
        "actor": line.actor,
        "sentence": line.sentence,
    }


def lines(rollout: Any, *, story: int | None = None) -> Iterator[str]:
    """Yields a rollout in lines; of its story the last `story` ones, all for None."""
    row = rollout_row(rollout)
    held = f" ({row['hold_reason']})" if row["hold_reason"] else ""
    yield f"{row['tenant']}/{row['adapter']} {row['rollout']}, alias {row['alias']}: {row['state']}{held}"
    yield f"  {_bar(rollout)}"
    yield f"  from {row['from_revision_id']}"
    yield f"  to   {row['to_revision_id']}"
    if row["executors"]:
        yield "  executors: " + ", ".join(map(_executor, rollout.executors))
    if any(arm.request_count for arm in rollout.arms):
        yield f"  {'arm':8} {'requests':>9} {'errors':>7} {'first ms':>9} {'token ms':>9} {'tokens':>7} {'repeated':>8}"
        yield from (f"  {_arm(arm)}" for arm in rollout.arms if arm.request_count)
    for item in rollout.comparisons:
        if item.sample_count:
            yield f"  {item.verdict:5} {_comparison(item)}"
    if row["verdict"]:
        yield f"  judge: {row['verdict']}"
    told = row["story"] if story is None else row["story"][-story:]
    yield from (f"  {item['time']}  {item['sentence']}" for item in told)


def _bar(rollout: Any) -> str:
    steps = []
    for index, percent in enumerate(rollout.step_percents):
        text = f"{percent:g} %"
        steps.append(f"[{text}]" if percent == rollout.share_percent and index == rollout.step_index else text)
    return f"share {rollout.share_percent:g} % of: " + " → ".join(steps)


def _executor(item: Any) -> str:
    word = "ready" if item.ready else item.failure_reason or "waiting"
    if item.HasField("mean_logprob_difference"):
        word += f", probed within {item.mean_logprob_difference:.2g}"
    if item.HasField("perplexity_ratio"):
        word += f", perplexity × {item.perplexity_ratio:.3f}"
    return f"{item.executor} {word}"


def _arm(arm: Any) -> str:
    def number(name: str, form: str) -> str:
        return format(getattr(arm, name), form) if arm.HasField(name) else "-"

    cells = (
        f"{arm.arm:8} {arm.request_count:>9} {arm.error_count:>7} {number('first_token_ms', '.1f'):>9} "
        f"{number('per_token_ms', '.2f'):>9} {number('output_token_count', '.0f'):>7} {number('repetition', '.2f'):>8}"
    )
    judged = arm.accepted_count + arm.rejected_count
    return cells + (f"  {arm.accepted_count} of {judged} accepted" if judged else "")


# A bound above a thousandfold says that nothing is known.
MOST_SHOWN = 1000.0


def _comparison(item: Any) -> str:
    name = item.metric.removesuffix("_ms").replace("_", " ")
    if item.metric in _PERCENT:
        return f"{name:18} {item.estimate * 100:+.2f} points"
    if item.metric == "repetition":
        ends = f" ({item.low:+.2f} to {item.high:+.2f})" if item.HasField("low") else ""
        return f"{name:18} {item.estimate:+.2f}{ends}"
    if not item.HasField("low") or item.high > MOST_SHOWN:
        return f"{name:18} not known yet"
    percent = [f"{100 * (value - 1):+.1f} %" for value in (item.estimate, item.low, item.high)]
    return f"{name:18} {percent[0]} ({percent[1]} to {percent[2]})"


def follow(rollouts: Iterable[Any], *, as_json: bool) -> Any:
    """Shows a rollout until it ends, and returns it as it is then; on a terminal the view is drawn anew."""
    if as_json or not sys.stdout.isatty():
        return _follow_lines(rollouts, as_json=as_json)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    last = None
    with Live(console=Console(), auto_refresh=False) as live:
        for last in rollouts:
            live.update(Text(plain("\n".join(lines(last, story=8)))), refresh=True)
    return last


def _follow_lines(rollouts: Iterable[Any], *, as_json: bool) -> Any:
    told, last = 0, None
    for last in rollouts:
        if as_json:
            print_json(rollout_row(last))
            sys.stdout.flush()
            continue
        for line in last.story[told:]:
            say(f"{time_text(line, 'decide_time')}  {state_of(line)}  {line.sentence}")
        told = len(last.story)
        sys.stdout.flush()
    return last


def short(rollout: Any) -> dict[str, Any]:
    """Returns the row of a list."""
    row = rollout_row(rollout)
    return {**row, "share": f"{row['share_percent']:g} %", "to": last_part(row["to_revision_id"])[:19]}
