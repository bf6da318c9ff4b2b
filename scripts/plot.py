"""Draws the loss curves of runs: `python scripts/plot.py runs/a runs/b --out loss.png`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from lf.train.plot import plot_runs


def main(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], /, *, out: Path = Path("loss.png")) -> int:
    """Draws training loss, held-out loss and gradient norm of runs into one PNG.

    Args:
        runs: Run folders, or their metrics.jsonl files.
        out: The PNG to write.
    """
    try:
        plot_runs(runs, out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
