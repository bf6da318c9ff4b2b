"""What the torch path saves and restores, in shares of any strategy, and the running average of the weights."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lf.models.spec import named_tensors
from lf.parallel.torch_dp import Spread, like, share
from lf.train.comm import distributed, over_ranks, together
from lf.train.manifest import CheckpointError
from lf.train.names import EMA, WEIGHT, Kind, check_state, key
from lf.train.optim import restore_state, start_state, state_tensors
from lf.train.reader import Reader
from lf.train.shards import Piece, box_piece
from lf.train.state import TrainState


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the persistent buffers of a module by name."""
    return {name: tensor for name, tensor in named_tensors(model).items() if not isinstance(tensor, nn.Parameter)}


def start_average(spread: Spread, decay: float) -> dict[str, Tensor]:
    """Returns the average of the trained weights that this rank keeps, before the first step; nothing at decay 0."""
    if not decay:
        return {}
    names = (name for name in spread.trained if name in spread.main)
    return {name: like(spread.main[name], share(spread.main[name]).local.clone()) for name in names}


@torch.no_grad()
def move_average(average: Mapping[str, Tensor], spread: Spread, decay: float) -> None:
    """Moves the average towards the weights: average = decay * average + (1 - decay) * weights, in place."""
    if average:
        names = list(average)
        new = [share(spread.main[name]).local for name in names]
        torch._foreach_lerp_([share(average[name]).local for name in names], new, 1.0 - decay)


@contextlib.contextmanager
def averaged(average: Mapping[str, Tensor], spread: Spread, decay: float) -> Iterator[None]:
    """Makes the model compute with the averages, where there are any; afterwards every bit is as it was."""
    if not decay:
        yield
        return
    _swap(average, spread)
    try:
        yield
    finally:
        _swap(average, spread)


@torch.no_grad()
def _swap(average: Mapping[str, Tensor], spread: Spread) -> None:
    for name, tensor in average.items():
        one, other = share(tensor).local, share(spread.main[name]).local
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    spread.publish()


def _kept(state: TrainState, spread: Spread) -> Iterator[tuple[str, Tensor]]:
    """Gives what this rank keeps of the parameters, by its name in a checkpoint."""
    for name, param in spread.main.items():
        yield key(WEIGHT, name), param.detach()
        for kind, kept in state_tensors(state.optimizer, param).items():
            yield key(kind, name), kept
        if name in state.average:
            yield key(EMA, name), state.average[name]


def pieces(state: TrainState, spread: Spread) -> Iterator[Piece]:
    """Gives what this rank saves: its own share of everything, and what all have alike where it is the first."""
    for name, tensor in _kept(state, spread):
        part = share(tensor)
        if (spread.saves if part.first is None else part.first) and (part.local.numel() or not tensor.numel()):
            yield box_piece(name, part.local.contiguous(), part.shape, part.at)
    if distributed().rank == 0:
        for name, tensor in buffers(spread.module).items():
            yield box_piece(key(WEIGHT, name), tensor.detach().contiguous())


def restore(state: TrainState, reader: Reader, spread: Spread) -> None:
    """Puts a checkpoint into the state, in place; a rank reads only its shares, and what it computes with.

    Raises CheckpointError on every rank unless the tensors are those of this run.
    """
    if reader.step:
        start_state(state.optimizer)
    held = {key(WEIGHT, name): tensor for name, tensor in buffers(spread.module).items()}
    mine: dict[str, Kind] = {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in (*_kept(state, spread), *held.items())
    }
    check_state(reader, over_ranks(mine))

    def read(name: str, into: Tensor) -> Tensor:
        part = share(into)
        if not part.local.numel() and part.cut:
            return part.local
        return reader.read(name, part.at, tuple(part.local.shape))

    @torch.no_grad()
    def fill() -> None:
        for name, param in spread.main.items():
            kinds = state_tensors(state.optimizer, param)
            saved = {kind: like(kept, read(key(kind, name), kept)) for kind, kept in kinds.items()}
            restore_state(state.optimizer, param, saved)
            share(param).local.copy_(read(key(WEIGHT, name), param))
            if name in state.average:
                share(state.average[name]).local.copy_(read(key(EMA, name), state.average[name]))
        for name, tensor in named_tensors(spread.module).items():
            if name not in spread.main:
                tensor.copy_(reader.read(key(WEIGHT, name)))
            elif tensor is not spread.main[name]:
                tensor.copy_(spread.main[name])

    together(distributed(), fill, lambda _: None, CheckpointError)
    spread.publish()


def weights(state: TrainState, spread: Spread, average: bool) -> Callable[[str], Tensor]:
    """Returns a function from canonical names to whole tensors in float32, averages of those that have one or not."""
    others = buffers(spread.module)
    trained = set(spread.trained)

    def whole(name: str) -> Tensor:
        if name in others:
            return others[name]
        kept: Mapping[str, Tensor] = state.average if average and name in trained else spread.main
        return spread.whole(name, kept.get(name))

    return whole
