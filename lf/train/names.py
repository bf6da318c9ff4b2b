"""Names of the tensors in a checkpoint: `weight/<canonical name>`, and the same with what is kept for it."""

from collections.abc import Mapping

import torch

from lf.models.lora import weight_of
from lf.train.manifest import CheckpointError
from lf.train.reader import Reader

WEIGHT = "weight"
"""The kind of a model's own tensors."""
EMA = "ema"
"""The kind of their running averages."""


def key(kind: str, name: str) -> str:
    """Returns the name in a checkpoint of a tensor of a kind (`weight`, `exp_avg` ...) for a canonical name."""
    return f"{kind}/{name}"


Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def weight_shapes(reader: Reader) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of a checkpoint by canonical name."""
    start = key(WEIGHT, "")
    return {name.removeprefix(start): reader.shape(name) for name in reader.names if name.startswith(start)}


def base_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes without those of adapters."""
    return {name: shape for name, shape in shapes.items() if not weight_of(name)}


def check_state(reader: Reader, expected: Mapping[str, Kind]) -> None:
    """Raises CheckpointError unless a checkpoint has exactly the tensors that this run has at its step.

    `expected` has them all, over all ranks, by their names in a checkpoint, so that every rank finds the same.
    """
    saved = {name: (reader.shape(name), reader.dtype(name)) for name in reader.names}
    names = sorted(saved.keys() | expected.keys())
    wrong = [
        f"{name} is {_told(saved.get(name))} in the checkpoint and {_told(expected.get(name))} in this run"
        for name in names
        if saved.get(name) != expected.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{reader.path} is not the state of this run at step {reader.step}: {'; '.join(wrong[:3])}{more}. Resume "
            "with the config that saved it, remove that folder to resume from an older one, or choose another --out"
        )


def _told(kind: Kind | None) -> str:
    return "missing" if kind is None else f"{str(kind[1]).removeprefix('torch.')} {list(kind[0])}"
