"""Converts weights, offline: `python scripts/convert.py import HF_FOLDER LF_FOLDER`, and `export` for the way back."""

import sys
from pathlib import Path
from typing import Annotated

import attrs
import tyro

Folder = Annotated[Path, tyro.conf.Positional]


@attrs.frozen(kw_only=True)
class Import:
    """Writes a Hugging Face folder as a checkpoint of lf, for `train.py --init DST` and `convert.py export`."""

    src: Annotated[Folder, tyro.conf.arg(metavar="SRC")]
    """Hugging Face folder: config.json and safetensors."""
    dst: Annotated[Folder, tyro.conf.arg(metavar="DST")]
    """Folder to write, new or empty."""
    family: str = ""
    """FILE.py:NAME of a function that reads the config.json of a family outside lf."""


@attrs.frozen(kw_only=True)
class Export:
    """Writes the newest checkpoint of a run, or of an import, as a Hugging Face folder."""

    src: Annotated[Folder, tyro.conf.arg(metavar="SRC")]
    """Run folder, or a folder that `convert.py import` wrote."""
    dst: Annotated[Folder, tyro.conf.arg(metavar="DST")]
    """Hugging Face folder to write; an older one there is replaced."""
    family: str = ""
    """FILE.py:NAME, as for the import."""
    config_file: str = ""
    """Python file to execute first, where the model's class is in it; no file of SRC is executed unasked."""


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage. `report.json` in DST accounts for every tensor."""
    args: Import | Export = tyro.cli(Import | Export, args=argv, prog="convert.py", description=__doc__)
    from lf.train.convert import REPORT, export_folder, import_folder
    from lf.train.loop import FAULTS

    try:
        if isinstance(args, Import):
            done = import_folder(args.src, args.dst, args.family)
        else:
            done = export_folder(args.src, args.dst, args.family, args.config_file)
    except FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for skipped in done.skipped:
        print(f"skipped {skipped.path}: {skipped.reason}", file=sys.stderr)
    print(f"{len(done.rows)} tensors of {done.read} are in {args.dst}; {args.dst / REPORT} has a line for each")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
