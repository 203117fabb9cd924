"""What one Execute call is told of its answers, and in what portions."""

from services.executor.execution import MAX_BATCH, Execution
from services.executor.request import Ended, FinishReason, RequestSpec, Sampling, Tokens, Usage

USAGE = Usage(prompt_tokens=1, output_tokens=1, prefix_hit_tokens=0, preemptions=0)


class PlayedEngine:
    """Takes requests and lets the test speak for them."""

    def __init__(self) -> None:
        self.sinks: list = []
        self.cancelled: list[str] = []

    def submit(self, spec: RequestSpec, sink: object) -> None:
        self.sinks.append(sink)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def spec(index: int) -> RequestSpec:
    return RequestSpec(request_id=f"r/{index}", prompt=(1,), sampling=Sampling(), revision_id=None, salt=b"")


async def test_what_has_piled_up_comes_together_and_in_order() -> None:
    engine = PlayedEngine()
    execution = Execution(engine, [spec(0), spec(1)])  # type: ignore[arg-type]
    execution.submit()
    batches = execution.batches()
    first = [(0, tokens(0)), (1, tokens(1)), (0, ended(0))]
    for index, event in first:
        engine.sinks[index](event)
    assert await anext(batches) == first
    more = [(1, tokens(number)) for number in range(MAX_BATCH + 5)] + [(1, ended(1))]
    for index, event in more:
        engine.sinks[index](event)
    assert await anext(batches) == more[:MAX_BATCH], "a message has a bound"
    assert await anext(batches) == more[MAX_BATCH:]
    assert await anext(batches, None) is None
    execution.close()
    assert engine.cancelled == []


async def test_one_event_waits_for_no_other() -> None:
    engine = PlayedEngine()
    execution = Execution(engine, [spec(0)])  # type: ignore[arg-type]
    execution.submit()
    engine.sinks[0](tokens(7))
    assert await anext(execution.batches()) == [(0, tokens(7))]
    execution.close()
    assert engine.cancelled == ["r/0"]


def tokens(token: int) -> Tokens:
    return Tokens(request_id="r", token_ids=(token,), kernel_path="base", distinct_adapters=0)


def ended(index: int) -> Ended:
    return Ended(
        request_id=f"r/{index}",
        reason=FinishReason.EOS,
        usage=USAGE,
        kernel_path="base",
        distinct_adapters=0,
    )
