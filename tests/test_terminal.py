"""What scripts print, on terminals that know few letters and pipes that nobody reads."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(code: str, encoding: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-c", f"from lf.terminal import end_with_reader, say, prepare\n{code}"]
    env = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_letters_that_a_terminal_lacks_are_escaped() -> None:
    out, err = python("prepare(); say('a\\u4e16b')", "ascii").communicate(timeout=60)
    assert (out, err) == (b"a\\u4e16b\n", b"")


def test_a_reader_that_goes_away_stops_nothing() -> None:
    process = python("import sys\nfor i in range(100000): say('x' * 99)\nsys.exit(7)", "utf-8")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 7
    assert process.stderr.read() == b""


def test_a_filter_ends_with_its_reader() -> None:
    process = python("end_with_reader()\nfor i in range(100000): print('x' * 99)", "utf-8")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert process.stderr.read() == b""


def test_other_ranks_are_silent() -> None:
    out, _ = python("import os; os.environ['RANK'] = '1'; say('x')", "utf-8").communicate(timeout=60)
    assert out == b""


def test_only_what_nobody_can_act_on_is_kept_quiet() -> None:
    def told(name: str) -> bytes:
        text = f"`torch.distributed.{name}` is deprecated. Please use another."
        warn = f"warn_explicit({text!r}, FutureWarning, 'c10d_logger.py', 83, module='torch.distributed.c10d_logger')"
        return python(f"import warnings; prepare(); warnings.{warn}", "utf-8").communicate(timeout=60)[1]

    assert told("all_gather_into_tensor") == b""
    assert b"`torch.distributed.gather_all` is deprecated" in told("gather_all")
