"""Which rank and micro-batch gets which pack, and which rank encodes which image: even loads, planned from costs alone.

The costs are known before anything is read (`lf.models.work`, `lf.plan.work`), every rank makes the same plan, and no
data is moved.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from attrs.validators import ge
from numpy.typing import NDArray


@attrs.frozen(kw_only=True)
class Item:
    """A pack or an image."""

    cost: float = attrs.field(validator=ge(0.0))
    """What it takes, in seconds or any other unit."""
    tokens: int = attrs.field(default=0, validator=ge(0))
    """Its tokens."""
    memory: int = attrs.field(default=0, validator=ge(0))
    """Bytes that it needs while its micro-batch is computed."""


@attrs.frozen(kw_only=True)
class Caps:
    """What a micro-batch may hold at most; 0 is any."""

    tokens: int = attrs.field(default=0, validator=ge(0))
    """Tokens."""
    memory: int = attrs.field(default=0, validator=ge(0))
    """Bytes."""
    items: int = attrs.field(default=0, validator=ge(0))
    """Packs or images."""


@attrs.frozen(kw_only=True)
class Spread:
    """Where each item goes."""

    ranks: tuple[int, ...]
    """The rank of each item."""
    micro: tuple[int, ...]
    """Its micro-batch there."""


@attrs.frozen(kw_only=True)
class Evenness:
    """How even a spread is."""

    makespan: float
    """The most that a rank has to do."""
    bound: float
    """What no spread can be below."""
    lockstep: float
    """The most that a rank has to do in each micro-batch, summed: a step where ranks wait for each other there."""
    idle: float
    """The share of the ranks' time that they wait for the slowest, 0 to 1."""


class NoRoomError(ValueError):
    """Items that each fit alone have no place together."""


def spread(items: Sequence[Item], ranks: int, micro: int = 1, caps: Caps | None = None) -> Spread:
    """Returns where each item goes: the most that a rank has to do is near the least possible, every cap holds.

    Heaviest first into the lightest micro-batch with room (Graham, 1969), micro-batches dealt to the ranks likewise,
    then items moved and exchanged between the heaviest rank and others until nothing gets better. A rank's
    micro-batches are ordered from its heaviest down, so that those of one place are alike on all ranks. The result is a
    function of the arguments alone. Raises ValueError where an item is over a cap, or no place for one is found.
    """
    if ranks < 1 or micro < 1:
        raise ValueError(f"{ranks} ranks with {micro} micro-batches each: both must be at least 1")
    table = _Table(items, ranks, micro, caps or Caps())
    table.fill()
    table.deal()
    table.refine()
    return table.spread()


@attrs.frozen(kw_only=True)
class Deal:
    """The items of a step in micro-batches."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    """The items of each micro-batch of each rank, in their order; all ranks have as many micro-batches."""
    idle: float
    """The share of the ranks' time that they wait for the slowest, 0 to 1."""


