"""What a script prints, on whatever terminal, file or pipe it is."""

import io
import os
import signal
import sys
import warnings

_OLD_NAMES = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


def prepare() -> None:
    """Lets the process print any text, on terminals that know fewer letters too, and nothing that users cannot act on.

    megatron-core warns at length that it does without packages which lf replaces or does not need. It also calls
    collectives by names that torch gives up, of which torch warns in its own name; lf calls none of those.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=_OLD_NAMES, module=r"torch\.distributed\.c10d_logger")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Prints a line on rank 0; nobody may be reading any more, which is no reason to stop a run."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def end_with_reader() -> None:
    """Lets the process end, without a word, when nobody reads what it prints: as other filters do."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
