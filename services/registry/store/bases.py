"""Base models."""

from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, insert, literal, select

from loraport.log.leaf import Kind
from services.registry.records import BaseRow
from services.registry.store import log
from services.registry.store.database import Transaction
from services.registry.store.rows import build_all, build_optional, page
from services.registry.store.tables import base_models
from services.shared.errors import LoraportError
from services.shared.names import base_model_name
from services.shared.paging import Key

_BY_NAME = select(base_models).where(base_models.c.base_model == bindparam("base_model"))
_BY_ID = select(base_models).where(base_models.c.base_id == bindparam("base_id"))


def find_base(connection: Connection, base_model: str) -> BaseRow | None:
    """Returns a base model by name, or None."""
    return build_optional(BaseRow, connection.execute(_BY_NAME, {"base_model": base_model}).first())


def find_base_by_id(connection: Connection, base_id: str) -> BaseRow | None:
    """Returns a base model by its digest, or None."""
    return build_optional(BaseRow, connection.execute(_BY_ID, {"base_id": base_id}).first())


def list_bases(connection: Connection, *, after: Key | None, limit: int) -> list[BaseRow]:
    """Returns a page of base models by name, without their specifications, and one more."""
    columns = [column for column in base_models.columns if column.name != "spec_json"]
    statement = select(*columns, literal(b"").label("spec_json"))
    rows = connection.execute(page(statement, (base_models.c.base_model,), after=after, limit=limit))
    return build_all(BaseRow, rows)


def add_base(transaction: Transaction, base_model: str, *, base_id: str, spec_json: bytes, now_us: int) -> BaseRow:
    """Adds a base model, or returns the one of this name when it is the same.

    Raises:
        LoraportError: BASE_MODEL_EXISTS, the name or the digests are taken.
    """
    connection = transaction.connection
    named, same = find_base(connection, base_model), find_base_by_id(connection, base_id)
    if named is not None and named.base_id == base_id and named.spec_json == spec_json:
        return named
    if named is not None:
        what = "another specification" if named.base_id == base_id else "other digests"
        raise LoraportError("BASE_MODEL_EXISTS", f"baseModels/{base_model} is registered with {what}")
    if same is not None:
        raise LoraportError("BASE_MODEL_EXISTS", f"these digests are registered as baseModels/{same.base_model}")
    values: Mapping[str, object] = {
        "base_model": base_model,
        "base_id": base_id,
        "spec_json": spec_json,
        "create_us": now_us,
        "epoch": transaction.epoch(),
    }
    connection.execute(insert(base_models).values(values))
    log.append(transaction, Kind.BASE_MODEL, resource=base_model_name(base_model), digest=base_id, now_us=now_us)
    return BaseRow(**values)  # type: ignore[arg-type]
