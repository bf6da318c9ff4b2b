"""Whole runs: what they write, how they stop, and that they go on exactly where they were."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import lf
from lf.devices.cpu import cpu
from lf.models.decoder import Mlp
from lf.models.llm.deepseek import deepseek_v3_tiny
from lf.models.spec import fake_text_batch
from lf.models.toy import Toy
from lf.train import checkpoint
from lf.train.loop import train
from lf.train.run import cache_dir, open_job
from lf.train.step import NonFiniteError
from tests.cases import DENSE
from tests.workers import Workers

GATE = 5e-6
BF16 = lf.Precision(params="bfloat16")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        words = " ".join(f"word{(i * j) % 17} = {j}" for j in range(5, 40 + 9 * (i % 5)))
        (folder / f"{i:02}.txt").write_text(f"document {i}\n{words}\n")
    return folder


def small_run(corpus: Path, kind: str = "dense", **changes: Any) -> lf.Run:
    data = lf.TextData(paths=(str(corpus),), seq_len=32, part="train", held_out=0.2)
    vocab = 300
    models = {
        "dense": (attrs.evolve(DENSE, vocab=vocab, hidden=32, mlp=Mlp(width=48)), lf.MegatronParallel(micro_batch=2)),
        "toy": (Toy(vocab=vocab), lf.TorchParallel(micro_batch=2)),
        "experts": (attrs.evolve(deepseek_v3_tiny, vocab=vocab), lf.MegatronParallel(micro_batch=2)),
    }
    chosen, parallel = models[kind]
    run = lf.Run(
        model=chosen,
        tokenizer=lf.TrainedBpe(vocab=vocab),
        data=data,
        batch=6,
        optim=lf.AdamW(lr=3e-3, schedule=lf.Cosine(warmup=2)),
        parallel=parallel,
        steps=6,
        eval=lf.Eval(data=attrs.evolve(data, part="held_out"), every=2),
        log=lf.Log(every=1),
        save=lf.Save(every=2),
    )
    return attrs.evolve(run, **changes)


def go(run: lf.Run, folder: Path, cache: Path, stop_at: int = 0) -> tuple[list[str], int]:
    """Trains on this rank; returns the lines and the signal that ended it. SIGTERM comes after the line of a step."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if stop_at and text.startswith(f"step {stop_at}/"):
            os.kill(os.getpid(), signal.SIGTERM)

    job = open_job(run, folder, (), cpu, checkpoint.distributed(), say)
    ended = train(job)
    return lines, ended.signal


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    reader = checkpoint.open_checkpoint(folder / "checkpoints" / f"step_{step}")
    return {name: reader.read(name).clone() for name in reader.names}


def metrics(folder: Path) -> list[dict[str, Any]]:
    keep = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in keep if key in line} for line in lines]


@pytest.mark.parametrize("model", ["dense", "toy", "experts"])
def test_resume_is_bit_exact(workers: Workers, corpus: Path, tmp_path: Path, model: str) -> None:
    run, whole, cut = small_run(corpus, model), tmp_path / "whole", tmp_path / "cut"
    workers.run(1, go, run, whole, tmp_path)
    ((_, number),) = workers.run(1, go, run, cut, tmp_path, 3)
    assert number == signal.SIGTERM
    assert checkpoint.latest(cut).step == 3  # type: ignore[union-attr]
    assert not (cut / "hf").exists()
    ((lines, number),) = workers.run(1, go, run, cut, tmp_path)
    assert number == 0
    assert any(line.startswith("resumed from") and line.endswith("step_3") for line in lines)
    assert metrics(cut) == metrics(whole)
    reference = tensors(whole, 6)
    assert {"weight", "exp_avg", "exp_avg_sq", "step"} == {name.split("/")[0] for name in reference}
    biases = [value for name, value in reference.items() if name.endswith("expert_bias")]
    assert all(value.any() for value in biases)
    assert bool(biases) == (model == "experts")
    for name, value in tensors(cut, 6).items():
        assert torch.equal(value, reference[name]), name


