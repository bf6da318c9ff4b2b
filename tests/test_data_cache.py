"""What is built once is built by one process, whole or not at all, and again where it is broken."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lf.data.cache import build_once, key_of

BUILD = """
import os, sys, time
from pathlib import Path
from lf.data.cache import build_once

folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def build(temporary):
    with log.open("a") as out:
        out.write("built\\n")
    (temporary / "a.bin").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(seconds)
    (temporary / "a.bin").write_bytes(b"whole")
    return {"pid": os.getpid()}

print(build_once(folder, build)["pid"], flush=True)
"""


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", BUILD, str(folder), str(folder.parent / "log"), str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


def fill(temporary: Path) -> dict[str, int]:
    (temporary / "a.bin").write_bytes(b"whole")
    return {"n": 1}


def test_unrelated_processes_build_once_together(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "key"
    folder.parent.mkdir()
    processes = [start(folder, 0.5) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0].split()[-1] for process in processes]
    assert len(set(answers)) == 1
    assert (folder.parent / "log").read_text() == "built\n"
    assert (folder / "a.bin").read_bytes() == b"whole"


def test_a_killed_build_is_started_anew_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    process = start(folder, 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    assert build_once(folder, fill) == {"n": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock", "log"]


FAULTS = ("no meta", "half a meta", "meta of another kind", "other facts", "short file", "other bytes", "no file")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_built_again(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "key"
    build_once(folder, fill)
    meta = folder / "meta.json"
    if fault == "no meta":
        meta.unlink()
    elif fault == "half a meta":
        meta.write_bytes(meta.read_bytes()[:10])
    elif fault == "meta of another kind":
        meta.write_text("[]")
    elif fault == "other facts":
        meta.write_text(meta.read_text().replace('"n": 1', '"n": "one"'))
    elif fault == "other bytes":
        (folder / "a.bin").write_bytes(b"whale")
    elif fault == "short file":
        (folder / "a.bin").write_bytes(b"who")
    else:
        (folder / "a.bin").unlink()
    assert build_once(folder, fill) == {"n": 1}
    assert (folder / "a.bin").read_bytes() == b"whole"
    assert build_once(folder, lambda _: pytest.fail("built twice")) == {"n": 1}


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(temporary: Path) -> dict[str, int]:
        (temporary / "a.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device, while the cache was built: .*key"):
        build_once(tmp_path / "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_the_first_of_two_hosts_wins(tmp_path: Path) -> None:
    folder = tmp_path / "key"

    def overtaken(temporary: Path) -> dict[str, int]:
        folder.mkdir()
        meta = {"facts": {"n": 2}, "files": {}, "sha256": key_of({"n": 2}, {})}
        (folder / "meta.json").write_text(json.dumps(meta))
        return fill(temporary)

    assert build_once(folder, overtaken) == {"n": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_keys_tell_values_apart() -> None:
    assert key_of("a", 1) == key_of("a", 1)
    assert len({key_of("a", 1), key_of("a", "1"), key_of(["a", 1]), key_of("a1")}) == 4
