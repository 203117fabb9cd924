"""From SQL rows to the registry's values, and pages by key."""

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import BindParameter, Column, Result, Row, Select, tuple_

from services.registry.lifecycle import State
from services.shared.paging import Key
from services.shared.quotas import Quota

R = TypeVar("R")


def _findings(value: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, value))


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "scopes": tuple,
    "quota": lambda limits: Quota(**limits),
    "shared_tenants": tuple,
    "reasons": _findings,
    "warnings": _findings,
    "state": State,
}


def build(kind: type[R], row: Row[Any]) -> R:
    """Returns the record `kind`, whose fields are named as the row's columns."""
    return _maker(kind, row._fields)(row)  # type: ignore[no-any-return, arg-type]


def build_optional(kind: type[R], row: Row[Any] | None) -> R | None:
    """As `build`; None stays None."""
    return None if row is None else build(kind, row)


def build_all(kind: type[R], result: Result[Any]) -> list[R]:
    """As `build`, for every row that is left of a result."""
    return list(map(_maker(kind, tuple(result.keys())), result.all()))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _maker(kind: Any, names: tuple[str, ...]) -> Any:
    """Returns what makes records of rows with these columns. A page is hundreds of rows: by position, by C code."""
    fields: tuple[str, ...] = kind._fields
    if set(fields) != set(names):
        raise TypeError(f"{kind.__name__} has not the columns {', '.join(names)}")
    in_order = itemgetter(*map(names.index, fields))
    conversions = [(index, _CONVERTED[name]) for index, name in enumerate(fields) if name in _CONVERTED]

    def make(row: Row[Any]) -> Any:
        if not conversions:
            return kind._make(in_order(row))
        values = list(in_order(row))
        for index, convert in conversions:
            values[index] = convert(values[index])
        return kind._make(values)

    return make


def page(
    statement: Select[Any],
    key: tuple[Column[Any], ...],
    *,
    after: Key | tuple[BindParameter[Any], ...] | None,
    limit: int | BindParameter[int],
    descending: bool = False,
) -> Select[Any]:
    """Returns `statement` ordered by `key`, beginning behind `after`, with one row more than `limit`.

    The row too many says whether there is another page. `after` and `limit` are values, or stand for values.
    """
    if after is not None:
        here, there = tuple_(*key), tuple_(*after)
        statement = statement.where(here < there if descending else here > there)
    return statement.order_by(*(column.desc() if descending else column for column in key)).limit(limit + 1)
