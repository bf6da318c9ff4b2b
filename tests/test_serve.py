"""A served policy answers what it would answer at home, and lives through whatever clients send."""

import asyncio
import contextlib
import http.client
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import websockets
from numpy.typing import NDArray
from websockets.sync.client import ClientConnection, connect

from lf.acting.load import load_policy
from lf.acting.names import Names
from lf.acting.policy import Observation, Policy
from lf.acting.remote import remote_policy
from lf.acting.server import Serving, serve, serve_until
from lf.acting.wire import pack, unpack
from tests.test_policy import Trained, observation, trained

__all__ = ["trained"]

ROOT = Path(__file__).parents[1]
PICTURE = np.full((4, 6, 3), 7, np.uint8)
GOOD = {"observation/image": PICTURE, "observation/state": np.array([1.0, 2.0]), "prompt": "go"}


def answers(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
    """Chunks [3, 2] that say what was seen: seed and brightness, one more with each step."""
    chunks = []
    for one, seed in zip(seen, seeds, strict=True):
        light = sum(int(image[0, 0, 0]) for image in one.images.values())
        first = np.array([seed, light + one.state.sum()], np.float32)
        chunks.append(np.stack([first, first + 1, first + 2]))
    return chunks


POLICY = Policy(cameras=("base", "wrist"), state_dims=2, action_dims=2, horizon=3, fps=5.0, act=answers)
CFG = Serving(port=0, names=Names(cameras=("observation/image=base",)), seed=9)


@contextlib.contextmanager
def served(policy: Policy = POLICY, cfg: Serving = CFG) -> Iterator[int]:
    """Gives the port of a server in another thread."""
    ports: list[int] = []
    ready, loop, stopped = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    def note(port: int) -> None:
        ports.append(port)
        ready.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve_until(policy, cfg, stopped, note)))
    thread.start()
    try:
        assert ready.wait(20)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(20)
        assert not thread.is_alive()
        loop.close()


def client(port: int) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None)


def told(connection: ClientConnection, message: Any) -> str:
    """The refusal of a message."""
    connection.send(message)
    answer = connection.recv(timeout=10)
    assert isinstance(answer, str), unpack(answer)
    return answer


def asked(connection: ClientConnection, **changes: Any) -> dict[str, Any]:
    connection.send(pack({**GOOD, **changes}))
    answer = connection.recv(timeout=10)
    assert isinstance(answer, bytes), answer
    return dict(unpack(answer))


def health(port: int, path: str = "/healthz") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_client_is_told_the_policy_and_gets_chunks_with_times() -> None:
    with served() as port, client(port) as connection:
        first = unpack(connection.recv(timeout=10))
        assert first["cameras"] == ["base", "wrist"]
        assert (first["state_dims"], first["action_dims"], first["horizon"], first["fps"]) == (2, 2, 3, 5.0)
        assert first["keys"]["observation/image"] == "base"
        answer = asked(connection)
        assert answer["server_timing"].keys() == {"infer_ms"}
        assert answer["actions"].dtype == np.float32
        assert answer["actions"][:, 1].tolist() == [10, 11, 12]
        assert answer["actions"][0, 0] != asked(connection, prompt="stop")["actions"][0, 0]
        assert np.array_equal(answer["actions"], asked(connection)["actions"])
        assert asked(connection, seed=4)["actions"][0].tolist() == [4, 10]
        assert asked(connection)["server_timing"].keys() == {"infer_ms", "prev_total_ms"}


BAD = {
    "text": ("hello", "a text message came; send binary ones"),
    "no msgpack": (b"\xc1\xc1", "a message is no msgpack with numpy arrays"),
    "a missing key": (pack({key: GOOD[key] for key in ("observation/image", "prompt")}), "has no observation/state"),
    "a wrong shape": (pack({**GOOD, "observation/state": np.zeros(3)}), "the state has 3 dims"),
    "a wrong dtype": (pack({**GOOD, "observation/image": np.zeros((4, 4, 3))}), "send a picture, uint8"),
    "NaN": (pack({**GOOD, "observation/state": np.array([0, np.nan])}), "not all finite"),
    "an unknown camera": (pack({**GOOD, "observation/front": PICTURE}), "no key that this server knows"),
}


def test_what_cannot_be_answered_is_told_and_the_connection_lives_on() -> None:
    with served() as port, client(port) as connection:
        connection.recv(timeout=10)
        for message, words in BAD.values():
            assert words in told(connection, message)
            assert asked(connection)["actions"].shape == (3, 2)


