"""A plan as text for a terminal, and as plain values for JSON."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from lf.models.media import media_tokens
from lf.plan.estimate import CHOICES, Plan, modules, worst
from lf.plan.near import Option, nearest
from lf.plan.speed import Timed

GIB = 2**30
PIECES = CHUNKS = 8
"""Pieces of a rank, and chunks of a stage, that are shown."""
GRIDS = 4
"""Sizes of pictures that are shown."""


def as_json(plan: Plan, memory: float = 0.0, fastest: Sequence[Timed] = ()) -> dict[str, Any]:
    """Returns the plan as numbers, texts, lists and dicts, sizes in bytes; with `memory`, what fits in it."""
    made = attrs.asdict(plan, filter=lambda field, _: field.name != "job")
    for stage, values in zip(plan.stages, made["stages"], strict=True):
        for choice, each in stage.memory.items():
            values["memory"][choice] = {**attrs.asdict(each), "peak": each.peak}
        values["traffic"] = [{**attrs.asdict(each), "wire": each.wire} for each in stage.traffic]
    made |= {"world": plan.job.world, "recompute": plan.job.parallel.recompute, "worst_stage": worst(plan)[0]}
    if plan.job.known:
        made["images"] = {"row": [list(item.grids) for item in plan.job.media], "usual": plan.job.usual}
        made["images"] |= {"known": plan.job.known, "apart": plan.job.vision is not None}
    if memory:
        made["memory"], made["fits"] = memory, worst(plan)[1] <= memory
        near = () if made["fits"] else nearest(plan.job, memory)
        made["nearest"] = [{"changes": dict(each.changes), "peak": each.peak} for each in near]
    if fastest:
        made["fastest"] = [{"changes": dict(t.changes), "seconds": t.seconds, "peak": t.peak} for t in fastest]
    return made


def render(plan: Plan, memory: float = 0.0, fastest: Sequence[Timed] = ()) -> str:
    """Returns the plan as text; with `memory`, also what does not fit in so many bytes, and the nearest that would."""
    parts = [_head(plan), _stages(plan), _pieces(plan), _traffic(plan)]
    parts += [_fit(plan, memory)] if memory else []
    return "\n\n".join([*parts, *([_fastest(fastest)] if fastest else [])])


def _head(plan: Plan) -> str:
    job, at, p = plan.job, plan.layout, plan.job.parallel
    experts = f", expert ranks: etp {at.etp}, ep {at.ep}" if at.ep * at.etp > 1 else ""
    rank = f"tp + {at.tp} * (cp + {at.cp} * (dp + {at.dp} * pp))"
    chunks = f", {at.vpp} chunks a stage" if at.vpp > 1 else ""
    wait = f"{plan.bubble:.1%} of the time" if at.pp > 1 else "none"
    towers = f"; of towers: {job.vision.recompute}" if job.vision else ""
    return "\n".join(
        [
            f"{job.world} ranks: tp {at.tp}{' with sp' if at.sp else ''}, cp {at.cp}, dp {at.dp}, pp {at.pp}{chunks}"
            f"{experts}; rank = {rank}",
            f"model: {plan.parameters:,} parameters, {job.itemsize} bytes each",
            f"step: {job.batch} rows of {job.length} tokens, "
            f"{plan.micro_batches} micro-batches of {p.micro_batch} a rank",
            *([_images(plan)] if job.known else []),
            f"operations of a step: {plan.flops:.3g} ({plan.flops / job.world:.3g} a rank), recomputation not counted",
            f"recompute: {p.recompute}; selective is {', '.join(modules(p, 'selective'))}{towers}",
            f"pipeline bubble: {wait}",
        ]
    )


def _images(plan: Plan) -> str:
    """Returns what the plan takes as the images of a row."""
    job, at = plan.job, plan.layout
    grids = Counter(grid for item in job.media for grid in item.grids)
    named = [f"{count} of {' x '.join(map(str, grid))} patches" for grid, count in grids.most_common(GRIDS)]
    more = [f"{sum(grids.values()) - sum(grids[g] for g, _ in grids.most_common(GRIDS))} others"]
    tokens = sum(media_tokens(job.model, item) for item in job.media)
    usual = "" if job.usual == 1.0 else f", of which rows have {job.usual:.0%} on average"
    who = f"all {at.tp * at.cp * at.pp} ranks of a replica" if job.vision else "the ranks of stage 0"
    who += f", {at.apart} together" if at.apart > 1 else ""
    return (
        f"images of a row, {job.known}: {', '.join([*named, *more * (len(grids) > GRIDS)]) or 'none'}, "
        f"{tokens:,} tokens together{usual}\n"
        f"they are encoded by {who}, in {plan.media_flops / plan.flops:.1%} of the operations"
    )


def _stages(plan: Plan) -> str:
    rows = [["stage", "ranks", "parameters", "weights", "gradients", "optimizer", *CHOICES, "peak", "holds"]]
    for number, stage in enumerate(plan.stages):
        mine, more = stage.memory[plan.job.parallel.recompute], len(stage.holds) - CHUNKS
        rows.append(
            [
                str(number),
                f"{stage.first}-{stage.first + stage.ranks - 1}" if stage.ranks > 1 else str(stage.first),
                f"{stage.elements:,}",
                *(gib(size) for size in (mine.parameters, mine.gradients, mine.optimizer)),
                *(gib(stage.memory[choice].activations) for choice in CHOICES),
                gib(mine.peak),
                " | ".join(stage.holds[:CHUNKS]) + (f" | {more:,} more chunks" if more > 0 else ""),
            ]
        )
    return "a rank of each stage, in GiB (activations by recompute: none, selective, full)\n" + table(rows)


def _pieces(plan: Plan) -> str:
    number = worst(plan)[0]
    rows = [[gib(size), name] for name, size in plan.stages[number].pieces[:PIECES]]
    return f"largest pieces of a rank of stage {number}, in GiB\n" + table(rows)


def _traffic(plan: Plan) -> str:
    number = max(range(len(plan.stages)), key=lambda at: sum(each.wire for each in plan.stages[at].traffic))
    rows = [["over", "ranks", "collective", "calls", "GiB", "GiB sent"]]
    for each in plan.stages[number].traffic:
        rows.append([each.axis, str(each.ranks), each.op, f"{each.calls:,}", gib(each.size), gib(each.wire)])
    if len(rows) == 1:
        return "a rank sends nothing"
    return f"a rank of stage {number} sends in a step (whole tensors, and what leaves a rank in a ring)\n" + table(rows)


def _fit(plan: Plan, memory: float) -> str:
    stages = [each.memory[plan.job.parallel.recompute].peak for each in plan.stages]
    over = [number for number, most in enumerate(stages) if most > memory]
    if not over:
        return f"fits in {gib(memory)} GiB: the largest peak is {gib(max(stages))} GiB"
    named = ", ".join(map(str, over[:8])) + (" and others" if len(over) > 8 else "")
    lines = [f"does not fit in {gib(memory)} GiB: stages {named}; the largest peak is {gib(max(stages))} GiB"]
    options = nearest(plan.job, memory)
    lines += [f"would fit: {_flags(option)}  (peak {gib(option.peak)} GiB)" for option in options]
    if not options:
        lines.append("no layout of as many ranks was found that fits; take more ranks")
    return "\n".join(lines)


def _fastest(fastest: Sequence[Timed]) -> str:
    rows = [["seconds", "GiB", "flags"]]
    rows += [[f"{each.seconds:.3g}", gib(each.peak), _flags(each) or "(as it is)"] for each in fastest]
    return "estimated seconds of a step, fastest layouts first\n" + table(rows)


def _flags(option: Option | Timed) -> str:
    return " ".join(f"--parallel.{name.replace('_', '-')} {_value(value)}" for name, value in option.changes)


def _value(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def gib(size: float) -> str:
    """Returns bytes as GiB in three digits."""
    value = size / GIB
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells in columns, all but the last to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([*(cell.rjust(n) for cell, n in zip(row[:-1], widths, strict=False)), row[-1]]) for row in rows
    )
