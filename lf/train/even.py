"""How a rank gets its rows of a step: by turns, or by what they cost, be it known before they are read or after."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch.distributed as dist

from lf.data.loader import Dealt, Price, Share, by_cost, by_turns, read_rows, turns
from lf.data.source import Row, Rows, has_outlines
from lf.models.spec import Layout, ModelConfig, has_rule, type_name
from lf.models.work import row_work
from lf.plan.balance import Caps, Deal, Item, deal
from lf.plan.pipeline import round_size
from lf.plan.work import Rates, even_rates, seconds
from lf.train.comm import Comm, together, told
from lf.train.config import Balance, Run

Dealer = Callable[[Sequence[int]], Dealt]
"""Gives this rank its rows of those with some numbers; all ranks call it with the same ones."""


def check_balance(model: ModelConfig) -> None:
    """Raises ValueError for a model that does not say what its rows cost."""
    if not has_rule(row_work, model):
        raise ValueError(
            f"balance is set, but {type_name(model)} does not say what its rows take; set balance to None, or add a "
            "rule with @row_work.register (lf.models.work) in the file that defines it"
        )


def exchanges(run: Run, rows: Rows) -> bool:
    """Returns whether ranks exchange rows, which takes a process group of its own."""
    return run.balance is not None and not has_outlines(rows)


def dealer(run: Run, model: ModelConfig, rows: Rows, layout: Layout, comm: Comm) -> Dealer:
    """Returns what gives this rank its rows. Where rows are exchanged, `comm` is for nothing else."""
    share = Share(
        micro_batch=run.parallel.micro_batch,
        dp=layout.dp,
        dp_rank=layout.dp_rank,
        rounds=round_size(layout.pp, layout.vpp),
    )
    if run.balance is None:
        return functools.partial(by_turns, rows, share=share)
    caps = Caps(tokens=run.balance.tokens, memory=run.balance.patches, items=share.micro_batch)
    price = functools.partial(_price, run.balance, run.balance.rates or first_rates(layout), model)
    if has_outlines(rows):
        return functools.partial(by_cost, rows, share=share, price=price, caps=caps)
    place = (layout.pp_rank, layout.cp_rank, layout.tp_rank)
    return functools.partial(_exchanged, rows, share=share, price=price, caps=caps, place=place, comm=comm)


def first_rates(layout: Layout) -> Rates:
    """Returns rates of ranks that do every operation equally fast, and share all but a tower that is not apart."""
    rates = even_rates()
    return rates if layout.apart else attrs.evolve(rates, towers=rates.towers * layout.tp * layout.cp * layout.pp)


def _price(balance: Balance, rates: Rates, model: ModelConfig, row: Row) -> Item:
    work = row_work(model, row)
    patches = int(work.kinds.get("patches", 0))
    for name, cap, amount in (("tokens", balance.tokens, work.tokens), ("patches", balance.patches, patches)):
        if cap and amount > cap:
            raise ValueError(
                f"row {row['id']} has {amount} {name}, and balance.{name} = {cap} is the most of a micro-batch; raise "
                "that, or make rows smaller"
            )
    return Item(cost=seconds(rates, work.kinds), tokens=work.tokens, memory=patches)


@attrs.frozen
class _Told:
    """What a rank tells of the rows that it read."""

    dp_rank: int
    place: Any  # Which part of the model it has: rows go to ranks with the same.
    items: dict[int, Item]  # By the row's place in the step.


@attrs.frozen
class _Plan:
    """Who gets which rows."""

    deal: Deal
    owner: dict[int, int]  # The data parallel rank that read a row.
    ranks: dict[tuple[Any, int], int]  # The rank of each place and data parallel rank.


def _exchanged(
    rows: Rows, wanted: Sequence[int], share: Share, price: Price, caps: Caps, place: Any, comm: Comm
) -> Dealt:
    """Returns what a rank gets of rows that are read by turns; raises on every rank where one of them cannot read."""
    have: dict[int, Row] = {}

    def read() -> _Told:
        mine = [at for group in turns(len(wanted), share) for at in group]
        have.update(zip(mine, read_rows(rows, [wanted[at] for at in mine]), strict=True))
        return _Told(share.dp_rank, place, {at: price(row) for at, row in have.items()})

    def plan(everyone: list[_Told]) -> _Plan:
        items = {at: item for one in everyone for at, item in one.items.items()}
        return _Plan(
            deal=deal([items[at] for at in range(len(wanted))], share.dp, caps, share.rounds),
            owner={at: one.dp_rank for one in everyone for at in one.items},
            ranks={(one.place, one.dp_rank): rank for rank, one in enumerate(everyone)},
        )

    try:
        made = together(comm, read, plan, ValueError)
    except ValueError as error:
        # The rank that failed raises what its source did.
        raise error.__cause__ or error from None
    # Every rank goes through all moves whatever fails, so that none waits for one that has stopped.
    faults: list[Exception] = []
    for source, target, which in _moves(made, share):
        if source == share.dp_rank:
            faults += _send({at: have[at] for at in which}, made.ranks[place, target], comm)
        elif target == share.dp_rank:
            got, fault = _receive(made.ranks[place, source], comm)
            have |= got
            faults += fault
    if faults:
        raise faults[0]
    own = made.deal.groups[share.dp_rank]
    return Dealt(micro=share.filled([[have[at] for at in group] for group in own]), idle=made.deal.idle)


def _moves(plan: _Plan, share: Share) -> Iterator[tuple[int, int, list[int]]]:
    """Gives the data parallel ranks that rows go from and to, and which rows, in one order for all ranks.

    Each rank sends or receives one at a time; neighbours first, so that many do at once.
    """
    for apart in range(1, share.dp):
        for source in range(share.dp):
            target = (source + apart) % share.dp
            which = [at for group in plan.deal.groups[target] for at in group if plan.owner[at] == source]
            if which:
                yield source, target, which


def _send(rows: dict[int, Row], to: int, comm: Comm) -> list[Exception]:
    """Sends rows, or what was wrong with them, which it returns."""
    try:
        dist.send_object_list([rows, ""], dst=to, group=comm.group)
    except Exception as error:
        dist.send_object_list([{}, told(error)], dst=to, group=comm.group)
        return [error]
    return []


def _receive(source: int, comm: Comm) -> tuple[dict[int, Row], list[Exception]]:
    """Returns the rows of another rank, or what was wrong with them."""
    found: list[Any] = [None, None]
    dist.recv_object_list(found, src=source, group=comm.group)
    rows, fault = found
    return rows, [ValueError(f"rank {source} could not send a row: {fault}")] if fault else []


def leave(comm: Comm) -> None:
    """Ends the exchange of all ranks: what they are waiting for, or would do next, raises ValueError there."""

    def left() -> None:
        raise ValueError("it takes no further step")

    try:
        together(comm, left, lambda _: None, ValueError)
    except ValueError:
        return
