"""Who encodes the images of a step, who sends which features to whom, and whose gradients come back: a plan of lengths.

The ranks that share one model (tensor, context and pipeline parallel) all encode, alone or several an image; those of
the first pipeline stage need the features, each those of its own positions. Every rank makes the same plan.

Shapes: M features of a micro-batch, R features of a route.
"""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.plan.balance import Item, groups, spread


@attrs.frozen(kw_only=True, eq=False)
class Images:
    """The images and videos of a micro-batch."""

    features: tuple[int, ...]
    """How many features each makes, in the order of the micro-batch."""
    costs: tuple[float, ...]
    """What encoding each costs."""
    taken: tuple[NDArray[np.int64], ...]
    """Which of the M features each taker has at its positions, in the taker's order."""


@attrs.frozen(kw_only=True, eq=False)
class Route:
    """Features of a micro-batch that go from one rank to one other, or stay."""

    micro: int
    """The micro-batch."""
    source: int
    """The rank that encodes them; of several that do together, the one whose turn it is."""
    target: int
    """The rank that has them at its positions."""
    rows: NDArray[np.int64]
    """Which they are among those that the source makes for the micro-batch [R]."""
    into: NDArray[np.int64]
    """Which they are among those that the target takes [R]."""
    returns: bool
    """Whether the target sends their gradients back; where ranks take the same features, one does."""


@attrs.frozen(kw_only=True, eq=False)
class StepPlan:
    """What each rank does for the images of a step."""

    encodes: tuple[tuple[tuple[int, ...], ...], ...]
    """For each rank and micro-batch, the images that it encodes, by their place in the micro-batch, in their order."""
    routes: tuple[Route, ...]
    """All routes, in the order of the micro-batches."""


def shares(costs: Sequence[Sequence[float]], ranks: int, together: int = 1) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns `StepPlan.encodes` for the costs of each micro-batch's images, spread together over `ranks` ranks.

    `together` neighbours encode the same images.
    """
    places = [(m, i) for m, images in enumerate(costs) for i in range(len(images))]
    encoders = ranks // together
    spreading = spread([Item(cost=costs[m][i]) for m, i in places], encoders)
    return tuple(
        tuple(tuple(i for m, i in own if m == number) for number in range(len(costs)))
        for own in ([places[at] for at in group] for group in groups(spreading, encoders))
        for _ in range(together)
    )


def step_plan(micro: Sequence[Images], ranks: int, takers: Sequence[bool], together: int = 1) -> StepPlan:
    """Returns the plan of a step over `ranks` ranks, of which the first `len(takers)` take features.

    `takers` says of each whether it returns gradients. The images of all micro-batches are spread together, by cost.
    `together` neighbours encode the same images, and take turns by micro-batch in sending their features.
    """
    encodes = shares([images.costs for images in micro], ranks, together)
    routes = [
        route
        for number, images in enumerate(micro)
        for source in range(number % together, ranks, together)
        if encodes[source][number]
        for route in _routes(number, images, source, encodes[source][number], takers)
    ]
    return StepPlan(encodes=encodes, routes=tuple(routes))


def _routes(number: int, images: Images, source: int, own: Sequence[int], takers: Sequence[bool]) -> list[Route]:
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(images.features, dtype=np.int64)])
    row = np.full(int(starts[-1]), -1)  # Of each feature, its place among those of the source.
    made = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in own])
    row[made] = np.arange(len(made))
    found = []
    for target, returns in enumerate(takers):
        rows = row[images.taken[target]]
        into = np.flatnonzero(rows >= 0)
        if len(into):
            found.append(Route(micro=number, source=source, target=target, rows=rows[into], into=into, returns=returns))
    return found
