"""Rows by what they cost: loss and gradients stay, no rank waits where one fails, and a run goes on on other ranks."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import lf
from lf.config import from_json, to_json
from lf.data.loader import Share, by_cost, prefetch
from lf.data.outline import outline
from lf.data.source import Row, has_outlines, open_data
from lf.models import spec
from lf.models.diffusion.latent import fake_rows
from lf.models.diffusion.wan import wan_tiny
from lf.models.embodied.pi05 import pi05_tiny
from lf.models.embodied.pi05_model import Pi05Model
from lf.models.spec import Layout, collate
from lf.models.toy import Toy
from lf.models.work import row_work
from lf.plan.balance import Caps, Item, deal
from lf.plan.work import Rates, even_rates, seconds
from lf.train.background import own_group
from lf.train.comm import distributed
from lf.train.even import check_balance, dealer, first_rates, leave
from tests.cases import DENSE, gradients, megatron, off, ragged, run_of
from tests.data_tools import context, documents_of, open_text, write
from tests.latent_tools import FakeLatents, random_first
from tests.test_fsdp_step import engine_of
from tests.test_multimodal import IMAGE, chats, jsonl, sample, save
from tests.test_train import go, metrics, small_run
from tests.vlm_cases import MODELS, rows_of
from tests.workers import Workers

GATE = 5e-6
quick = settings(max_examples=25, derandomize=True, deadline=None)


@attrs.frozen(kw_only=True, eq=False)
class Plain:
    """Rows that are read before their cost is known; what was read is noted."""

    made: list[Row]
    seen: list[int] = attrs.field(factory=list)

    def __len__(self) -> int:
        return len(self.made)

    def row(self, epoch: int, index: int) -> Row:
        self.seen.append(index)
        return self.made[index]

    def describe(self) -> dict[str, int]:
        return {"rows": len(self.made)}


@attrs.frozen(kw_only=True, eq=False)
class Told(Plain):
    """Rows whose cost is known before."""


@outline.register
def _(rows: Told, epoch: int, index: int) -> Row:
    return {name: value for name, value in rows.made[index].items() if name not in ("tokens", "labels", "patches")}


# Planning


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), *[st.integers(1, 3)] * 3, st.integers(0, 40))
def test_every_row_is_dealt_once_and_every_rank_has_as_many_micro_batches(
    costs: list[int], dp: int, micro_batch: int, rounds: int, room: int
) -> None:
    rows = Told(made=[{"id": i, "cost": cost} for i, cost in enumerate(costs)])
    caps = Caps(tokens=max(costs) + room if room else 0, items=micro_batch)

    def price(row: Row) -> Item:
        return Item(cost=row["cost"], tokens=row["cost"])

    shares = [Share(micro_batch=micro_batch, dp=dp, dp_rank=rank, rounds=rounds) for rank in range(dp)]
    dealt = [by_cost(rows, range(len(costs)), share, price, caps) for share in shares]
    assert len({len(one.micro) for one in dealt}) == 1
    assert len(dealt[0].micro) % rounds == 0
    assert all(len(micro) == micro_batch for one in dealt for micro in one.micro)
    assert sorted(row["id"] for one in dealt for micro in one.micro for row in micro if row) == list(range(len(costs)))
    held = [[sum(row["cost"] for row in micro if row) for micro in one.micro] for one in dealt]
    assert all(not room or sum_ <= caps.tokens for own in held for sum_ in own)
    totals = [sum(own) for own in held]
    assert dealt[0].idle == pytest.approx(1 - sum(totals) / dp / max(totals))
    assert sorted(rows.seen) == list(range(len(costs)))


def test_caps_make_more_micro_batches_and_rounds_hold() -> None:
    items = [Item(cost=1.0, tokens=4)] * 6
    assert [len(own) for own in deal(items, 2, Caps(items=3)).groups] == [1, 1]
    assert [len(own) for own in deal(items, 2, Caps(items=3, tokens=5), rounds=2).groups] == [4, 4]
    assert deal(items, 2, Caps(items=3, tokens=5)).idle == 0.0


def same(rows: Any, model: spec.ModelConfig) -> None:
    for index in range(len(rows)):
        told, row = outline(rows, 1, index), rows.row(1, index)
        assert told["id"] == row["id"]
        assert row_work(model, told) == row_work(model, row)


@pytest.mark.parametrize("cross", [False, True])
def test_an_outline_of_text_costs_what_the_row_does(tmp_path: Path, cross: bool) -> None:
    files = [write(tmp_path / f"{n}.txt", "x" * n) for n in (3, 40, 7, 100, 12)]
    rows = open_text(tmp_path, *files, seq_len=32, cross_documents=cross)
    assert len({outline(rows, 0, index)["lengths"] for index in range(len(rows))}) > 1
    same(rows, DENSE)
    assert sum(len(text) + 1 for text in documents_of(rows)) == rows.total


def test_an_outline_of_chats_opens_no_picture(tmp_path: Path) -> None:
    images = [save(tmp_path / f"{i}.png", 16, 16 + 8 * i, i) for i in range(4)]
    made = [sample(f"q{i}", "a", str(image)) for i, image in enumerate(images)]
    rows = chats(tmp_path, jsonl(tmp_path, *made, sample("only text", "yes")), seq_len=96)
    same(rows, attrs.evolve(MODELS["windows"], text=attrs.evolve(DENSE, vocab=300), image_token=IMAGE))
    for image in images:
        image.unlink()
    assert sum(len(outline(rows, 0, index)["media"]) for index in range(len(rows))) == 4
    with pytest.raises(ValueError, match="png"):
        [rows.row(0, index) for index in range(len(rows))]


def test_a_tower_that_ranks_do_not_share_weighs_more() -> None:
    layout = Layout(tp=2, pp=2)
    assert first_rates(layout) == attrs.evolve(even_rates(), towers=4e-12)
    assert first_rates(attrs.evolve(layout, apart=1)) == even_rates()


def test_a_mixture_tells_what_all_its_parts_do(tmp_path: Path) -> None:
    text = lf.TextData(paths=(str(write(tmp_path / "a.txt", "some words " * 20)),), seq_len=32)
    told = open_data(lf.Mixture(parts=(lf.Weighted(data=text), lf.Weighted(data=text))), context(tmp_path))
    assert has_outlines(told)
    same(told, DENSE)
    assert not has_outlines(Plain(made=[]))
    assert not has_outlines(attrs.evolve(told, parts=(Plain(made=[]), *told.parts)))  # type: ignore[type-var]


def test_longer_rows_and_texts_of_latents_cost_more() -> None:
    rows = fake_rows(wan_tiny.space, 6, 0)
    tokens = [row_work(wan_tiny, row).tokens for row in rows]
    costs = [seconds(even_rates(), row_work(wan_tiny, row).kinds) for row in rows]
    assert tokens == [collate(wan_tiny, [row], row)["count"] for row in rows]
    assert costs[int(np.argmax(tokens))] == max(costs)


def test_rows_of_a_policy_cost_what_its_model_does() -> None:
    work, batch = row_work(pi05_tiny, {}), spec.fake_batch(pi05_tiny, 1, pi05_tiny.horizon, 0)
    before = Pi05Model(pi05_tiny).valid(batch["cameras"], batch["words"])
    assert work.tokens == before.shape[1] + batch["actions"].shape[1]
    assert sum(work.kinds.values()) - work.kinds["calls"] == spec.flops(pi05_tiny, 1, pi05_tiny.horizon)


# Refusals


def test_what_cannot_be_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match="causal"):
        Rates(causal=-1.0)
    with pytest.raises(TypeError, match="colour"):
        Rates(colour=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="none of steps, calls, matrices"):
        seconds(Rates(), {"colour": 1.0})
    with pytest.raises(ValueError, match="rates are 0 for all that rows have"):
        lf.Balance(rates=Rates(steps=1.0))
    with pytest.raises(ValueError, match="Toy does not say what its rows take; set balance to None"):
        check_balance(Toy(vocab=9))
    run = run_of(DENSE, balance=lf.Balance(rates=Rates(matrices=1e-15), tokens=40))
    assert from_json(to_json(run), source="", kind=lf.Run) == run


@pytest.mark.parametrize(
    ("caps", "told"),
    [
        ({"tokens": 47}, r"48 tokens, and balance\.tokens = 47"),
        ({"patches": 1}, r"\d+ patches, and balance\.patches = 1"),
    ],
)
def test_a_row_over_a_cap_is_named_with_the_cure(one_process: None, caps: dict[str, int], told: str) -> None:
    cfg = MODELS["windows"]
    run = run_of(cfg, balance=lf.Balance(**caps))
    deal_ = dealer(run, cfg, Told(made=rows_of(cfg, 3, 48, 0)), Layout(), distributed())
    with pytest.raises(ValueError, match=rf"row row\d has {told} .*; raise that, or make rows smaller"):
        deal_(range(3))


# Training

RATES = Rates(causal=1.0, window=1.0, full=1.0, towers=1.0)
KINDS: dict[str, tuple[spec.ModelConfig, list[Row]]] = {
    "text": (DENSE, ragged(DENSE, 7, 24, 3)),
    "images": (MODELS["windows"], rows_of(MODELS["windows"], 7, 48, 3)),
    "latents": (random_first(wan_tiny), fake_rows(wan_tiny.space, 7, 3)),
}


def one_step(kind: str, parallel: lf.MegatronParallel | lf.TorchParallel, balance: lf.Balance | None) -> Any:
    """Returns the ids of this rank's rows and what a step on them gives; both ways to deal them must agree."""
    model, rows = KINDS[kind]
    run = run_of(model, parallel=parallel, balance=balance)
    if isinstance(parallel, lf.MegatronParallel):
        engine, ctx = megatron(run)
        layout = ctx.layout
    else:
        engine, layout = engine_of(model, parallel)
    with own_group(distributed()) as comm:
        known = dealer(run, model, Told(made=rows), layout, comm)(range(7))
        dealt = dealer(run, model, Plain(made=rows), layout, comm)(range(7))
    ids = [[row and row["id"] for row in micro] for micro in dealt.micro]
    assert ids == [[row and row["id"] for row in micro] for micro in known.micro]
    assert known.idle == dealt.idle
    batches = [collate(model, micro, rows[0]) for micro in dealt.micro]
    if isinstance(parallel, lf.MegatronParallel):
        return ids, gradients(engine, ctx, batches)
    _, found = engine.step(engine.state, batches)
    return ids, ({}, found.grad_norm, found.loss, found.terms)


