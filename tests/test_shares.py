"""An import reads and holds what a rank needs: its own share of the weights, and a tensor at a time."""

import itertools
import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

import lf
from lf.models.hf_folder import HfFolder
from lf.models.spec import Placed
from lf.parallel.megatron import placements
from lf.train import start
from tests.cases import megatron, run_of
from tests.workers import Workers

GOLDEN = Path(__file__).parent / "golden" / "hf"
COPIED = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
"""What the further head of that folder has of the trunk's."""
LAYOUTS = {
    "tp2": lf.MegatronParallel(tp=2),
    "pp2": lf.MegatronParallel(pp=2),
    "ep2": lf.MegatronParallel(ep=2),
}


@attrs.frozen
class Counted:
    """What building an engine from a folder took on one rank, in bytes."""

    read: int
    own: int
    held: int
    """The most that values which were read took at once, besides the model."""
    largest: int
    """The largest tensor of this rank."""


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def counted(folder: Path, parallel: lf.MegatronParallel) -> Counted:
    """Builds the engine of a published folder and counts."""
    started = start.open_start(str(folder), None)
    assert started.published is not None
    reads: list[int] = []
    alive: dict[int, int] = {}
    peaks: list[int] = []
    number = itertools.count()
    true_read, true_value = HfFolder.read, started.published.read

    def read(self: HfFolder, *args: Any) -> torch.Tensor:
        found = true_read(self, *args)
        reads.append(size(found))
        return found

    def value(placed: Placed) -> torch.Tensor:
        found = true_value(placed)
        key = next(number)
        alive[key] = size(found)
        weakref.finalize(found, alive.pop, key)
        peaks.append(sum(alive.values()))
        return found

    HfFolder.read = read  # type: ignore[method-assign,assignment]
    try:
        run = run_of(started.model, parallel=parallel)
        engine, ctx = megatron(run, attrs.evolve(started.published, read=value))
    finally:
        HfFolder.read = true_read  # type: ignore[method-assign]
    placed = [placed for chunk in engine.state.chunks for _, placed in placements(chunk.module, ctx)]
    shares = [sum(math.prod(part.size) for part in each.parts) * 4 for each in placed]
    return Counted(read=sum(reads), own=sum(shares), held=max(peaks), largest=max(shares))


def stored(folder: Path) -> dict[str, int]:
    return {name: size(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3", "tp2"), ("qwen3", "pp2"), ("qwen3_moe", "tp2"), ("qwen3_moe", "pp2"), ("qwen3_moe", "ep2")],
)
def test_a_rank_reads_its_own_share_and_holds_one_tensor_of_it(workers: Workers, name: str, layout: str) -> None:
    tensors = stored(GOLDEN / name)
    for rank in workers.run(2, counted, GOLDEN / name, LAYOUTS[layout]):
        assert rank.own <= rank.read <= rank.own + max(tensors.values())
        assert rank.held <= rank.largest
        assert rank.own < 0.9 * sum(tensors.values())


def copies(name: str, folder: Path) -> Path:
    """Writes a tied model whose head is stored too."""
    shutil.copytree(GOLDEN / name, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_ranks_share_the_comparison_of_tensors_that_are_stored_twice(
    workers: Workers, tmp_path: Path, layout: str
) -> None:
    folder = copies("qwen2", tmp_path / "tied")
    tensors = stored(folder)
    ranks = workers.run(2, counted, folder, LAYOUTS[layout])
    for rank in ranks:
        assert rank.own <= rank.read <= rank.own + max(tensors.values())
        assert rank.held <= rank.largest
    assert sum(rank.read - rank.own for rank in ranks) == tensors["lm_head.weight"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_in_a_further_head_are_read_once(workers: Workers, layout: str) -> None:
    tensors = stored(GOLDEN / "deepseek_v3_mtp")
    copies = [n for name, n in tensors.items() if name in COPIED]
    assert len(copies) == len(COPIED)
    ranks = workers.run(2, counted, GOLDEN / "deepseek_v3_mtp", LAYOUTS[layout])
    for rank in ranks:
        assert rank.own <= rank.read <= rank.own + max(tensors.values())
        assert rank.held <= rank.largest
    assert sum(rank.read - rank.own for rank in ranks) == sum(copies)


def refused(folder: Path, parallel: lf.MegatronParallel) -> str:
    try:
        counted(folder, parallel)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row", [0, -1])
def test_a_difference_that_one_rank_finds_is_told_by_all(workers: Workers, tmp_path: Path, row: int) -> None:
    folder = copies("qwen2", tmp_path / "tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][row, 0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    first, second = workers.run(2, refused, folder, LAYOUTS["tp2"])
    assert first == second
    assert "1 stored twice with different values: lm_head.weight" in first
