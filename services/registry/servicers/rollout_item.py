"""A rollout as peers see it, as a message."""

from loraport.registry.v1 import catalog_service_pb2 as catalog_pb
from loraport.registry.v1 import rollout_service_pb2 as rollout_pb
from services.registry.rollout.settings import Prompt
from services.shared.catalog import PromptItem, RolloutItem


def prompt_message(prompt: Prompt | PromptItem) -> rollout_pb.RolloutPrompt:
    """Returns the message of a prompt."""
    if prompt.text:
        return rollout_pb.RolloutPrompt(text=prompt.text)
    return rollout_pb.RolloutPrompt(token_ids=rollout_pb.RolloutTokenIds(ids=prompt.token_ids))


def catalog_rollout(item: RolloutItem) -> catalog_pb.CatalogRollout:
    """Returns the message of a rollout as peers see it."""
    return catalog_pb.CatalogRollout(
        name=item.name,
        tenant=item.tenant,
        adapter=item.adapter,
        alias=item.alias,
        salt=item.salt,
        from_revision_id=item.from_revision_id,
        to_revision_id=item.to_revision_id,
        base_model=item.base_model,
        state=f"STATE_{item.state}",
        share_basis_points=item.share_basis_points,
        step_index=item.step_index,
        golden_prompts=list(map(prompt_message, item.golden_prompts)),
        eval_prompts=list(map(prompt_message, item.eval_prompts)),
        shadow_basis_points=item.shadow_basis_points,
        generation=item.generation,
        ended=item.ended,
    )
