"""The events of one stream, put together."""

from loraport.errors import InternalError
from loraport.values import Answer, Completion, Event, Finished, Started, Tokens


class CompletionBuilder:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._tokens: dict[int, list[Tokens]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case Started():
                self._started = event
            case Tokens():
                self._tokens.setdefault(event.index, []).append(event)
            case Finished():
                self._finished[event.index] = event

    def result(self) -> Completion:
        """Returns the whole.

        Raises:
            InternalError: the stream ended without saying how.
        """
        started = self._started
        if started is None or not self._finished or set(self._tokens) - set(self._finished):
            raise InternalError("the router ended the stream early", reason="INCOMPLETE_STREAM")
        return Completion(
            revision_id=started.revision_id,
            version=started.version,
            base_id=started.base_id,
            executor=started.executor,
            queue_ms=started.queue_ms,
            load_ms=started.load_ms,
            prompt_token_ids=started.prompt_token_ids,
            rollout_arm=started.rollout_arm,
            request_id=started.request_id,
            answers=tuple(self._answer(self._finished[index]) for index in sorted(self._finished)),
        )

    def _answer(self, finished: Finished) -> Answer:
        parts = self._tokens.get(finished.index, [])
        return Answer(
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            finish_reason=finished.finish_reason,
            usage=finished.usage,
            logprobs=tuple(position for part in parts for position in part.logprobs),
            kernel_path=finished.kernel_path,
            max_batch_adapter_count=finished.max_batch_adapter_count,
            stop_match=finished.stop_match,
        )
