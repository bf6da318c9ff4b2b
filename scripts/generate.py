"""Continues a text: `generate.py FOLDER --prompt TEXT`; with `--image FILE` or `--video FILE` it answers a question.

`generate.py media FOLDER` makes pictures and videos.
"""

import sys
from pathlib import Path
from typing import Annotated

import attrs
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lf.models.generate import Sampling, allowance, generate, stream_text
from lf.models.spec import has_rule, sample
from lf.terminal import end_with_reader, prepare


@attrs.frozen(kw_only=True)
class Args(Sampling):
    """Prints what a language model writes after a prompt, or answers to one about images and videos, as it comes."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Run folder of lf, of which the newest checkpoint is taken, or Hugging Face folder; with its tokenizer."""
    prompt: str = attrs.field(validator=attrs.validators.min_len(1))
    """Text to continue; with images or videos a question, in which <image> and <video> may say where they stand."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Image file that the prompt is about, which then goes through the chat template; may be given several times."""
    video: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """The same of a video file."""
    device: str = ""
    """Name of the device (cpu, cuda, kunlun ...); empty takes the best one that is there."""
    family: str = ""
    """FILE.py:NAME of a function that reads the config.json of a family outside lf."""
    config_file: str = ""
    """Python file to execute first, where the model's class is in it; no file of FOLDER is executed unasked."""


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage; SIGPIPE ends it where nobody reads on."""
    if argv[:1] == ["media"]:
        return media(argv[1:])
    args = tyro.cli(Args, args=argv, prog="generate.py")
    from lf.data.hf_tokenizer import read_tokenizer
    from lf.devices.detect import detect
    from lf.train.chats import ask
    from lf.train.comm import process_group
    from lf.train.folder import TOKENIZER
    from lf.train.loop import FAULTS
    from lf.train.start import load_model, local_context, open_saved

    try:
        device, start = detect(args.device), open_saved(args.folder, args.family, args.config_file)
        if has_rule(sample, start.model):
            raise ValueError(f"{args.folder} holds no language model; `generate.py media` samples diffusion models")
        tokenizer = read_tokenizer(next(p for p in (args.folder / TOKENIZER, args.folder) if p.is_dir()))
        text = args.prompt.encode(errors="surrogateescape").decode()
        pictures, eos = None, tokenizer.eos
        if args.image or args.video:
            asked = ask(args.folder, start, tokenizer, text, args.image, args.video)
            prompt, pictures, eos = asked.tokens, asked.pictures, asked.end
        else:
            prompt = tokenizer.encode_batch([text])[0]
        allowance(start.model, prompt, args, pictures)
        with process_group(device):
            model = load_model(start, local_context(start.model, device))
            ids = generate(start.model, model, prompt, args, eos=eos, device=device.torch_type, pictures=pictures)
            for text in stream_text(tokenizer.decode, prompt, ids):
                print(text, end="", flush=True)
    except FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(flush=True)
    return 0


def media(argv: list[str]) -> int:
    """Samples a picture or a video; returns the exit code."""
    from lf.train.loop import FAULTS
    from scripts.media.painting import Media, paint

    args = tyro.cli(Media, args=argv, prog="generate.py media")
    try:
        print(paint(args), flush=True)
    except FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    prepare()
    end_with_reader()
    sys.exit(main(sys.argv[1:]))
