"""Counts how often a policy succeeds: `python scripts/evaluate.py --policy RUN --env tabletop`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import attrs
import tyro

from lf.acting.evaluate import Episode, Evaluation, Pixels, Report, evaluate, report_json, report_lines
from lf.acting.policy import Policy
from lf.terminal import prepare


@attrs.frozen(kw_only=True)
class Args(Evaluation):
    """Lets a policy act in a simulator, and prints how often it succeeds, with a confidence interval."""

    policy: str
    """Folder of a run or an export, `expert` for the environment's own script, or `untrained` for the policy that a
    run (--config) starts from."""
    env: str = "tabletop"
    """tabletop, libero_SUITE, or FILE.py:NAME of a function that returns an environment."""
    config: str = ""
    """Config of the untrained policy: FILE.py, FILE.py:NAME or the config.json of a run; it is executed."""
    device: str = "cpu"
    """Name of the device (cpu, cuda, kunlun ...); empty takes the best one that is there."""
    averaged: Literal["auto", "yes", "no"] = "auto"
    """Whether to take the running average of the weights; auto does as the exports of the run."""
    config_file: str = ""
    """Python file to execute first, where the model's class is in it; no file of a folder is executed unasked."""
    video: Path | None = None
    """mp4 to write of the first episodes."""
    filmed: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Episodes in the video."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Whether to print one JSON object, each episode in it, and nothing else."""


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage."""
    args = tyro.cli(Args, args=argv, prog="evaluate.py")
    from lf.acting.film import check_film, write_film
    from lf.acting.worlds import find_world
    from lf.train.loop import FAULTS

    frames: dict[int, list[Pixels]] = {}
    say: Callable[[str], None] = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    try:
        if args.video:
            check_film(args.video)
        make = find_world(args.env)
        report = evaluate(
            _policy(args, say),
            make,
            args,
            progress=lambda episode: say(_line(episode)),
            watched=range(args.first, args.first + args.filmed) if args.video else (),
            watch=lambda seed, frame: frames.setdefault(seed, []).append(frame),
        )
        # First what was found, in case that the film fails.
        print(_told(args, report), flush=True)
        if args.video:
            write_film(args.video, frames, report.fps)
            say(f"video: {args.video}")
    except FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _told(args: Args, report: Report) -> str:
    if args.json:
        return json.dumps({"policy": args.policy, **report_json(report)})
    return "\n".join(report_lines(report))


def _policy(args: Args, say: Callable[[str], None]) -> Policy | None:
    """Returns the policy, None for the environment's expert."""
    if args.config and args.policy != "untrained":
        raise ValueError("--config is for --policy untrained; a folder has its own config")
    _check_used(args)
    if args.policy == "expert":
        return None
    from lf.acting.load import load_policy, untrained_policy
    from lf.config import load
    from lf.train.config import Run

    if args.policy != "untrained":
        averaged = {"auto": None, "yes": True, "no": False}[args.averaged]
        return load_policy(args.policy, device=args.device, averaged=averaged, config_file=args.config_file, say=say)
    path, _, name = args.config.rpartition(":") if not args.config.endswith((".py", ".json")) else (args.config, "", "")
    if not path:
        raise ValueError("--policy untrained needs --config, the run whose policy it is")
    run = load(path, name or "cfg")
    if not isinstance(run, Run):
        raise ValueError(f"{args.config} is a {type(run).__name__}; give an lf.Run")
    return untrained_policy(run, device=args.device)


def _check_used(args: Args) -> None:
    """Raises ValueError for a flag that means nothing to the policy asked for."""
    unused: tuple[str, ...] = ()
    if args.policy in ("expert", "untrained"):
        unused = ("averaged", "config_file")
    if args.policy == "expert":
        unused += ("execute", "cameras", "any_fps", "seed", "device")
    known = attrs.fields_dict(Args)
    for name in unused:
        if getattr(args, name) != known[name].default:
            raise ValueError(f"--{name.replace('_', '-')} means nothing to --policy {args.policy}; leave it out")


def _line(episode: Episode) -> str:
    return f"seed {episode.seed}: {'success' if episode.success else 'failure'}, {episode.steps} steps, {episode.task}"


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))