def test_a_policy_that_raises_is_told_too() -> None:
    def act(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
        if seen[0].task == "fail":
            raise RuntimeError("a kernel broke")
        return answers(seen, seeds)

    with served(attrs.evolve(POLICY, act=act)) as port, client(port) as connection:
        connection.recv(timeout=10)
        assert told(connection, pack({**GOOD, "prompt": "fail"})) == "RuntimeError: a kernel broke"
        assert asked(connection)["actions"].shape == (3, 2)


def test_a_message_that_is_too_large_ends_its_connection_alone() -> None:
    with served(cfg=attrs.evolve(CFG, most_bytes=2000)) as port, client(port) as other:
        other.recv(timeout=10)
        with client(port) as connection:
            connection.recv(timeout=10)
            connection.send(b"\0" * 3000)
            with pytest.raises(websockets.exceptions.ConnectionClosedError, match="1009"):
                connection.recv(timeout=10)
        assert asked(other)["actions"].shape == (3, 2)


def test_several_clients_are_answered_at_once() -> None:
    def one(port: int, seed: int) -> list[float]:
        with client(port) as connection:
            connection.recv(timeout=10)
            return [float(asked(connection, seed=seed + i)["actions"][0, 0]) for i in range(5)]

    with served() as port, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: one(port, 100 * k), range(4)))
    assert found == [[100.0 * k + i for i in range(5)] for k in range(4)]


