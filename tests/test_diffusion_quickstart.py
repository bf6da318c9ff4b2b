"""The example of moving shapes: its measure tells right clips from wrong ones, and `smoke` runs to its end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import lf
from lf import config

EXAMPLE = Path(__file__).parents[1] / "examples/diffusion_quickstart.py"


def test_the_measure_knows_right_clips_from_wrong_ones() -> None:
    config.load(EXAMPLE, "smoke")
    from diffusion_quickstart import CAPTIONS, clip_of, judge, quality

    rng = np.random.default_rng(0)
    clips = [clip_of(caption, (5.5 + rng.uniform(-0.5, 0.5), 5.5 + rng.uniform(-0.5, 0.5))) for caption in CAPTIONS]
    noisy = [np.clip(clip + rng.normal(0, 0.3, clip.shape), -1, 1) for clip in clips]
    assert quality(clips) == quality(noisy) == (1.0, 1.0, 1.0)
    for number, caption in enumerate(CAPTIONS):
        other = CAPTIONS[(number * 7 + 5) % len(CAPTIONS)]
        assert judge(clips[number], other) == tuple(a == b for a, b in zip(caption, other, strict=True))
    assert quality([np.full_like(clip, -1.0) for clip in clips]) == (0.0, 0.0, 0.0)
    assert max(quality([rng.normal(0, 1, clip.shape).astype(np.float32) for clip in clips])) < 0.8


def test_smoke(tmp_path: Path) -> None:
    from PIL import Image

    run, out = config.load(EXAMPLE, "smoke"), tmp_path / "out"
    assert isinstance(run, lf.Run)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE), "--variant", "smoke", "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("before", "after"):
        assert re.search(rf"{name} training, clips agree with their captions: \d+% ", done.stdout)
        # Twelve captions below each other, two beside, three frames with an edge of a pixel, three times as large.
        assert Image.open(out / f"{name}.png").size == (2 * 3 * 14 * 3, 12 * 14 * 3)
    assert (out / "before.png").read_bytes() != (out / "after.png").read_bytes()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == run.steps
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:3])
    assert (out / "hf/diffusion_pytorch_model.safetensors").is_file()