@pytest.mark.parametrize(
    ("kind", "world", "parallel"),
    [
        ("text", 4, lf.MegatronParallel(pp=2, micro_batch=2)),
        ("images", 4, lf.MegatronParallel(tp=2, micro_batch=2)),
        ("latents", 2, lf.TorchParallel(micro_batch=2)),
    ],
)
def test_where_rows_go_changes_no_loss_and_no_gradient(
    workers: Workers, kind: str, world: int, parallel: lf.MegatronParallel | lf.TorchParallel
) -> None:
    ((turns, (grads, norm, loss, _)),) = workers.run(1, one_step, kind, type(parallel)(micro_batch=2), None)
    found = workers.run(world, one_step, kind, parallel, lf.Balance(rates=RATES))
    ids, (grads_, norm_, loss_, _) = found[0]
    assert loss_ == pytest.approx(loss, rel=GATE)
    assert norm_ == pytest.approx(norm, rel=GATE)
    for name, grad in grads.items():
        assert off(grads_[name], grad) <= GATE, name
    assert ids != turns[::2]
    spread = {tuple(map(tuple, ids)) for ids, _ in found}
    assert sorted(i for own in spread for micro in own for i in micro if i) == sorted(
        i for micro in turns for i in micro if i
    )


def whole(kind: str, corpus: Path, **changes: Any) -> lf.Run:
    run = small_run(corpus, steps=4, batch=5, balance=lf.Balance(), **changes)
    if kind == "text":
        return run
    return attrs.evolve(
        run,
        model=KINDS[kind][0],
        tokenizer=None,
        data=FakeLatents(rows=7),
        eval=lf.Eval(data=FakeLatents(rows=3), every=2),
        parallel=lf.TorchParallel(micro_batch=2),
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        write(folder / f"{i:02}.txt", " ".join(f"word{j}" for j in range(5 + 13 * (i % 4))))
    return folder


@pytest.mark.parametrize("kind", ["text", "latents"])
def test_a_run_goes_on_on_other_ranks(workers: Workers, corpus: Path, tmp_path: Path, kind: str) -> None:
    run, alone, moved = whole(kind, corpus), tmp_path / "alone", tmp_path / "moved"
    workers.run(1, go, attrs.evolve(run, balance=None), alone, tmp_path)
    for _, number in workers.run(2, go, run, moved, tmp_path, 2):
        assert number == signal.SIGTERM
    workers.run(1, go, run, moved, tmp_path)
    for ours, reference in zip(metrics(moved), metrics(alone), strict=True):
        assert ours.keys() == reference.keys()
        assert all(ours[name] == pytest.approx(reference[name], rel=1e-4) for name in ours), (ours, reference)
    lines = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    idle = [line["idle"] for line in lines if "loss" in line]
    assert all(0 < share < 1 for share in idle[:2])
    assert idle[2:] == [0.0, 0.0]


# Faults


@attrs.frozen(kw_only=True, eq=False)
class Broken(Plain):
    """One row cannot be read, or none can be sent."""

    bad: int | None

    def row(self, epoch: int, index: int) -> Row:
        if index == self.bad:
            raise OSError(f"row {index} is gone")
        row = super().row(epoch, index)
        return row if self.bad is not None else {**row, "note": lambda: index}


def deals(bad: int | None) -> str:
    layout = Layout(dp=dist.get_world_size(), dp_rank=dist.get_rank())
    rows = Broken(made=[{"id": i, "lengths": (8 + i * i,)} for i in range(8)], bad=bad)
    run = run_of(DENSE, balance=lf.Balance(rates=RATES), parallel=lf.MegatronParallel(micro_batch=2))
    with own_group(distributed()) as comm:
        try:
            dealer(run, DENSE, rows, layout, comm)(range(8))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_cannot_read_ends_all_with_its_error(workers: Workers, world: int) -> None:
    found = workers.run(world, deals, 3)
    bad = 1
    assert found[bad] == "OSError: row 3 is gone"
    assert set(found[:bad] + found[bad + 1 :]) == {"ValueError: rank 1: row 3 is gone"}


@pytest.mark.parametrize("world", [2, 4])
def test_rows_that_cannot_be_sent_leave_no_rank_waiting(workers: Workers, world: int) -> None:
    found = workers.run(world, deals, None)
    assert all("pickle" in text or "could not send a row" in text for text in found), found


def leaves(late: float) -> int:
    layout = Layout(dp=dist.get_world_size(), dp_rank=dist.get_rank())
    rows = Plain(made=[{"id": i, "lengths": (8 + i * i,)} for i in range(8)])
    run = run_of(DENSE, balance=lf.Balance(rates=RATES), parallel=lf.MegatronParallel(micro_batch=2))
    with own_group(distributed()) as comm:
        deal_ = dealer(run, DENSE, rows, layout, comm)
        with prefetch(lambda step: deal_(range(8)), range(50), leave=lambda: leave(comm), meets=True) as feed:
            for _ in range(3):
                next(feed)
            if dist.get_rank():
                threading.Event().wait(late)
    return sum(thread.name == "lf-prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_ranks_that_stop_early_leave_together(workers: Workers, late: float) -> None:
    assert workers.run(4, leaves, late) == [0] * 4


@attrs.frozen(kw_only=True)
class Rotten(FakeLatents):
    """Its last row cannot be read."""


@open_data.register
def _(cfg: Rotten, ctx: Any) -> Broken:
    return Broken(made=fake_rows(wan_tiny.space, cfg.rows, ctx.seed), bad=cfg.rows - 1)


def ended(run: lf.Run, folder: Path, cache: Path) -> str:
    try:
        go(run, folder, cache)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_run_ends_with_the_error_of_the_rank_that_has_it(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    run = attrs.evolve(whole("latents", corpus), data=Rotten(rows=8), batch=4)
    found = workers.run(2, ended, run, tmp_path / "run", tmp_path)
    assert found == ["ValueError: rank 1: row 7 is gone", "OSError: row 7 is gone"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
