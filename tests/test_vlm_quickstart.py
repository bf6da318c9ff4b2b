"""The example of scenes: answers are what is drawn, right is told from wrong, and `smoke` runs to its end."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lf
from lf import config
from lf.models import hf
from lf.train import comm

EXAMPLE = Path(__file__).parents[1] / "examples/vlm_quickstart.py"


def example() -> Any:
    """Returns the module of the example."""
    config.load(EXAMPLE, "smoke")
    import vlm_quickstart

    return vlm_quickstart


def drawn(pixels: np.ndarray, colours: dict[str, Any]) -> list[str]:
    """Returns the colour in the middle of each place of a scene, empty where nothing is."""
    middles = pixels[8::16, 8::16].reshape(-1, 3).astype(int)
    near = [min(colours, key=lambda name: np.abs(middle - colours[name]).sum()) for middle in middles]
    return [name if np.ptp(middle) > 50 else "" for name, middle in zip(near, middles, strict=True)]


def test_answers_are_what_is_drawn_and_none_is_likelier() -> None:
    own = example()
    made = [own.scene(number) for number in range(300)]
    for scene in made:
        there = drawn(scene.pixels, own.COLOURS)
        question, answer = scene.asked["count"]
        assert there.count(question.split()[2]) == own.NUMBERS.index(answer)
        things = dict(zip(own.PLACES, there, strict=True))
        listed = [thing.rsplit(" ", 2) for thing in scene.listed[1].split(", ")]
        assert [(place, colour) for place, colour, _ in listed] == [each for each in things.items() if each[1]]
        for kind, column in (("colour", 1), ("position", 0)):
            question, answer = scene.asked[kind]
            assert [thing[column] for thing in listed if thing[2] == question.split()[-1][:-1]] == [answer]
    for kind, chance in own.CHANCE.items():
        counts = Counter(scene.asked[kind][1] for scene in made)
        assert len(counts) == round(1 / chance)
        assert max(counts.values()) < 1.6 * 300 * chance
    held = {own.scene(own.FIRST + number).pixels.tobytes() for number in range(300)}
    assert len(held | {scene.pixels.tobytes() for scene in made}) == 600


def test_smoke_runs_to_its_end_and_tells_right_answers_from_wrong_ones(
    one_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comm, "process_group", lambda device: contextlib.nullcontext(comm.distributed()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, out, looked = example(), tmp_path / "out", []
    answers = own.answers

    def watched(model: Any, module: Any, rows: Any, tokenizer: Any, chats: Path) -> Any:
        """Answers once more with stand-ins for the model: one that reads on in the row, one that ends at once."""
        end = tokenizer.special["<|im_end|>"]
        for name, says in (("right", lambda tokens: tokens.roll(-1, 1)), ("silent", lambda tokens: tokens * 0 + end)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    own,
                    "forward",
                    lambda model, module, batch, says=says: torch.nn.functional.one_hot(says(batch["tokens"]), 400),
                )
                looked.append((name, answers(model, module, rows, tokenizer, chats)))
        return answers(model, module, rows, tokenizer, chats)

    monkeypatch.setattr(own, "answers", watched)
    before, after = own.main(own.Args(out=out, scenes=96, held_out=3, variant="smoke"))
    for name, found in looked:
        assert [answer.right for answer in found] == [name == "right"] * 9
        assert [answer.given for answer in found] == [answer.true if name == "right" else "" for answer in found]
    asked = {
        (f"pictures/{own.FIRST + i}.png", *pair) for i in range(3) for pair in own.scene(own.FIRST + i).asked.values()
    }
    assert {(answer.picture, answer.question, answer.true) for answer in before} == asked
    assert len(after) == 9
    told = capsys.readouterr().out
    assert all(f"{when:<6} {kind:<8} right in" in told for when in ("before", "after") for kind in own.CHANCE)
    page = (out / "answers.html").read_text()
    assert page.count("<img") == 3
    assert all((out / "data" / answer.picture).is_file() and answer.question in page for answer in after)
    lines = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    run = config.load(EXAMPLE, "smoke")
    assert isinstance(run, lf.Run)
    assert hf.read_config(out / "run/hf") == run.model
