"""The answers to one prompt: an executor's tokens in, tokens with text out, each answer ended exactly once.

A stop string ends an answer here, before the executor knows: the token that completed it is the last one, its text is
cut, and what the executor still sends for that answer is dropped.
"""

from collections.abc import Iterable

from services.router.detokenize import Detokenizer, TokenTable
from services.router.events import ExecutorEvent, ExecutorFinished, ExecutorTokens, Finished, Tokens, Usage
from services.router.validate import Sampling
from services.shared.errors import LoraportError


class Answers:
    """See the module's text."""

    def __init__(self, table: TokenTable, sampling: Sampling, *, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._open = {
            index: Detokenizer(table, stops=sampling.stop, min_tokens=sampling.min_tokens or 0)
            for index in range(sampling.answers)
        }
        self._all = frozenset(self._open)

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return not self._open

    def take(self, event: ExecutorEvent) -> Iterable[Tokens | Finished]:
        """Returns what the caller is told.

        Raises:
            LoraportError: INTERNAL when the executor breaks the order of events.
        """
        index = getattr(event, "index", -1)
        if index not in self._all:
            raise LoraportError("INTERNAL", "the executor sent an event that belongs to no answer")
        answer = self._open.get(index)
        if answer is None:
            return ()
        match event:
            case ExecutorTokens():
                return self._tokens(answer, event)
            case ExecutorFinished():
                return self._finished(answer, event)
            case _:
                raise LoraportError("INTERNAL", "the executor sent an event out of order")

    def _tokens(self, answer: Detokenizer, event: ExecutorTokens) -> Iterable[Tokens | Finished]:
        text = []
        for count, token in enumerate(event.token_ids, start=1):
            piece = answer.feed(token)
            text.append(piece.text)
            if piece.stop:
                yield Tokens(event.index, event.token_ids[:count], "".join(text), event.logprobs[:count])
                del self._open[event.index]
                yield Finished(
                    index=event.index,
                    reason="stop",
                    usage=Usage(self._prompt_tokens, answer.token_count, self._cached_tokens),
                    kernel_path=event.kernel_path,
                    max_batch_adapter_count=event.max_batch_adapter_count,
                    stop_match=piece.stop,
                )
                return
        if event.token_ids:
            yield Tokens(event.index, event.token_ids, "".join(text), event.logprobs)

    def _finished(self, answer: Detokenizer, event: ExecutorFinished) -> Iterable[Tokens | Finished]:
        rest = answer.finish()
        if rest.text:
            yield Tokens(event.index, (), rest.text)
        del self._open[event.index]
        stop_id = "" if event.stop_token_id is None else str(event.stop_token_id)
        yield Finished(
            index=event.index,
            reason="stop" if rest.stop else event.reason,
            usage=event.usage,
            kernel_path=event.kernel_path,
            max_batch_adapter_count=event.max_batch_adapter_count,
            stop_match=rest.stop or stop_id,
        )
