"""From SQL rows to the registry's values, and pages by key."""

from collections.abc import Iterable
from typing import Any, TypeVar

from sqlalchemy import Column, Row, Select, tuple_

from services.registry.lifecycle import State
from services.registry.paging import Key

R = TypeVar("R")

_TUPLES = frozenset({"scopes", "shared_tenants"})
_FINDINGS = frozenset({"reasons", "warnings"})


def build(kind: type[R], row: Row[Any]) -> R:
    """Returns the dataclass `kind`, whose fields are named as the row's columns."""
    values: dict[str, Any] = {}
    for name, value in row._mapping.items():
        if name in _TUPLES:
            value = tuple(value)
        elif name in _FINDINGS:
            value = tuple(tuple(finding) for finding in value)
        elif name == "state":
            value = State(value)
        values[name] = value
    return kind(**values)


def build_optional(kind: type[R], row: Row[Any] | None) -> R | None:
    """As `build`; None stays None."""
    return None if row is None else build(kind, row)


def build_all(kind: type[R], rows: Iterable[Row[Any]]) -> list[R]:
    """As `build`, for every row."""
    return [build(kind, row) for row in rows]


def page(
    statement: Select[Any], key: tuple[Column[Any], ...], *, after: Key | None, limit: int, descending: bool = False
) -> Select[Any]:
    """Returns `statement` ordered by `key`, beginning behind `after`, with one row more than `limit`.

    The row too many says whether there is another page.
    """
    if after is not None:
        here, there = tuple_(*key), tuple_(*after)
        statement = statement.where(here < there if descending else here > there)
    return statement.order_by(*(column.desc() if descending else column for column in key)).limit(limit + 1)
