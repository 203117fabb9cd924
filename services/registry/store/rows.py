"""From SQL rows to the registry's values, and pages by key."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import Column, Result, Row, Select, tuple_

from services.registry.lifecycle import State
from services.shared.paging import Key

R = TypeVar("R")


def _findings(value: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, value))


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "scopes": tuple,
    "shared_tenants": tuple,
    "reasons": _findings,
    "warnings": _findings,
    "state": State,
}


def build(kind: type[R], row: Row[Any]) -> R:
    """Returns the dataclass `kind`, whose fields are named as the row's columns."""
    return _build(kind, row._fields, row)


def build_optional(kind: type[R], row: Row[Any] | None) -> R | None:
    """As `build`; None stays None."""
    return None if row is None else build(kind, row)


def build_all(kind: type[R], result: Result[Any]) -> list[R]:
    """As `build`, for every row that is left of a result."""
    # Asked once: a page is hundreds of rows, and every row would work its names out anew.
    names = tuple(result.keys())
    return [_build(kind, names, row) for row in result.all()]


def _build(kind: type[R], names: tuple[str, ...], row: Iterable[Any]) -> R:
    values = list(row)
    for index, convert in _conversions(names):
        values[index] = convert(values[index])
    return kind(**dict(zip(names, values, strict=True)))


@lru_cache(maxsize=64)
def _conversions(names: tuple[str, ...]) -> list[tuple[int, Callable[[Any], Any]]]:
    return [(index, _CONVERTED[name]) for index, name in enumerate(names) if name in _CONVERTED]


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
