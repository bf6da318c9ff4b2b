"""Validators of numbers in a model's config: the error says the field, its value and what it may be."""

from collections.abc import Callable
from typing import Any

Validator = Callable[[Any, Any, Any], None]
"""What attrs calls with the record, the field and its value."""


def least(bound: float) -> Validator:
    """Returns a validator of numbers from `bound` on."""
    return _validator(lambda value: value >= bound, f"at least {bound:g}")


def above(bound: float, most: float | None = None) -> Validator:
    """Returns a validator of numbers greater than `bound`, and up to `most` where it is given."""
    if most is None:
        return _validator(lambda value: value > bound, f"greater than {bound:g}")
    return _validator(lambda value: bound < value <= most, f"greater than {bound:g} and at most {most:g}")


def within(low: float, high: float) -> Validator:
    """Returns a validator of numbers from `low` to `high`."""
    return _validator(lambda value: low <= value <= high, f"from {low:g} to {high:g}")


def _validator(allowed: Callable[[Any], bool], rule: str) -> Validator:
    # `lf.config_json.refused_field` looks these names up where a value cannot be compared.
    def check(inst: Any, attr: Any, value: Any) -> None:
        if not allowed(value):
            raise ValueError(f"{type(inst).__name__}.{attr.name} = {value!r} must be {rule}; correct it")

    return check
