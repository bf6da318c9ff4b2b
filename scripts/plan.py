"""Says what a config needs on N ranks before any of them is there. `python scripts/plan.py --help` lists the flags."""

import json
import math
import sys
from collections.abc import Sequence
from typing import Literal

import attrs
import tyro

from lf.launch import parse
from lf.models.media import Media
from lf.plan.estimate import plan
from lf.plan.speed import Devices, search
from lf.plan.text import GIB, as_json, render
from lf.terminal import prepare, say
from lf.train.planning import job_of


@attrs.frozen(kw_only=True)
class Flags:
    """Plans a run: `--cfg FILE` and the flags of that config come as for train.py."""

    cfg: str
    """The config: FILE.py (its value `cfg`), FILE.py:NAME for another value, or the config.json of a run."""
    world: int
    """Ranks."""
    memory: float = 0.0
    """Memory of a rank in GiB: says what does not fit in it, and the nearest layouts that would. 0 says nothing."""
    length: int = 0
    """Tokens of a row; 0 takes them from the config's data."""
    images: int = -1
    """Images of a row; -1 takes those of the config's data, which must then be there."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Frames, rows and columns of patches of each of `images`; an image in several tiles counts as several."""
    cpu: bool = False
    """Whether the ranks are CPUs, whose layers keep more."""
    json: bool = False
    """Whether to print JSON."""
    search: bool = False
    """Whether to name the fastest layouts of as many ranks (that fit in `--memory`), by what `devices` declares."""
    devices: Devices = Devices()
    """What ranks compute and send."""


MOST_RANKS, MOST_TOKENS, MOST_IMAGES = 2**24, 2**40, 2**16
"""Ranks, tokens and images of a row, beyond which a number is a slip."""


def check(flags: Flags) -> None:
    """Raises ValueError, with the cure, for a number that nothing can be planned with."""
    for name, value in attrs.asdict(flags.devices).items():
        free = name == "latency"
        if not (value >= 0 if free else value > 0) or value == math.inf:
            raise ValueError(
                f"--devices.{name} = {value} must be {'0 or more' if free else 'above 0'} and finite; give what the "
                "devices have, or leave it out"
            )
    if not 1 <= flags.world <= MOST_RANKS:
        raise ValueError(f"--world = {flags.world} must be 1 to {MOST_RANKS}; give the number of ranks")
    if not 0 <= flags.memory < math.inf:
        raise ValueError(
            f"--memory = {flags.memory} must be 0 or more and finite; give the GiB of a rank, or 0 to leave the "
            "question out"
        )
    if not 0 <= flags.length <= MOST_TOKENS:
        raise ValueError(
            f"--length = {flags.length} must be 0 to {MOST_TOKENS}; give the tokens of a row, or 0 to take them from "
            "the config's data"
        )
    if not -1 <= flags.images <= MOST_IMAGES:
        raise ValueError(f"--images = {flags.images} must be -1 to {MOST_IMAGES}; give those of a row, or leave it out")
    if (flags.images > 0) != (min(flags.grid) > 0):
        raise ValueError(
            f"--images = {flags.images} with --grid = {flags.grid}: give both, the images of a row and the frames, "
            "rows and columns of patches of each"
        )


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 bad usage or config."""
    helps = [arg for arg in argv if arg in ("-h", "--help")]
    if helps and not any(arg.split("=")[0] == "--cfg" for arg in argv):
        tyro.cli(Flags, args=helps, prog="plan.py")
    own = [arg for arg in argv if arg not in helps]
    flags, rest = tyro.cli(Flags, args=own, prog="plan.py", return_unknown_args=True, add_help=False)
    try:
        check(flags)
        _, _, run = parse(["--cfg", flags.cfg, *rest, *helps], prog="plan.py")
        kind: Literal["image", "video"] = "image" if flags.grid[0] == 1 else "video"
        media = None if flags.images < 0 else (Media(grids=(flags.grid,), kind=kind),) * flags.images
        job = job_of(run, flags.world, length=flags.length, media=media, cpu=flags.cpu)
        memory = flags.memory * GIB
        made, fastest = plan(job), search(job, flags.devices, memory) if flags.search else ()
    except (ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(json.dumps(as_json(made, memory, fastest), indent=2) if flags.json else render(made, memory, fastest))
    return 0


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))
