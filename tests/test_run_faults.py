"""What can happen to a run besides its steps: changed inputs, ranks that differ, signals, faults, full disks."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch.distributed as dist

import lf
from lf.config import from_json
from lf.data.source import open_data
from lf.devices.cpu import cpu
from lf.models.diffusion.wan import wan_tiny
from lf.models.toy import Toy
from lf.train import checkpoint
from lf.train.loop import FAULTS, train
from lf.train.run import open_job
from lf.train.summary import summary
from tests.latent_tools import FakeLatents
from tests.test_train import go, metrics, small_run, tensors
from tests.workers import Workers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        words = " ".join(f"word{(i * j) % 17} = {j}" for j in range(5, 40))
        (folder / f"{i:02}.txt").write_text(f"document {i}\n{words}\n")
    return folder


def refused(run: lf.Run, folder: Path, cache: Path) -> str:
    try:
        go(run, folder, cache)
    except FAULTS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def copied(corpus: Path, tmp_path: Path) -> Path:
    return shutil.copytree(corpus, tmp_path / "data")


def test_a_resume_on_other_data_is_refused(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    data, folder = copied(corpus, tmp_path), tmp_path / "run"
    cfg = small_run(data, "toy", steps=2)
    workers.run(1, go, cfg, folder, tmp_path)
    changed = data / "03.txt"
    changed.write_text(changed.read_text().replace("word1 =", "word2 =", 1))
    (text,) = workers.run(1, refused, attrs.evolve(cfg, steps=3), folder, tmp_path)
    assert text.startswith("CheckpointError: the data of the run has changed")
    assert checkpoint.latest(folder).step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (shutil.rmtree, "tokenizer"),
        (lambda kept: (kept / "tokenizer.json").unlink(), "tokenizer.json"),
        (
            lambda kept: (kept / "tokenizer.json").write_text((kept / "tokenizer.json").read_text() + "\n"),
            "the tokenizer of the run has changed",
        ),
    ],
)
def test_a_resume_needs_the_tokenizer_that_it_began_with(
    workers: Workers, corpus: Path, tmp_path: Path, spoil: Callable[[Path], None], expected: str
) -> None:
    cfg, folder = small_run(corpus, "toy", steps=2), tmp_path / "run"
    workers.run(1, go, cfg, folder, tmp_path)
    spoil(folder / "tokenizer")
    (text,) = workers.run(1, refused, attrs.evolve(cfg, steps=3), folder, tmp_path)
    assert expected in text


def test_an_edited_config_is_held_to_what_was_trained(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    cfg, folder = small_run(corpus, "toy", steps=2), tmp_path / "run"
    workers.run(1, go, cfg, folder, tmp_path)
    saved = folder / "config.json"
    saved.write_text(saved.read_text().replace('"batch": 6', '"batch": 4'))
    edited = from_json(saved.read_text())
    (text,) = workers.run(1, refused, edited, folder, tmp_path)
    assert "batch: 6 -> 4" in text
    # What a resume may change is written down, so that the folder says what it holds.
    workers.run(1, go, attrs.evolve(cfg, steps=3), folder, tmp_path)
    now = from_json(saved.read_text())
    assert (now.steps, now.batch) == (3, 6)
    (text,) = workers.run(1, refused, attrs.evolve(cfg, steps=2), folder, tmp_path)
    assert "steps = 2, but" in text


def opened(cfg: lf.Run, folder: Path, cache: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    open_job(cfg, folder, (), cpu, checkpoint.distributed(), lambda text: None).lock.close()


def by_rank(one: lf.Run, other: lf.Run, folder: Path, cache: Path) -> str:
    return refused(one if dist.get_rank() == 0 else other, folder, cache)


def test_ranks_that_differ_do_not_start(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    data = copied(corpus, tmp_path)
    (data / "00.txt").write_text("something else altogether, of another length")
    cfg = small_run(corpus, "toy", steps=2, tokenizer=lf.TrainedBpe(vocab=300))
    for other, expected in (
        (attrs.evolve(cfg, seed=1), "rank 1 has another run than rank 0"),
        (attrs.evolve(cfg, data=attrs.evolve(cfg.data, paths=(str(data),))), "rank 1 has another"),
    ):
        for text in workers.run(2, by_rank, cfg, other, tmp_path / "run", tmp_path):
            assert expected in text
    assert not (tmp_path / "run").exists()


@attrs.frozen(kw_only=True)
class Tripping(lf.DataConfig):
    """Rows of which one does something on one rank when it is read."""

    at: int = -1
    rank: int = 0
    what: str = ""
    rows: int = 12


@attrs.frozen
class TrippingRows:
    cfg: Tripping

    def __len__(self) -> int:
        return self.cfg.rows

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        if index == self.cfg.at and dist.get_rank() == self.cfg.rank:
            if self.cfg.what == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise ValueError("row 7 is no good")
        ids = (np.arange(9) + index + epoch) % 257
        labels = np.full(8, -100) if self.cfg.what == "masked" else ids[1:]
        return {"tokens": ids[:-1], "labels": labels, "lengths": (8,), "real": 8, "id": f"{epoch}:{index}"}

    def describe(self) -> dict[str, int]:
        return {"rows": self.cfg.rows, "vocab": 257, "length": 8}


@open_data.register
def _(cfg: Tripping, ctx: object) -> TrippingRows:
    return TrippingRows(cfg)


def rows_run(data: Tripping, held_out: Tripping | None = None) -> lf.Run:
    return lf.Run(
        model=Toy(vocab=257),
        data=data,
        batch=2,
        parallel=lf.TorchParallel(micro_batch=1),
        steps=5,
        eval=lf.Eval(data=held_out, every=3),
        log=lf.Log(every=1),
    )


@pytest.mark.parametrize(
    ("model", "data", "lacks"), [(wan_tiny, Tripping(), "latents"), (Toy(), FakeLatents(), "labels")]
)
def test_data_of_another_kind_is_refused_by_what_its_rows_lack(
    one_process: None, tmp_path: Path, model: Any, data: Any, lacks: str
) -> None:
    run = attrs.evolve(rows_run(Tripping()), model=model, data=data)
    with pytest.raises(
        ValueError, match=rf"data = .*{type(data).__name__}: its rows have no '{lacks}', which .* reads"
    ):
        open_job(run, tmp_path / "run", (), cpu, checkpoint.distributed(), lambda text: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_row_on_one_rank_stops_all_after_a_save(workers: Workers, tmp_path: Path, rank: int) -> None:
    at = 6 + rank  # a row of step 4
    texts = workers.run(2, refused, rows_run(Tripping(at=at, rank=rank)), tmp_path / "run", tmp_path)
    assert texts[rank] == "ValueError: row 7 is no good"
    assert "another rank could not go on after step 3" in texts[1 - rank]
    assert f"rank {rank}: row 7 is no good" in texts[1 - rank]
    assert checkpoint.latest(tmp_path / "run").step == 3  # type: ignore[union-attr]


def test_a_bad_held_out_row_loses_no_step(workers: Workers, tmp_path: Path) -> None:
    cfg = rows_run(Tripping(), Tripping(at=5, rank=1))
    texts = workers.run(2, refused, cfg, tmp_path / "run", tmp_path)
    assert texts[1] == "ValueError: row 7 is no good"
    assert checkpoint.latest(tmp_path / "run").step == 3  # type: ignore[union-attr]


def test_held_out_rows_without_a_label_lose_no_step(workers: Workers, tmp_path: Path) -> None:
    (text,) = workers.run(1, refused, rows_run(Tripping(), Tripping(what="masked")), tmp_path / "run", tmp_path)
    assert "no position to score" in text
    assert checkpoint.latest(tmp_path / "run").step == 3  # type: ignore[union-attr]


def test_a_signal_in_an_evaluation_is_heeded_there_and_the_evaluation_made_up_for(
    workers: Workers, tmp_path: Path
) -> None:
    calm, folder, whole = rows_run(Tripping(), Tripping()), tmp_path / "run", tmp_path / "whole"
    workers.run(1, go, calm, whole, tmp_path)
    cut = attrs.evolve(calm, eval=lf.Eval(data=Tripping(at=5, what="signal"), every=3))
    ((lines, number),) = workers.run(1, go, cut, folder, tmp_path)
    assert number == signal.SIGTERM
    assert any("step 3 of 5 is saved" in line for line in lines)
    assert not any("held-out" in line for line in lines)
    workers.run(1, go, calm, folder, tmp_path)
    assert metrics(folder) == metrics(whole)
    assert [line["step"] for line in metrics(folder) if "eval_loss" in line] == [3, 5]


def test_a_run_that_died_before_its_first_checkpoint_begins_again(
    workers: Workers, corpus: Path, tmp_path: Path
) -> None:
    cfg, folder = small_run(corpus, "toy", steps=2), tmp_path / "run"
    workers.run(1, go, cfg, folder, tmp_path)
    before = metrics(folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "notes.txt").write_text("mine")
    workers.run(1, go, cfg, folder, tmp_path)
    assert metrics(folder) == before
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_export_that_a_kill_prevented_is_made_by_the_resume(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    cfg, folder = small_run(corpus, "toy", steps=4, save=lf.Save(every=2, export_every=2)), tmp_path / "run"
    workers.run(1, go, cfg, folder, tmp_path, 2)
    assert not (folder / "hf_step_2").exists()
    (folder / ".hf_step_2.partial").mkdir()
    workers.run(1, go, cfg, folder, tmp_path)
    assert (folder / "hf_step_2" / "config.json").is_file()
    assert not (folder / ".hf_step_2.partial").exists()


def test_a_step_that_is_not_finite_loses_no_step_before_it(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    cfg = small_run(corpus, optim=lf.AdamW(lr=1e30, clip=0.0), save=lf.Save())
    (text,) = workers.run(1, refused, cfg, tmp_path / "run", tmp_path)
    assert text.startswith("NonFiniteError: step 2")
    assert checkpoint.latest(tmp_path / "run").step == 1  # type: ignore[union-attr]
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["grad_norm"]) == (2, None)


def cramped(cfg: lf.Run, folder: Path, cache: Path, free: int) -> str:
    true = shutil.disk_usage(folder.parent)
    shutil.disk_usage = lambda path: true._replace(free=free)  # type: ignore[assignment]
    try:
        return refused(cfg, folder, cache)
    finally:
        shutil.disk_usage = disk_usage


disk_usage = shutil.disk_usage


def test_a_disk_without_room_is_found_at_the_start(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    (text,) = workers.run(1, cramped, small_run(corpus, "toy"), tmp_path / "run", tmp_path, 1000)
    assert "has 1000 free" in text
    assert not (tmp_path / "run").exists()
    # Room for the weights and an export, but not for what the optimiser keeps from the first step on.
    (text,) = workers.run(1, cramped, small_run(corpus, "toy"), tmp_path / "run", tmp_path, 400_000)
    assert text.startswith("CheckpointError: 3 more checkpoints and an export need ")
    assert metrics(tmp_path / "run") == []


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(
    workers: Workers, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    cfg = small_run(corpus, "toy", steps=1, optim=lf.AdamW(lr=1e39, clip=0.0), eval=lf.Eval())
    (text,) = workers.run(1, refused, cfg, folder, tmp_path)
    assert text.startswith("NonFiniteError: step 1 has left ")
    assert checkpoint.latest(folder) is None
    assert not (folder / "hf").exists()


def test_a_folder_in_which_no_step_was_done_takes_another_config(
    workers: Workers, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    cfg = small_run(corpus, "toy", steps=2)
    workers.run(1, opened, cfg, folder, tmp_path)
    workers.run(1, go, attrs.evolve(cfg, seed=3), folder, tmp_path)
    assert from_json((folder / "config.json").read_text()).seed == 3


def test_an_export_that_would_remove_files_is_refused_at_the_start(
    workers: Workers, corpus: Path, tmp_path: Path
) -> None:
    cfg, folder = small_run(corpus, "toy", steps=2), tmp_path / "run"
    workers.run(1, go, cfg, folder, tmp_path)
    (folder / "hf" / "thesis.tex").write_text("precious")
    before = tensors(folder, 2)
    (text,) = workers.run(1, refused, attrs.evolve(cfg, steps=3), folder, tmp_path)
    assert "thesis.tex" in text
    assert before.keys() == tensors(folder, 2).keys()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"profile": lf.Profile(start=5, steps=3)}, "profile.start = 5 and profile.steps = 3"),
        ({"steps": 1, "optim": lf.AdamW(schedule=lf.Linear())}, "learning rate of 0 at every step"),
        ({"data": Tripping(rows=0)}, "data has no rows"),
        ({"eval": lf.Eval(data=Tripping(rows=0))}, "eval.data has no rows"),
    ],
)
def test_what_would_come_to_nothing_is_refused(
    workers: Workers, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    (text,) = workers.run(1, refused, attrs.evolve(rows_run(Tripping()), **changes), tmp_path / "run", tmp_path)
    assert text.startswith("ValueError")
    assert expected in text
    assert not (tmp_path / "run").exists()


def closing(cfg: lf.Run, folder: Path, cache: Path) -> str:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    job = open_job(cfg, folder, (), cpu, checkpoint.distributed(), lambda text: None)
    return summary(job, train(job))


def test_the_summary_fits_models_of_short_texts(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    base = small_run(corpus, steps=2)
    data = attrs.evolve(base.data, seq_len=16)
    held_out = lf.Eval(data=attrs.evolve(data, part="held_out"), batches=1)
    cfg = attrs.evolve(base, data=data, eval=held_out, model=attrs.evolve(base.model, max_length=16))
    (text,) = workers.run(1, closing, cfg, tmp_path / "run", tmp_path)
    assert "entropy of single tokens" in text
    assert "sample, after the prompt" in text
