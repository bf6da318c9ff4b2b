"""A small Pi0.5 learns from a script's demonstrations to push the block that it is told to, and is seen to act.

    python examples/robot_quickstart.py

It makes demonstrations in the tabletop, writes them as a LeRobot dataset, trains on it, and counts how often the
policy, the same policy untrained and the script succeed. Given again, it goes on where it was. It needs the extras
`robot` and `sim`.

Hardware: a CPU with 2 cores. Time: about 20 minutes. Result: the trained policy succeeds in 92 % of 60 episodes on
layouts that it has not seen (95 % interval 82 % to 96 %), the script in all, the untrained policy in none.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import attrs
import tyro

import lf
from lf.models.embodied.pi05_model import Pi05
from lf.models.embodied.robot import Times
from lf.models.layers.gemma import Gemma
from lf.models.vision.siglip import Siglip

OUT = Path("runs/robot_quickstart")
DATA = "data"
"""Folder of the recordings, beside the run folder."""
TOP = "top"

TOWER = Gemma(width=128, depth=4, mlp=256, heads=4, kv_heads=4, head_dim=32)

RECORDED = lf.LeRobotData(
    path=str(OUT / DATA),
    cameras=(lf.Camera(name=TOP, key=f"observation.images.{TOP}"),),
    chunk=8,
    normalise=lf.Normalise(state="min_max", actions="min_max"),
)

cfg = lf.Run(
    model=Pi05(
        vision=Siglip(width=128, depth=2, mlp=256, heads=4, image=64, patch=16),
        vlm=TOWER,
        expert=TOWER,
        vocab=300,
        cameras=(TOP,),
        prompt=48,
        horizon=8,
        dims=2,
        steps=5,
        # Mostly noise: what an action is must be found in the picture, not in the action itself.
        times=Times(alpha=4.0),
    ),
    tokenizer=lf.TrainedBpe(vocab=300),
    data=RECORDED,
    batch=64,
    optim=lf.AdamW(lr=1e-3, schedule=lf.Cosine(warmup=50, final=0.02)),
    parallel=lf.TorchParallel(micro_batch=64),
    steps=3500,
    log=lf.Log(every=100),
    save=lf.Save(every=500),
)
smoke = attrs.evolve(
    cfg, steps=4, batch=8, parallel=lf.TorchParallel(micro_batch=8), optim=lf.AdamW(lr=1e-3), log=lf.Log(every=1)
)


@attrs.frozen(kw_only=True)
class Args:
    """Makes demonstrations, trains a policy on them, and counts how often it succeeds."""

    out: Path = OUT
    """Folder of the recordings and of the run."""
    demonstrations: int = 1500
    """Episodes to record."""
    episodes: int = 60
    """Episodes to evaluate each policy in."""
    variant: str = "cfg"
    """Name of the config in this file."""


NOISE = 0.04
"""Metres a second by which the script is disturbed while it is recorded."""
FIRST = 1_000_000
"""Seed of the first episode of the evaluation, far from all that are recorded."""


def main(args: Args) -> None:
    """Runs all parts."""
    from lf.acting.evaluate import Evaluation, Pixels, evaluate, score_text
    from lf.acting.film import write_film
    from lf.acting.load import load_policy, untrained_policy
    from lf.acting.tabletop import tabletop

    record(args.out / DATA, range(args.demonstrations))
    run = args.out / "run"
    train = Path(__file__).parents[1] / "scripts" / "train.py"
    flags = ["--cfg", f"{__file__}:{args.variant}", "--out", str(run), "--data.path", str(args.out / DATA)]
    code = subprocess.run([sys.executable, str(train), *flags], check=False).returncode
    if code:
        sys.exit(code)
    how = Evaluation(episodes=args.episodes, first=FIRST, parallel=20, execute=4)
    chosen: lf.Run = globals()[args.variant]
    here = attrs.evolve(chosen, data=attrs.evolve(RECORDED, path=str(args.out / DATA)))
    frames: dict[int, list[Pixels]] = {}
    for name, policy in (("script", None), ("untrained", untrained_policy(here)), ("trained", load_policy(run))):
        filmed = range(FIRST, FIRST + 6) if name == "trained" else ()
        report = evaluate(
            policy, tabletop, how, watched=filmed, watch=lambda seed, frame: frames.setdefault(seed, []).append(frame)
        )
        print(f"{name:<9} succeeds in {score_text(report.score)}", flush=True)
    film = args.out / "episodes.mp4"
    write_film(film, frames, report.fps)
    print(f"video of the trained policy: {film}")


def record(folder: Path, seeds: Iterable[int]) -> None:
    """Writes the script's episodes as a LeRobot v3.0 dataset, unless it is there."""
    from lf.acting.demonstrate import demonstrations
    from lf.acting.tabletop import tabletop
    from lf.data.lerobot_record import write_dataset

    if folder.exists():
        print(f"recordings: {folder}", flush=True)
        return
    env = tabletop()
    print(f"recording the script in {folder} ...", flush=True)
    write_dataset(folder, demonstrations(env, seeds, noise=NOISE), fps=env.fps, robot=env.name)


if __name__ == "__main__":
    from lf.terminal import prepare

    prepare()
    main(tyro.cli(Args))
