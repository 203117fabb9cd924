"""BaseModelService."""

from typing import Any

from loraport.bundle.base import base_id, to_json
from loraport.bundle.canonical import canonical
from loraport.registry.v1 import base_model_service_pb2 as pb
from loraport.registry.v1 import base_model_service_pb2_grpc as stubs
from services.registry.desk import Desk, Note, page_of
from services.registry.publishing import parse_spec
from services.registry.servicers import convert
from services.registry.store import bases
from services.registry.store.database import Transaction
from services.shared.errors import LoraportError
from services.shared.names import base_model_name, check_id, parse_base_model
from services.shared.paging import PageTokens, page_size

_SCOPE = ("base_models",)


class BaseModelServicer(stubs.BaseModelServiceServicer):
    """Keeps the base models."""

    def __init__(self, desk: Desk, tokens: PageTokens) -> None:
        self._desk = desk
        self._tokens = tokens

    async def CreateBaseModel(self, request: pb.CreateBaseModelRequest, context: Any) -> pb.BaseModel:
        def work(transaction: Transaction, note: Note) -> pb.BaseModel:
            name = check_id(request.base_model_id, "base_model_id")
            spec_json = request.base_model.spec_json
            row = bases.add_base(
                transaction,
                name,
                base_id=_base_id(spec_json),
                spec_json=spec_json,
                now_us=self._desk.now_us(),
            )
            return convert.base_model(row)

        return await self._desk.change(request, pb.BaseModel, work, resource=base_model_name(request.base_model_id))

    async def GetBaseModel(self, request: pb.GetBaseModelRequest, context: Any) -> pb.BaseModel:
        name = parse_base_model(request.name)
        row = await self._desk.read(lambda view: bases.find_base(view, name))
        if row is None:
            raise LoraportError("BASE_MODEL_NOT_FOUND", f"there is no base model {name}")
        return convert.base_model(row)

    async def ListBaseModels(self, request: pb.ListBaseModelsRequest, context: Any) -> pb.ListBaseModelsResponse:
        limit = page_size(request.page_size)
        after = self._tokens.open(request.page_token, scope=_SCOPE, kinds=(str,))
        rows = await self._desk.read(lambda view: bases.list_bases(view, after=after, limit=limit))
        rows, token = page_of(rows, limit, lambda row: self._tokens.seal((row.base_model,), scope=_SCOPE))
        return pb.ListBaseModelsResponse(base_models=map(convert.base_model, rows), next_page_token=token)


def _base_id(spec_json: bytes) -> str:
    """Returns the base id of a specification in canonical form. Raises LoraportError (INVALID_BASE_MODEL)."""
    try:
        spec = parse_spec(spec_json)
        if canonical(to_json(spec)) != spec_json:
            raise ValueError("not in canonical form")
    except ValueError as error:
        raise LoraportError("INVALID_BASE_MODEL", str(error)[:500], subject="base_model.spec_json") from None
    return base_id(spec)
