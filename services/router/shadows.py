"""Copies of requests to the new revision of a rollout that is SHADOWING; their answers are dropped.

A copy goes only where there is room that nobody waits for, pays from the rollout's own account, and never touches the
request that it copies. That one is watched as its control.
"""

import asyncio
import dataclasses
import uuid
from contextlib import aclosing

import structlog

from services.router.dispatch import Dispatch
from services.router.door import Job
from services.router.observing import Observer
from services.router.passage import RelayParts
from services.router.ports import Catalog
from services.router.relay import Relay
from services.router.rollout_split import Side
from services.shared.catalog import RolloutItem
from services.shared.errors import LoraportError
from services.shared.split import SHADOW_STEP, bucket_of

log = structlog.get_logger()

# At a time, of all rollouts. Room is spare while no more than one in so many of an executor's places is taken.
MAX_COPIES, SPARE_PART = 4, 2
# Of a tenant of weight 1.
WEIGHT, LOWEST_PRIORITY = 0.25, -10
TIMEOUT_S = 120.0


class Shadows:
    """See the module's text. Belongs to one event loop."""

    def __init__(self, dispatch: Dispatch, catalog: Catalog, relays: RelayParts, observer: Observer) -> None:
        self._dispatch = dispatch
        self._catalog = catalog
        self._relays = relays
        self._observer = observer
        self._copies: set[asyncio.Task[None]] = set()

    def copy(self, job: Job) -> Job:
        """Sends a copy of an admitted request if it is one to copy now; returns the request, as it is to be watched."""
        item = self._rollout(job)
        if item is None or bucket_of(item.salt, job.tenant, f"shadow/{job.id}") >= item.shadow_basis_points:
            return job
        revision = self._catalog.view.revisions.get(item.to_revision_id)
        if revision is None or revision.state != "ACTIVE" or not self._spare(job.base.base_model):
            return job
        bucket = job.side.bucket if job.side is not None else 0
        copy = dataclasses.replace(
            job,
            id=uuid.uuid4().hex,
            revision=revision,
            side=Side(item.name, "new", SHADOW_STEP, bucket),
            account=item.name,
            weight=WEIGHT,
            priority=LOWEST_PRIORITY,
            session_id="",
            # A caller's own patience is no measure of a copy.
            first_token_timeout_s=None,
        )
        task = asyncio.create_task(self._run(copy))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)
        return dataclasses.replace(job, side=Side(item.name, "control", SHADOW_STEP, bucket))

    async def stop(self) -> None:
        """Ends the copies that run."""
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    def _rollout(self, job: Job) -> RolloutItem | None:
        """Returns the rollout that the request is part of, if it copies requests."""
        if job.side is None or job.revision is None:
            return None
        running = self._catalog.view.rollouts.values()
        found = next((item for item in running if item.name == job.side.rollout), None)
        return found if found is not None and found.state == "SHADOWING" and found.shadow_basis_points else None

    def _spare(self, base_model: str) -> bool:
        if len(self._copies) >= MAX_COPIES or len(self._dispatch.queue):
            return False
        executors = self._dispatch.members.view().of_base(base_model)
        return any(e.serving and e.in_flight * SPARE_PART <= e.window for e in executors)

    async def _run(self, job: Job) -> None:
        relay = Relay(job, self._relays, timeout_s=TIMEOUT_S)
        try:
            with self._observer.watch(job, timeout_s=TIMEOUT_S) as observed:
                async with aclosing(relay.events()) as events:
                    async for told in events:
                        for event in told:
                            observed.saw(event)
        except LoraportError as error:
            log.info("a copied request failed", revision_id=job.revision_id, reason=error.reason)
        finally:
            relay.close()
