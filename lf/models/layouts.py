"""Published layouts of one family that differ in names alone: a prefix, an older name, one or two of tied tensors.

A weight table has one name for each HF tensor, and rules for the others that it may have. `fitted` returns the table of
one folder, which everything in `weights.py` then takes: names are those of the folder, and an export has them again.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

from lf.models.hf_folder import HfFolder
from lf.models.weights import Duplicate, Rule, Shape, WeightMap, hf_names


@attrs.frozen
class Prefix(Rule):
    """All HF tensors of a folder may have this before their names."""

    prefix: str
    """What stands before the names, with its dot."""


@attrs.frozen
class Alias(Rule):
    """Another name that one HF tensor may have."""

    hf: str
    """The other name."""
    of: str
    """The name in the table."""


@hf_names.register
def _(rule: Prefix | Alias) -> tuple[str, ...]:
    return ()


@functools.singledispatch
def shaped(rule: Rule, shapes: Mapping[str, Shape]) -> Rule:
    """Returns a rule that fits HF tensors of these shapes, where they can be stored in more than one way."""
    return rule


def fitted_to(weights: WeightMap, folder: HfFolder) -> WeightMap:
    """Returns the weight table in the names of a folder, and in the way in which it stores its tensors.

    An export has the names again, but stores what can be stored in two ways as it is published.
    """
    shapes = {name: folder.shape(name) for name in folder.names}
    table = fitted(weights, folder.names)
    return WeightMap(rules=tuple(shaped(rule, shapes) for rule in table.rules))


def fitted(weights: WeightMap, names: Collection[str]) -> WeightMap:
    """Returns the weight table in the names of a folder that has the HF tensors `names`.

    A name is changed only where the folder lacks the one in the table, so a folder with both keeps both and
    `weights.check` says what it makes of them. Of a pair of equal tensors, of which a folder has the duplicate alone,
    that one becomes the original.
    """
    have = set(names)
    for rule in weights.rules:
        if isinstance(rule, Prefix) and have and all(name.startswith(rule.prefix) for name in have):
            bare = fitted(weights, {name.removeprefix(rule.prefix) for name in have})
            return renamed(bare, rule.prefix.__add__)
    changed = {
        rule.of: rule.hf
        for rule in weights.rules
        if isinstance(rule, Alias | Duplicate) and rule.hf in have and rule.of not in have
    }
    if not changed:
        return weights
    kept = tuple(rule for rule in weights.rules if not (isinstance(rule, Duplicate) and rule.of in changed))
    return renamed(WeightMap(rules=kept), lambda name: changed.get(name, name))


def renamed(weights: WeightMap, name_of: Callable[[str], str]) -> WeightMap:
    """Returns the table with other HF names; what it says of further layouts is used up."""

    def new(value: Any) -> Any:
        if isinstance(value, str):
            return name_of(value)
        return tuple(map(new, value)) if isinstance(value, tuple) else value

    rules = []
    for rule in weights.rules:
        if not isinstance(rule, Prefix | Alias):
            fields = [field.name for field in attrs.fields(type(rule)) if field.name != "lf"]
            rules.append(attrs.evolve(rule, **{field: new(getattr(rule, field)) for field in fields}))
    return WeightMap(rules=tuple(rules))
