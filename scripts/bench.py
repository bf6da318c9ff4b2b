"""Measures speed as ratios of runs that alternate in a process: `python scripts/bench.py peers`, or another command."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lf
from lf.devices.cpu import cpu
from lf.models.spec import Batch, fake_batch
from lf.train.comm import process_group
from lf.train.start import export
from scripts.benchmarks.balance import BalanceBench, compare_balance
from scripts.benchmarks.diffusion import DiffusionBench, compare_diffusion
from scripts.benchmarks.loader import LoaderBench, compare_loader
from scripts.benchmarks.megatron import Megatron, compare_with_megatron, lf_side
from scripts.benchmarks.pi05 import Pi05Bench, compare_pi05
from scripts.benchmarks.rates import RatesBench, measure_rates
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
    from transformers import AutoModelForCausalLM

    from lf.train.optim import make_optimizer, param_groups

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = make_optimizer(run.optim, param_groups(model.named_parameters(), run.optim))

    def step(batch: Batch) -> tuple[float, float]:
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss), float(norm)

    return step


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
            with tempfile.TemporaryDirectory() as folder:
                ours, theirs = megatron_side(run, Path(folder)), transformers_side(run, Path(folder))
            batches = [fake_batch(model, rows, length, seed) for seed in range(1 + args.pairs)]
            yield summarise(measure(ours, theirs, batches, f"{family} at {length}"), family, length, rows)


def peers(args: tyro.conf.OmitArgPrefixes[Peers]) -> int:
    """Compares lf with a plain transformers training loop; returns the exit code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.json:
        print(f"fp32 on a CPU, threads {torch.get_num_threads()}, {args.tokens} tokens a step, {args.pairs} pairs")
    head(args)
    try:
        with process_group(cpu):
            for ratio in compare_peers(args):
                show(ratio, args)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def megatron(args: tyro.conf.OmitArgPrefixes[Megatron]) -> int:
    """Compares lf with a plain loop of megatron-core's own modules; returns the exit code."""
    return compare_with_megatron(args)


def pi05(args: tyro.conf.OmitArgPrefixes[Pi05Bench]) -> int:
    """Compares lf's Pi0.5 with a plain one that passes the same parity tests; returns the exit code."""
    return compare_pi05(args)


def loader(args: tyro.conf.OmitArgPrefixes[LoaderBench]) -> int:
    """Compares the reading of robot data with a plain PyAV loop; returns the exit code."""
    return compare_loader(args)


def balance(args: tyro.conf.OmitArgPrefixes[BalanceBench]) -> int:
    """Compares ways to spread samples and images of skewed sizes over ranks; returns the exit code."""
    return compare_balance(args)


def rates(args: tyro.conf.OmitArgPrefixes[RatesBench]) -> int:
    """Measures what each kind of work of a run takes, for `lf.Balance(rates=...)`; returns the exit code."""
    return measure_rates(args)


def diffusion(args: tyro.conf.OmitArgPrefixes[DiffusionBench]) -> int:
    """Compares lf's Wan and Qwen-Image with a plain loop of diffusers' modules; returns the exit code."""
    return compare_diffusion(args)


COMMANDS: dict[str, Callable[..., int]] = {
    "peers": peers,
    "megatron": megatron,
    "pi05": pi05,
    "loader": loader,
    "balance": balance,
    "rates": rates,
    "diffusion": diffusion,
}


if __name__ == "__main__":
    sys.exit(tyro.extras.subcommand_cli_from_dict(COMMANDS))
