"""Measures speed as ratios of runs that alternate in a process: `python scripts/bench.py peers`, or another command."""

import sys
from collections.abc import Callable
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.benchmarks.diffusion import DiffusionBench, compare_diffusion
from scripts.benchmarks.loader import LoaderBench, compare_loader
from scripts.benchmarks.megatron import Megatron, compare_with_megatron
from scripts.benchmarks.peers import Peers, compare_with_peers
from scripts.benchmarks.pi05 import Pi05Bench, compare_pi05
from scripts.benchmarks.rates import RatesBench, measure_rates
from scripts.benchmarks.vlm import VlmBench, compare_vlm


def peers(args: tyro.conf.OmitArgPrefixes[Peers]) -> int:
    """Compares lf with a plain transformers training loop; returns the exit code."""
    return compare_with_peers(args)


def megatron(args: tyro.conf.OmitArgPrefixes[Megatron]) -> int:
    """Compares lf with a plain loop of megatron-core's own modules; returns the exit code."""
    return compare_with_megatron(args)


def pi05(args: tyro.conf.OmitArgPrefixes[Pi05Bench]) -> int:
    """Compares lf's Pi0.5 with a plain one that passes the same parity tests; returns the exit code."""
    return compare_pi05(args)


def loader(args: tyro.conf.OmitArgPrefixes[LoaderBench]) -> int:
    """Compares the reading of robot data with a plain PyAV loop; returns the exit code."""
    return compare_loader(args)


def vlm(args: tyro.conf.OmitArgPrefixes[VlmBench]) -> int:
    """Compares lf's Qwen2.5-VL with a plain transformers loop, and steps on skewed sizes; returns the exit code."""
    return compare_vlm(args)


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
    "vlm": vlm,
    "rates": rates,
    "diffusion": diffusion,
}


if __name__ == "__main__":
    sys.exit(tyro.extras.subcommand_cli_from_dict(COMMANDS))
