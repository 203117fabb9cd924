"""One score: how likely a given continuation is, asked of one executor."""

from services.router.door import Job
from services.router.events import Scored, ScoreOrder
from services.router.passage import Passage, RelayParts
from services.shared.errors import LoraportError


async def score(job: Job, parts: RelayParts, *, timeout_s: float | None) -> Scored:
    """Returns the log-probabilities of the job's continuation.

    Raises:
        LoraportError: why there are none.
    """
    passage = Passage(job, parts, timeout_s=timeout_s)

    async def attempt(executor: str, queue_ms: float) -> Scored:
        order = ScoreOrder(
            request_id=job.id,
            ticket=passage.ticket(),
            revision_id=job.revision_id,
            prompt_token_ids=job.prompt_token_ids,
            continuation_token_ids=job.continuation_token_ids,
            top_logprobs=job.top_logprobs,
        )
        answer = await parts.fleet.executor(executor).score(order, timeout_s=passage.left_s())
        passage.require_same(answer.revision_id, answer.base_id)
        if len(answer.logprobs) != len(job.continuation_token_ids):
            raise LoraportError("INTERNAL", "the executor did not score every token")
        passage.begun(answer.load_ms, answer.usage.cached_tokens)
        passage.decoded(0)
        return Scored(
            logprobs=answer.logprobs,
            revision_id=answer.revision_id,
            base_id=answer.base_id,
            executor=executor,
            queue_ms=queue_ms,
            load_ms=answer.load_ms,
            version=job.revision.version if job.revision is not None else 0,
            kernel_path=answer.kernel_path,
            usage=answer.usage,
        )

    try:
        return await passage.run(attempt)
    except LoraportError as error:
        passage.note_unavailable(error)
        raise passage.for_the_caller(error) from None
    finally:
        passage.close()
