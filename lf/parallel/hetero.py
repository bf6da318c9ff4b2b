"""The ranks that share one model, where each may send to each other: features of images, and their gradients."""

import itertools
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from lf.models.layers.shared import Share
from lf.models.spec import Layout
from lf.parallel.groups import place

Ways = tuple[Any, Any]
"""Process groups of the same ranks: for messages to lower places, and to higher ones."""


@attrs.frozen(kw_only=True, eq=False)
class Replica:
    """The ranks that share one model: a place in them is (stage * cp + cp rank) * tp + tp rank."""

    there: Ways
    """For features."""
    back: Ways
    """For gradients."""
    rank: int
    """This rank's place."""
    size: int
    """How many they are."""
    share: Share | None
    """This rank's place among those that encode an image together, None where it does alone."""


def replica(layout: Layout, device: str) -> Replica:
    """Returns this rank's replica, all its ways open. Every rank of the world calls it.

    Messages of two ranks wait in line in a group. Each way has its own, so that two that send to each other before they
    receive do not wait for each other, and gradients do not wait behind features.
    """
    world = dist.get_world_size()
    mine: list[Any] = []
    here, size = (layout.pp_rank * layout.cp + layout.cp_rank) * layout.tp + layout.tp_rank, world // layout.dp
    share = None
    for dp_rank in range(layout.dp):
        ranks = [rank for rank in range(world) if place(layout, rank).dp_rank == dp_rank]
        groups = [dist.new_group(ranks) for _ in range(4)]
        if layout.dp_rank == dp_rank:
            mine = groups
        for first in range(0, size, layout.apart) if layout.apart > 1 else ():
            group = dist.new_group(ranks[first : first + layout.apart])
            if layout.dp_rank == dp_rank and first <= here < first + layout.apart:
                share = Share(group=group, rank=here - first, size=layout.apart)
    made = Replica(there=(mine[0], mine[1]), back=(mine[2], mine[3]), rank=here, size=size, share=share)
    _open(made, device)
    return made


def _open(replica: Replica, device: str) -> None:
    """Sends a number each way: a first message may wait for its receiver, and later no sender must."""
    number = torch.zeros(1, device=device)
    for low, high in itertools.combinations(range(replica.size), 2):
        for ways in (replica.there, replica.back):
            for source, target in ((low, high), (high, low)):
                if replica.rank == source:
                    dist.send(number, group=_way(ways, source, target), group_dst=target)
                elif replica.rank == target:
                    dist.recv(number, group=_way(ways, source, target), group_src=source)


def _way(ways: Ways, source: int, target: int) -> Any:
    return ways[source < target]


def send(replica: Replica, ways: Ways, part: Tensor, target: int, tag: int) -> Any:
    """Returns the work of sending a tensor to a place; the tensor must stay as it is until that is done."""
    return dist.isend(part, group=_way(ways, replica.rank, target), group_dst=target, tag=tag)


def receive(replica: Replica, ways: Ways, room: Tensor, source: int, tag: int) -> Any:
    """Returns the work of receiving what a place sends into `room`."""
    return dist.irecv(room, group=_way(ways, source, replica.rank), group_src=source, tag=tag)
