"""Features of images on their way from those that encode them to those that need them, and their gradients back.

Everything is sent point to point as soon as it is made and received when it is needed, so that a rank of the first
pipeline stage has the features of no more micro-batches than are in its pipeline. No rank waits for another one before
it has sent all features of its own.

Shapes: L levels of the tower and one, M features of a micro-batch that a rank takes, N that a rank makes, H width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lf.parallel.hetero import Replica, Ways, receive, send
from lf.plan.encode import Route, StepPlan


class Exchange:
    """Features of one pass on their way: `start`, `take` for each micro-batch in turn, then `gradients`, `finish`."""

    def __init__(self, plan: StepPlan, replica: Replica, counts: Sequence[int], depth: int) -> None:
        """`counts` [micro-batches] is how many features this rank takes of each; `depth` how many it may have."""
        self.plan, self.replica, self.counts, self.depth = plan, replica, counts, depth
        self.live = self.peak = 0
        self.made = torch.empty(0)
        self._sends: list[tuple[Any, Tensor]] = []
        self._back: dict[Route, tuple[Any, Tensor]] = {}
        self._at: Mapping[int, slice] = {}
        self._backward = False

    def _mine(self, micro: int) -> list[Route]:
        return [r for r in self.plan.routes if r.micro == micro and r.target == self.replica.rank]

    def start(self, made_LNH: Tensor, at: Mapping[int, slice], *, backward: bool) -> None:
        """Sends what this rank made, of which `at` says where each micro-batch's is; asks for gradients if `backward`.

        The first of L is what stands in place of tokens, the others are the levels.
        """
        self.made, self._at, self._backward = made_LNH, at, backward
        values = made_LNH.detach()
        for route in self.plan.routes:
            if route.source != self.replica.rank or route.target == self.replica.rank:
                continue
            part = values[:, at[route.micro]][:, _index(route.rows, values)].contiguous()
            self._send(self.replica.there, part, route.target, route.micro)
            if backward and route.returns:
                room = torch.empty_like(part)
                self._back[route] = (receive(self.replica, self.replica.back, room, route.target, route.micro), room)

    def _send(self, ways: Ways, part: Tensor, target: int, tag: int) -> None:
        self._sends = [(work, kept) for work, kept in self._sends if not work.is_completed()]
        self._sends.append((send(self.replica, ways, part, target, tag), part))

    def take(self, micro: int) -> Tensor:
        """Returns the features of a micro-batch at this rank's positions [L, M, H], whose gradients will go back."""
        self.live += 1
        self.peak = max(self.peak, self.live)
        assert self.peak <= self.depth, f"features of {self.live} micro-batches where the pipeline has {self.depth}"
        values = self.made.detach()
        out = values.new_zeros(len(values), self.counts[micro], values.shape[2])
        waits = []
        for route in self._mine(micro):
            if route.source == self.replica.rank:
                out[:, _index(route.into, out)] = values[:, self._at[micro]][:, _index(route.rows, values)]
                continue
            room = out.new_empty(len(out), len(route.rows), out.shape[2])
            waits.append((receive(self.replica, self.replica.there, room, route.source, micro), room, route))
        for work, room, route in waits:
            work.wait()
            out[:, _index(route.into, out)] = room
        if self._backward:
            out.requires_grad_().register_post_accumulate_grad_hook(lambda leaf: self._return(micro, leaf))
        else:
            # Nothing comes back, and nothing keeps them beyond what the decoder does.
            self.live -= 1
        return out

    def _return(self, micro: int, leaf: Tensor) -> None:
        """Sends the gradients of a micro-batch back."""
        self.live -= 1
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        for route in self._mine(micro):
            if not route.returns:
                continue
            part = grad[:, _index(route.into, grad)].contiguous()
            if route.source == self.replica.rank:
                self._back[route] = (None, part)
            else:
                self._send(self.replica.back, part, route.source, micro)

    def gradients(self) -> Tensor:
        """Returns the gradients of what this rank made [L, N, H], when all have come back."""
        out = torch.zeros_like(self.made)
        for route in (r for r in self.plan.routes if r.source == self.replica.rank and r.returns):
            work, part = self._back.pop(route)
            if work is not None:
                work.wait()
            out[:, self._at[route.micro]].index_add_(1, _index(route.rows, out), part)
        return out

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        for work, _ in self._sends:
            work.wait()
        self._sends = []


def _index(places: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(places).to(like.device, non_blocking=True)
