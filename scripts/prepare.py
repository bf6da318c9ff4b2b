"""Prepares data, offline. Robots: `check DIR`, `convert SRC DST`, `view-episodes DIR`. Media: `latents SRC DST`.

Chats with images and videos, of a config: `index CFG`, `view-samples CFG`.
"""

import json
import sys

import tyro

from lf.data.latent_commands import Latents
from lf.data.lerobot_commands import Check, Convert, ViewEpisodes, run
from lf.launch import parse
from lf.terminal import prepare, say
from lf.train.samples import Index, ViewSamples, report

Command = Check | Convert | ViewEpisodes | Latents | Index | ViewSamples


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done and well, 1 something is wrong, 2 bad usage."""
    settings = {"prog": "prepare.py", "description": __doc__}
    args, rest = tyro.cli(Command, args=argv, return_unknown_args=True, **settings)  # type: ignore[call-overload]
    if rest and not isinstance(args, Index | ViewSamples):
        tyro.cli(Command, args=argv, **settings)  # type: ignore[call-overload]
    prepare()
    try:
        if isinstance(args, Index | ViewSamples):
            made = report(args, parse(["--cfg", args.cfg, *rest], prog="prepare.py")[2])
        else:
            made = run(args)
    except (ValueError, OSError) as error:
        if args.json:
            say(json.dumps({"ok": False, "error": str(error)}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    say(json.dumps(made.facts) if args.json else made.text)
    return 0 if made.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
