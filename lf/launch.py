"""The command line of a training run: launch flags first, then one flag for each leaf of the config they name."""

import contextlib
import difflib
import inspect
import io
from collections.abc import Sequence
from pathlib import Path

import attrs
import tyro

from lf import config
from lf.train.config import Run


@attrs.frozen(kw_only=True)
class Launch:
    """Trains the model of a config. With `--cfg` given, `--help` shows the flags of that config and its values."""

    cfg: str
    """The config: FILE.py (its value `cfg`), FILE.py:NAME for another value, or the config.json of a run.
    The file, or the copy of it beside the config.json, is executed."""
    out: str = ""
    """Run folder; empty is runs/<config name>, and for the config.json of a run that run's own folder."""
    device: str = ""
    """Name of the device (cpu, cuda, kunlun ...); empty takes the best one that is there."""


def parse(argv: Sequence[str], prog: str = "train.py", *, quiet: bool = False) -> tuple[Launch, Run, Run]:
    """Returns the launch flags (the run folder filled in), the config as loaded, and the config to train.

    Help exits with 0 and bad usage with 2; a config that is wrong raises ValueError. `quiet` prints nothing, for all
    ranks but one. An `--init` that the config did not have brings its own model and tokenizer, so the config's go.
    """
    if quiet:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return parse(argv, prog)
    helps = [arg for arg in argv if arg in ("-h", "--help")]
    flags = [arg for arg in argv if arg not in helps]
    if helps and not any(arg.split("=")[0] == "--cfg" for arg in argv):
        tyro.cli(Launch, args=helps, prog=prog)
    launch, rest = tyro.cli(Launch, args=flags, prog=prog, return_unknown_args=True, add_help=False)
    path, name = split_name(launch.cfg)
    base = config.load(path, name)
    if not isinstance(base, Run):
        raise ValueError(
            f"{launch.cfg} is a {type(base).__name__}; training takes a Run, so give one: cfg = lf.Run(...)"
        )
    try:
        config.check_types(base)
    except ValueError as error:
        raise ValueError(f"{launch.cfg}: {error}") from error
    _check_flags(rest, base)
    description = f"{inspect.getdoc(type(base))} For --out and --device, see {prog} --help without --cfg."
    cfg = config.override(base, rest + helps, f"{prog} --cfg {launch.cfg}", description=description)
    cfg = _take_from_init(base, cfg)
    config.check_round_trip(cfg)
    out = Path(launch.out).expanduser() if launch.out else run_folder(launch.cfg)
    return attrs.evolve(launch, out=str(out)), base, cfg


def _check_flags(rest: Sequence[str], base: Run) -> None:
    """Raises ValueError for a misspelt launch flag, which the parse of the config's own flags cannot recognise."""
    own = [f"--{field.name}" for field in attrs.fields(Launch)]
    known = {f"--{field.name}" for field in attrs.fields(type(base))}
    for flag in (arg.split("=")[0] for arg in rest if arg.startswith("--")):
        near = difflib.get_close_matches(flag, own, n=1, cutoff=0.75)
        if near and flag not in known:
            raise ValueError(f"{flag} is no flag; perhaps you meant {near[0]}")


def split_name(cfg: str) -> tuple[Path, str]:
    """Returns the file and the name of `FILE.py:NAME`; the name is `cfg` where none is given."""
    path, colon, name = cfg.rpartition(":")
    return (Path(path), name) if colon and name.isidentifier() else (Path(cfg), "cfg")


def run_folder(cfg: str) -> Path:
    """Returns the default run folder: runs/FILE, runs/FILE_NAME, or the folder that a run's config.json is in."""
    path, name = split_name(cfg)
    if path.name == "config.json":
        return path.parent
    return Path("runs") / (path.stem if name == "cfg" else f"{path.stem}_{name}")


def _take_from_init(base: Run, cfg: Run) -> Run:
    if not cfg.init or cfg.init == base.init:
        return cfg
    for path, old, new in config.diff(base, cfg):
        if path.split(".")[0] in ("model", "tokenizer"):
            raise ValueError(
                f"--{path} changes {old} to {new}, but --init {cfg.init} brings its own model and tokenizer; "
                "leave out one of the two flags, or set both init and model in the config file"
            )
    return attrs.evolve(cfg, model=None, tokenizer=None)
