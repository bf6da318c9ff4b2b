"""Prepares data, offline: that of robots by `prepare.py check`, `convert` and `view-episodes`, media by `latents`."""

import json
import sys

import tyro

from lf.data.latent_commands import Latents
from lf.data.lerobot_commands import Check, Convert, ViewEpisodes, run
from lf.terminal import prepare, say


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done and well, 1 something is wrong, 2 bad usage."""
    args: Check | Convert | ViewEpisodes | Latents = tyro.cli(
        Check | Convert | ViewEpisodes | Latents, args=argv, prog="prepare.py", description=__doc__
    )
    prepare()
    try:
        report = run(args)
    except (ValueError, OSError) as error:
        if args.json:
            say(json.dumps({"ok": False, "error": str(error)}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    say(json.dumps(report.facts) if args.json else report.text)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
