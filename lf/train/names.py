"""Names of the tensors in a checkpoint: `weight/<canonical name>`, and the same with what the optimiser keeps."""

from lf.train.manifest import CheckpointError
from lf.train.reader import Reader

WEIGHT = "weight"
"""The kind of a model's own tensors."""


def key(kind: str, name: str) -> str:
    """Returns the name in a checkpoint of a tensor of a kind (`weight`, `exp_avg` ...) for a canonical name."""
    return f"{kind}/{name}"


def weight_shapes(reader: Reader) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of a checkpoint by canonical name."""
    split = (stored.split("/", 1) for stored in reader.names)
    return {name: reader.shape(key(WEIGHT, name)) for kind, name in split if kind == WEIGHT}


def kinds_by_name(reader: Reader) -> dict[str, tuple[str, ...]]:
    """Returns what the optimiser kept for each weight of a checkpoint, by canonical name.

    Raises CheckpointError where it kept less for one weight than for another: part of the state was not saved.
    """
    kinds: dict[str, set[str]] = {name: set() for name in weight_shapes(reader)}
    for stored in reader.names:
        kind, name = stored.split("/", 1)
        kinds.setdefault(name, set()).add(kind)
    full = set().union(*kinds.values()) - {WEIGHT}
    for name, found in kinds.items():
        if WEIGHT not in found or found - {WEIGHT} not in (full, set()):
            raise CheckpointError(
                f"{reader.path} has {sorted(found)} for {name}, but {sorted(full | {WEIGHT})} for others; "
                "resume from another checkpoint"
            )
    return {name: tuple(sorted(found - {WEIGHT})) for name, found in kinds.items()}