def test_ranks_may_change_between_resumes(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    run, whole, moved = small_run(corpus), tmp_path / "whole", tmp_path / "moved"
    workers.run(1, go, run, whole, tmp_path)
    workers.run(2, go, run, moved, tmp_path, 2)
    workers.run(1, go, run, moved, tmp_path, 4)
    workers.run(2, go, run, moved, tmp_path)
    for ours, reference in zip(metrics(moved), metrics(whole), strict=True):
        assert ours.keys() == reference.keys()
        assert all(ours[key] == pytest.approx(reference[key], rel=1e-4) for key in ours), (ours, reference)
        assert ours["step"] == reference["step"]
        assert ours.get("tokens") == reference.get("tokens")


WALK = [
    (4, lf.MegatronParallel(micro_batch=2, tp=2, pp=2)),
    (1, lf.MegatronParallel(micro_batch=2)),
    (2, lf.MegatronParallel(micro_batch=1)),
    (2, lf.MegatronParallel(micro_batch=2, cp=2)),
    (2, lf.MegatronParallel(micro_batch=2, pp=2, vpp=2)),
    (4, lf.MegatronParallel(micro_batch=1, pp=4)),
]
"""Worlds and layouts that a run passes through."""


def test_a_run_goes_on_in_any_other_layout(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = small_run(corpus, steps=len(WALK), eval=lf.Eval(), save=lf.Save())
    base = attrs.evolve(base, model=attrs.evolve(base.model, layers=4, tied=True, vocab=301))
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    workers.run(1, go, base, whole, tmp_path)
    for step, (world, parallel) in enumerate(WALK, 1):
        stop = step if step < len(WALK) else 0
        for lines, number in workers.run(world, go, attrs.evolve(base, parallel=parallel), moved, tmp_path, stop):
            assert number == (signal.SIGTERM if stop else 0), lines
    for ours, reference in zip(metrics(moved), metrics(whole), strict=True):
        assert all(ours[key] == pytest.approx(reference[key], rel=1e-4) for key in ours), (ours, reference)
    # The last layout spreads the model over four ranks; its export is one model.
    models = [AutoModelForCausalLM.from_pretrained(folder / "hf") for folder in (moved, whole)]
    for (name, a), (_, b) in zip(*(model.state_dict().items() for model in models), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name


def test_a_second_start_of_a_finished_run_changes_nothing(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    run, folder = small_run(corpus, "toy", steps=2), tmp_path / "run"
    workers.run(1, go, run, folder, tmp_path)
    before = (folder / "metrics.jsonl").read_text()
    workers.run(1, go, run, folder, tmp_path)
    assert (folder / "metrics.jsonl").read_text() == before


def refusal(run: lf.Run, folder: Path, cache: Path) -> str:
    try:
        go(run, folder, cache)
    except (ValueError, NonFiniteError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_folder_with_another_config_is_refused(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    workers.run(1, go, small_run(corpus, "toy", steps=2), folder, tmp_path)
    (text,) = workers.run(1, refusal, small_run(corpus, "toy", steps=2, seed=1, batch=4), folder, tmp_path)
    assert "seed: 0 -> 1" in text
    assert "batch: 6 -> 4" in text
    assert "--out" in text
    stray = tmp_path / "stray"
    stray.mkdir()
    (stray / "thesis.tex").write_text("precious")
    (text,) = workers.run(1, refusal, small_run(corpus, "toy"), stray, tmp_path)
    assert "no run folder" in text


def test_a_loss_that_is_not_finite_stops_before_the_update(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    run = small_run(corpus, optim=lf.AdamW(lr=1e30, clip=0.0), save=lf.Save(every=1, keep=9))
    for world, text in ((1, "rank 0: "), (2, "rank 1: ")):
        folder = tmp_path / f"run{world}"
        for answer in workers.run(world, refusal, run, folder, tmp_path):
            assert answer.startswith("NonFiniteError: step 2: loss "), answer
            assert ".txt" in answer
            assert text in answer
        assert checkpoint.latest(folder).step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"parallel": lf.TorchParallel()}, "MegatronParallel"),
        ({"parallel": lf.MegatronParallel(tp=2)}, "parallel.tp * cp * pp = 2"),
        ({"optim": lf.AdamW(rates=(lf.Rate(names=("embedding.*",), factor=0.1),))}, "TorchParallel"),
        ({"model": attrs.evolve(DENSE, vocab=299)}, "model.vocab >= 300"),
        ({"model": Toy(vocab=299), "parallel": lf.TorchParallel()}, "model.vocab = 299, but the data has token id 299"),
        ({"model": attrs.evolve(DENSE, vocab=300, max_length=31)}, "max_length"),
        ({"tokenizer": None}, "tokenizer"),
        ({"model": None}, "model"),
        ({"model": attrs.evolve(DENSE, vocab=300, attention=attrs.evolve(DENSE.attention, head_dim=15))}, "head_dim"),
        ({"init": "/nowhere", "model": None}, "nowhere"),
        ({"optim": lf.AdamW(schedule=lf.Cosine(warmup=7))}, "warmup"),
        ({"eval": lf.Eval(data=lf.TextData(paths=("/nowhere",), seq_len=32))}, "/nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    workers: Workers, corpus: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    (text,) = workers.run(1, refusal, small_run(corpus, **change), tmp_path / "run", tmp_path)
    assert text.startswith("ValueError")
    assert expected in text
    assert not (tmp_path / "run").exists()


def test_held_out_text_that_would_be_trained_on_is_refused(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    run = small_run(corpus)
    wider = attrs.evolve(run, data=attrs.evolve(run.data, held_out=0.1))
    (text,) = workers.run(1, refusal, wider, tmp_path / "run", tmp_path)
    assert "data has part = 'train' and held_out = 0.1, and eval.data has part = 'held_out' and held_out = 0.2" in text


def logits_of(folder: Path) -> Any:
    from lf.models.spec import fake_text_batch, forward
    from lf.train.start import load_model, local_context, open_start

    start = open_start(str(folder), None)
    model = load_model(start, local_context(start.model, cpu))
    with torch.no_grad():
        batch = {k: v for k, v in fake_text_batch(300, 2, 20, 0).items() if k != "labels"}
        return batch["tokens"], forward(start.model, model, batch)


def test_the_export_loads_in_transformers_and_starts_another_run(
    workers: Workers, corpus: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, second = tmp_path / "first", tmp_path / "second"
    workers.run(1, go, small_run(corpus, steps=2), first, tmp_path)
    ((tokens, logits),) = workers.run(1, logits_of, first / "hf")
    peer = AutoModelForCausalLM.from_pretrained(first / "hf")
    with torch.no_grad():
        assert torch.allclose(peer(tokens).logits, logits, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(first / "hf")
    assert tokenizer.decode(tokenizer("word3 = 5")["input_ids"]) == "word3 = 5"
    assert peer.config.eos_token_id == tokenizer.eos_token_id

    tuned = small_run(corpus, model=None, tokenizer=None, init=str(first / "hf"), steps=2)
    ((lines, _),) = workers.run(1, go, tuned, second, tmp_path)
    start = next(line for line in lines if line.startswith("step 1/"))
    assert float(start.split("loss ")[1].split()[0]) < 5.6
    assert (second / "hf" / "config.json").read_bytes() == (first / "hf" / "config.json").read_bytes()
    # The imported folder may go: the run remembers what its export needs.
    (first / "hf").rename(tmp_path / "gone")
    workers.run(1, go, attrs.evolve(tuned, steps=3), second, tmp_path)
    # A run folder of lf starts a run too.
    third = attrs.evolve(tuned, init=str(second), steps=2)
    workers.run(1, go, third, tmp_path / "third", tmp_path)


def half_made(folder: Path) -> None:
    """Leaves what a run leaves that is killed while it makes its folder."""
    (folder.parent / f".{folder.name}.new" / "tokenizer").mkdir(parents=True)


def test_a_run_that_died_while_its_folder_was_made_starts_again(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    half_made(folder)
    workers.run(1, go, small_run(corpus, "toy", steps=2), folder, tmp_path)
    assert sorted(entry.name for entry in folder.iterdir()) == sorted(
        ["checkpoints", "config.json", "hf", "metrics.jsonl", "tokenizer"]
    )
    assert not list(tmp_path.glob(".run.new"))


def twice(run: lf.Run, folder: Path, cache: Path) -> str:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    comm = checkpoint.distributed()
    job = open_job(run, folder, (), cpu, comm, str)
    try:
        open_job(run, folder, (), cpu, comm, str)
    except checkpoint.CheckpointError as error:
        return str(error)
    finally:
        job.lock.close()
    return ""


def test_one_process_trains_in_a_folder(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    for text in workers.run(2, twice, small_run(corpus, "toy"), tmp_path / "run", tmp_path):
        assert "another process is training in" in text


def masked() -> str:
    from lf.models.spec import Ctx
    from lf.train.fsdp_step import torch_engine

    cfg = Toy(vocab=300)
    run = small_run(Path("unused"), "toy")
    engine = torch_engine(run, cfg, Ctx(device=cpu))
    batch = fake_text_batch(300, 2, 8, 0)
    silent = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    try:
        engine.evaluate(engine.state, [[silent]])
    except ValueError as error:
        return str(error)
    return ""


def test_held_out_data_without_a_trained_position_is_an_error(workers: Workers) -> None:
    (text,) = workers.run(1, masked)
    assert "no position to score" in text


def test_an_empty_cache_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Path("~/.cache/lf").expanduser()
    for value, expected in (("", default), ("/elsewhere", Path("/elsewhere/lf")), (None, default)):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir() == expected


def test_unequal_batches_are_filled_with_rows_of_no_weight(workers: Workers, corpus: Path, tmp_path: Path) -> None:
    run = small_run(corpus, batch=5, steps=3)
    workers.run(1, go, run, tmp_path / "one", tmp_path)
    workers.run(2, go, run, tmp_path / "two", tmp_path)
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert all(two[key] == pytest.approx(one[key], rel=1e-4) for key in one)