def deal(items: Sequence[Item], ranks: int, caps: Caps, rounds: int = 1) -> Deal:
    """Returns the items of a step spread over ranks, in as few micro-batches as hold them, a multiple of `rounds`.

    `caps.items` must be set. Raises ValueError for an item that is over a cap alone.
    """
    full = [(len(items), caps.items), (sum(i.tokens for i in items), caps.tokens)]
    full.append((sum(i.memory for i in items), caps.memory))
    micro = max(-(-amount // (ranks * cap * rounds)) for amount, cap in full if cap) * rounds
    while True:
        try:
            where = spread(items, ranks, micro, caps)
            break
        except NoRoomError:
            micro += rounds
    groups: list[list[list[int]]] = [[[] for _ in range(micro)] for _ in range(ranks)]
    for i, (rank, at) in enumerate(zip(where.ranks, where.micro, strict=True)):
        groups[rank][at].append(i)
    return Deal(groups=tuple(tuple(map(tuple, own)) for own in groups), idle=evenness(items, where, ranks).idle)


def evenness(items: Sequence[Item], where: Spread, ranks: int) -> Evenness:
    """Returns how even a spread over so many ranks is."""
    loads = np.zeros((ranks, max(where.micro, default=0) + 1))
    np.add.at(loads, (list(where.ranks), list(where.micro)), [item.cost for item in items])
    each = loads.sum(axis=1)
    most = float(each.max())
    return Evenness(
        makespan=most,
        bound=lower_bound([item.cost for item in items], ranks),
        lockstep=float(loads.max(axis=0).sum()),
        idle=1.0 - float(each.mean()) / most if most else 0.0,
    )


def lower_bound(costs: Sequence[float], ranks: int) -> float:
    """Returns a load that some rank has in every spread.

    It is the mean, or the sum of the k + 1 lightest of the k * ranks + 1 heaviest, which share k + 1 of them at least
    once (k = 0 is the heaviest).
    """
    heavy = sorted(costs, reverse=True)
    found = [sum(costs) / ranks]
    for k in range((len(heavy) - 1) // ranks + 1 if heavy else 0):
        found.append(sum(heavy[k * ranks - k : k * ranks + 1]))
    return max(found)


class _Table:
    """Items in micro-batches in ranks while a spread is made."""

    def __init__(self, items: Sequence[Item], ranks: int, micro: int, caps: Caps) -> None:
        self.items, self.ranks, self.micro, self.caps = items, ranks, micro, caps
        self.cost = np.array([item.cost for item in items], np.float64)
        self.size = np.array([(item.tokens, item.memory, 1) for item in items], np.int64).reshape(-1, 3)
        limits = [caps.tokens, caps.memory, caps.items]
        self.room = np.array([limit or np.iinfo(np.int64).max // 4 for limit in limits], np.int64)
        self.held = np.zeros((ranks * micro, 3), np.int64)
        self.load = np.zeros(ranks * micro)
        self.bin = np.full(len(items), -1)
        self.rank = np.arange(ranks * micro) // micro  # The rank of each bin.

    def fill(self) -> None:
        """Puts the items into micro-batches."""
        for i, item in enumerate(self.items):
            if (self.size[i] > self.room).any():
                raise ValueError(f"item {i}, {item}, is over {self.caps} alone; raise the cap, or cut the item")
        try:
            self._fill(np.argsort(-self.cost, kind="stable"), tight=False)
        except NoRoomError:
            # Where room is short sizes decide: the largest first, each where it leaves least.
            self.held[:], self.load[:], self.bin[:] = 0, 0.0, -1
            share = (self.size / self.room).max(axis=1)
            self._fill(np.argsort(-share, kind="stable"), tight=True)

    def _fill(self, order: NDArray[np.int64], *, tight: bool) -> None:
        """Puts items in an order each into the lightest bin that has room, or into the fullest."""
        for i in order.tolist():
            fits = ((self.held + self.size[i]) <= self.room).all(axis=1)
            if not fits.any():
                raise NoRoomError(
                    f"found no room for item {i}, {self.items[i]}, in {self.ranks} ranks * {self.micro} micro-batches "
                    f"under {self.caps}; raise a cap, or take more micro-batches"
                )
            key = -(self.held / self.room).max(axis=1) if tight else self.load
            self._put(i, int(np.where(fits, key, np.inf).argmin()))

    def _put(self, i: int, to: int) -> None:
        if self.bin[i] >= 0:
            self.load[self.bin[i]] -= self.cost[i]
            self.held[self.bin[i]] -= self.size[i]
        self.bin[i] = to
        self.load[to] += self.cost[i]
        self.held[to] += self.size[i]

    def deal(self) -> None:
        """Gives the ranks `micro` bins each, the heaviest first to the lightest rank that has not all of its own."""
        total, count = np.zeros(self.ranks), np.zeros(self.ranks, np.int64)
        self.rank = np.zeros(len(self.load), np.int64)
        for at in np.argsort(-self.load, kind="stable"):
            to = int(np.where(count < self.micro, total, np.inf).argmin())
            self.rank[at] = to
            total[to] += self.load[at]
            count[to] += 1

    def refine(self) -> None:
        """Moves or exchanges items while the heaviest rank gets lighter and no other as heavy as it was."""
        for _ in range(20 * len(self.items) + 20):
            total = np.bincount(self.rank, self.load, self.ranks)
            heavy = int(total.argmax())
            mine = np.flatnonzero(self.rank[self.bin] == heavy)
            others = (light for light in np.argsort(total, kind="stable").tolist() if light != heavy)
            if not any(self._level(mine, total, heavy, light) for light in others):
                return

    def _level(self, mine: NDArray[Any], total: NDArray[Any], heavy: int, light: int) -> bool:
        """Makes the best move or exchange between two ranks; returns whether there was one that helps."""
        gap = total[heavy] - total[light]
        theirs = np.flatnonzero(self.rank[self.bin] == light)
        # A difference d between what goes and what comes leaves max(heavy - d, light + d): best at half the gap.
        swaps = self.cost[mine][:, None] - self.cost[theirs][None, :]
        moves = self.cost[mine]
        found = np.concatenate([swaps.flatten(), moves])
        useful = np.flatnonzero((found > 1e-12 * gap) & (found < gap * (1 - 1e-12)))
        for pick in useful[np.argsort(np.abs(found[useful] - gap / 2), kind="stable")][:64].tolist():
            if pick >= swaps.size:
                if self._move(int(mine[pick - swaps.size]), light):
                    return True
            elif self._swap(int(mine[pick // len(theirs)]), int(theirs[pick % len(theirs)])):
                return True
        return False

    def _move(self, i: int, light: int) -> bool:
        bins = np.flatnonzero(self.rank == light)
        fits = ((self.held[bins] + self.size[i]) <= self.room).all(axis=1)
        if not fits.any():
            return False
        self._put(i, int(bins[np.where(fits, self.load[bins], np.inf).argmin()]))
        return True

    def _swap(self, i: int, j: int) -> bool:
        change, at, to = self.size[j] - self.size[i], int(self.bin[i]), int(self.bin[j])
        if (self.held[at] + change > self.room).any() or (self.held[to] - change > self.room).any():
            return False
        self._put(i, to)
        self._put(j, at)
        return True

    def spread(self) -> Spread:
        """Returns where the items are, each rank's micro-batches from the heaviest down."""
        place = np.zeros(len(self.load), np.int64)
        for rank in range(self.ranks):
            own = np.flatnonzero(self.rank == rank)
            place[own[np.argsort(-self.load[own], kind="stable")]] = np.arange(self.micro)
        return Spread(ranks=tuple(self.rank[self.bin].tolist()), micro=tuple(place[self.bin].tolist()))


def groups(where: Spread, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the items of each rank, in their order."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    for i, rank in enumerate(where.ranks):
        found[rank].append(i)
    return tuple(map(tuple, found))