def test_an_answer_that_takes_too_long_is_an_error_and_later_ones_come() -> None:
    release = threading.Event()

    def act(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
        if seen[0].task == "wait":
            release.wait(10)
        return answers(seen, seeds)

    slow = attrs.evolve(CFG, timeout=0.2)
    with served(attrs.evolve(POLICY, act=act), slow) as port, client(port) as connection:
        connection.recv(timeout=10)
        assert told(connection, pack({**GOOD, "prompt": "wait"})).startswith("no answer within 0.2 s")
        release.set()
        assert asked(connection)["actions"].shape == (3, 2)


def test_single_actions_come_from_a_chunk_of_their_own_connection() -> None:
    with served(cfg=attrs.evolve(CFG, execute=2)) as port, client(port) as one, client(port) as other:
        for connection in (one, other):
            connection.recv(timeout=10)
        firsts = [asked(one, seed=seed)["actions"].tolist() for seed in (1, 2, 3, 4)]
        assert firsts == [[1, 10], [2, 11], [3, 10], [4, 11]]
        assert asked(other, seed=50)["actions"].tolist() == [50, 10]
        assert asked(one, seed=7)["actions"].tolist() == [7, 10]
        assert asked(one, seed=8, reset=True)["actions"].tolist() == [8, 10]


def test_health_is_told_and_browsers_are_not_served() -> None:
    with served() as port:
        assert health(port) == (200, b"OK\n")
        assert health(port, "/")[0] != 200
        with pytest.raises(websockets.exceptions.InvalidStatus, match="403"):
            connect(f"ws://127.0.0.1:{port}", origin=websockets.Origin("http://example.org"))
        with socket.create_connection(("127.0.0.1", port), 5) as raw:
            raw.sendall(b"\x00\x01 no http \r\n\r\n")
            raw.recv(1000)
        assert health(port) == (200, b"OK\n")


def test_nobody_is_served_before_the_policy_has_answered() -> None:
    asleep, release, seen_by = threading.Event(), threading.Event(), []

    def act(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
        asleep.set()
        release.wait(10)
        seen_by.append(seen[0].images.keys())
        return answers(seen, seeds)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def during() -> None:
        assert asleep.wait(10)
        with pytest.raises(ConnectionRefusedError):
            health(port)
        release.set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(during)
        with served(attrs.evolve(POLICY, act=act), attrs.evolve(CFG, port=port)):
            waiting.result()
            assert health(port) == (200, b"OK\n")
    assert seen_by == [{"base", "wrist"}]


def test_what_cannot_be_served_is_refused_at_the_start() -> None:
    def wrong(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
        return [np.zeros((1, 2), np.float32)]

    with pytest.raises(ValueError, match=r"the policy answers with \[1, 2\], and not \[3, 2\] as it says"):
        serve(attrs.evolve(POLICY, act=wrong), CFG, print)
    with pytest.raises(ValueError, match="execute = 4, and a chunk has 3 actions; take at most that many"):
        serve(POLICY, attrs.evolve(CFG, execute=4), print)
    with pytest.raises(ValueError, match="the cameras of the policy are base, wrist"):
        serve(POLICY, attrs.evolve(CFG, names=Names(cameras=("a=b",))), print)
    with served() as port, pytest.raises(OSError, match="address already in use"):
        serve(POLICY, attrs.evolve(CFG, port=port), print)


def test_a_policy_over_the_wire_is_the_policy() -> None:
    seen = [
        Observation(images={"base": PICTURE}, state=np.array([1, 2], np.float32), task="go"),
        Observation(images={"base": PICTURE, "wrist": PICTURE}, state=np.array([3, 4], np.float32), task="stop"),
    ]
    with served() as port, remote_policy(f"ws://127.0.0.1:{port}") as policy:
        facts = ("cameras", "state_dims", "action_dims", "horizon", "fps")
        assert [getattr(policy, name) for name in facts] == [getattr(POLICY, name) for name in facts]
        for one, other in zip(policy.act(seen, [3, 4]), answers(seen, [3, 4]), strict=True):
            assert np.array_equal(one, other)
        with pytest.raises(ValueError, match="refuses: the state has 1 dims"):
            policy.act([attrs.evolve(seen[0], state=np.zeros(1, np.float32))], [0])
    with pytest.raises(ConnectionError, match=r"has closed the connection|cannot be reached"):
        policy.act(seen, [3, 4])
    with pytest.raises(ConnectionError, match="cannot be reached"), remote_policy(f"ws://127.0.0.1:{port}"):
        pass
    with pytest.raises(ValueError, match="is no address of a policy server"), remote_policy("runs/robot"):
        pass
    single = attrs.evolve(CFG, execute=1)
    with served(cfg=single) as port, pytest.raises(ValueError, match="start it without --execute"):  # noqa: SIM117
        with remote_policy(f"ws://127.0.0.1:{port}"):
            pass


def script(*args: str) -> int:
    found = importlib.util.spec_from_file_location("serve_script", ROOT / "scripts/serve.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["serve_script"] = module
    found.loader.exec_module(module)
    return int(module.main(list(args)))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_script_serves_a_run_until_a_signal(
    trained: Trained, capfd: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    lines: list[str] = []
    chunks: list[NDArray[np.float32]] = []

    def drive() -> None:
        end = time.monotonic() + 30
        while not lines or "serving on" not in lines[-1]:
            assert time.monotonic() < end, lines
            time.sleep(0.01)
            lines.extend(capfd.readouterr().out.splitlines())
        try:
            with remote_policy(lines[-1].removeprefix("serving on ")) as policy:
                chunks.extend(policy.act([observation()], [5]))
        finally:
            os.kill(os.getpid(), number)

    home = load_policy(trained.folder)
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(drive)
        assert script(str(trained.folder), "--port", "0", "--device", "cpu") == code
        driven.result(timeout=30)
    assert np.array_equal(chunks[0], home.act([observation()], [5])[0])


def test_the_script_refuses_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert script(str(tmp_path), "--port", "0") == 1
    assert "error: " in capfd.readouterr().err


OPENPI = """
import sys
import numpy as np
from openpi_client import action_chunk_broker, websocket_client_policy

policy = websocket_client_policy.WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]))
assert policy.get_server_metadata()["cameras"] == ["base", "wrist"], policy.get_server_metadata()
good = {
    "observation/image": np.full((4, 6, 3), 7, np.uint8),
    "observation/state": np.array([1.0, 2.0]),
    "prompt": "go",
}
answer = policy.infer(good)
assert answer["actions"].tolist() == [[9, 10], [10, 11], [11, 12]], answer
assert answer["server_timing"]["infer_ms"] > 0
for bad in ({**good, "observation/state": np.zeros(3)}, {**good, "observation/state": np.array([np.nan, 0])}, {}):
    try:
        policy.infer(bad)
    except RuntimeError as error:
        print("refused:", str(error).splitlines()[-1])
    else:
        raise AssertionError(bad)
broker = action_chunk_broker.ActionChunkBroker(policy, action_horizon=3)
assert [broker.infer(good)["actions"].tolist() for _ in range(4)] == [[9, 10], [10, 11], [11, 12], [9, 10]]
print("numpy", np.__version__, "done")
"""


@pytest.mark.full
def test_openpi_s_own_client_drives_the_server(tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    # It imports typing_extensions, and does not say so.
    packages = ("openpi-client==0.1.2", "typing_extensions")
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.skip(f"openpi-client cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    with served() as port:
        command = [python, "-c", OPENPI, str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused:") == 3
    assert "numpy 1." in done.stdout
