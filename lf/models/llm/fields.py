"""Reads single fields of a config.json: each is there, of its type and in its range, or refused by name."""

import math
import sys
from collections.abc import Mapping
from typing import Any


def whole(fields: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Returns the whole number under a key; `default` stands for null and for a key that is not there."""
    value = _value(fields, key, default)
    if type(value) is not int or value < least:
        raise ValueError(f"{key} = {value!r} must be a whole number, at least {least}; correct it")
    return value


def number(
    fields: Mapping[str, Any],
    key: str,
    default: float | None = None,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Returns the finite number under a key as a float; `default` stands for null and for a key that is not there.

    It is greater than `above`, at least `least` and at most `most`.
    """
    value = _value(fields, key, default)
    inside = type(value) in (int, float) and above < value and least <= value <= most
    if not inside or not abs(value) <= sys.float_info.max:
        bounds = {"greater than": above, "at least": least, "at most": most}
        rule = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if abs(bound) < math.inf)
        raise ValueError(f"{key} = {value!r} must be a number{f' {rule}' if rule else ''}; correct it")
    return float(value)


def flag(fields: Mapping[str, Any], key: str, default: bool) -> bool:
    """Returns the truth value under a key; `default` stands for null and for a key that is not there."""
    value = _value(fields, key, default)
    if type(value) is not bool:
        raise ValueError(f"{key} = {value!r} must be true or false; correct it")
    return value


def agreed(tables: Mapping[str, Mapping[str, Any]], key: str) -> Any:
    """Returns what all tables say under a key, None where none says anything; raises ValueError where they differ.

    The names of the tables are what stands before the key in the error.
    """
    stated = {where + key: table[key] for where, table in tables.items() if table.get(key) is not None}
    values = list(stated.values())
    if any(value != values[0] for value in values):
        said = " and ".join(f"{name} = {value!r}" for name, value in stated.items())
        raise ValueError(f"{said} disagree; keep the right one and delete the other")
    return values[0] if values else None


def _value(fields: Mapping[str, Any], key: str, default: Any) -> Any:
    value = fields.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key} is missing and has no default; add it")
    return value
