"""lf's step beside a plain transformers loop."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

import lf
from lf.devices.cpu import cpu
from lf.models.spec import Batch, fake_batch
from lf.models.vlm import Vlm
from lf.train.comm import process_group
from lf.train.start import export
from scripts.benchmarks.megatron import lf_side
from scripts.benchmarks.ratios import DisagreementError, Ratio, Sizes, Step, head, measure, peer_model, show, summarise


@attrs.frozen(kw_only=True)
class Peers(Sizes):
    """Trains equal models in lf and in a plain transformers loop, in turn, and compares their speed.

    Both sides have the same weights, rows, fp32, fused AdamW and clipping; transformers runs its SDPA attention. Exit
    code 1 when they disagree about the first step.
    """


def megatron_side(run: lf.Run, folder: Path) -> Step:
    """Returns lf's step on the Megatron path, and writes its first weights as a Hugging Face folder."""
    assert run.model is not None
    step, engine, _ = lf_side(run)
    export(run.model, engine.weights(engine.state), folder, source=None, files={}, write=True)
    return step


def transformers_side(run: lf.Run, folder: Path) -> Step:
    """Returns a plain training step of transformers' model of a folder."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from lf.train.optim import make_optimizer, param_groups

    kind = AutoModelForImageTextToText if isinstance(run.model, Vlm) else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = make_optimizer(run.optim, param_groups(model.named_parameters(), run.optim))

    def step(batch: Batch) -> tuple[float, float]:
        pictures = _pictures(run.model, batch) if isinstance(run.model, Vlm) else {}
        logits = model(input_ids=batch["tokens"], **pictures, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss), float(norm)

    return step


def _pictures(cfg: Vlm, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns what transformers' Qwen-VL models take of images, each of one picture, besides the tokens."""
    return {
        "pixel_values": batch["patches"],
        "image_grid_thw": torch.tensor([item.grids[0] for item in batch["media"]]),
        "mm_token_type_ids": (batch["tokens"] == cfg.image_token).long(),
    }


def both_sides(run: lf.Run) -> tuple[Step, Step]:
    """Returns the steps of lf and of transformers on models with the same weights; torch.distributed must be up."""
    with tempfile.TemporaryDirectory() as folder:
        return megatron_side(run, Path(folder)), transformers_side(run, Path(folder))


def compare_peers(args: Peers) -> Iterator[Ratio]:
    """Gives the ratio of each case as it is measured; torch.distributed must be up, with one process."""
    for family in args.families:
        model = peer_model(family, args)
        for length in args.lengths:
            rows = max(1, args.tokens // length)
            run = lf.Run(
                model=model,
                data=lf.TextData(paths=("unused",)),
                batch=rows,
                parallel=lf.MegatronParallel(micro_batch=rows),
            )
            ours, theirs = both_sides(run)
            batches = [fake_batch(model, rows, length, seed) for seed in range(1 + args.pairs)]
            yield summarise(measure(ours, theirs, batches, f"{family} at {length}"), family, length, rows)


def compare_with_peers(args: Peers) -> int:
    """Measures, prints, and returns the exit code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.json:
        print(f"fp32 on a CPU, threads {torch.get_num_threads()}, {args.tokens} tokens a step, {args.pairs} pairs")
    head(args.json)
    try:
        with process_group(cpu):
            for ratio in compare_peers(args):
                show(ratio, args.json)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
