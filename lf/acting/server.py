"""A policy over websocket, in the message format of openpi's clients.

A connection gets a map first, the metadata; then each binary message is an observation, and each binary answer a map
with `actions` ([H, a], in the robot's units) and `server_timing` (milliseconds). What cannot be answered is told as a
text message, which openpi's client raises, and the connection lives on. `GET /healthz` says that the server is up.

Shapes: H steps of an action chunk, a dims of an action.
"""

import asyncio
import concurrent.futures
import functools
import hashlib
import http
import signal
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from attrs.validators import and_, ge, gt, le
from numpy.typing import NDArray

from lf.acting.names import Names, Request, camera_keys, read_request
from lf.acting.policy import Observation, Policy, fingerprint
from lf.acting.wire import pack, unpack

PATH = "/healthz"
"""Where the server says that it is up."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that only this machine reaches."""


@attrs.frozen(kw_only=True)
class Serving:
    """How a policy is served."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine reaches the default one. There is no login: who reaches it may ask."""
    port: int = attrs.field(default=8000, validator=and_(ge(0), le(65535)))
    """Port to listen on; 0 takes a free one."""
    names: Names = Names()
    """What the keys of messages mean."""
    execute: int = attrs.field(default=0, validator=ge(0))
    """0 answers with whole chunks. N answers with one action [a] at a time, and asks the policy again after N of them,
    for a new connection and for a message with `reset`."""
    seed: int = attrs.field(default=0, validator=ge(0))
    """What the noise of messages without a seed is drawn from, together with what they show."""
    timeout: float = attrs.field(default=30.0, validator=gt(0.0))
    """Seconds that an answer may take, those of waiting for other clients included."""
    most_bytes: int = attrs.field(default=32_000_000, validator=ge(1))
    """Bytes of a message, beyond which its connection is closed."""


def _websockets() -> Any:
    try:
        import websockets.asyncio.server
    except ImportError as error:
        raise ValueError(f"policies are served by websockets, which is missing ({error}); install lf[serve]") from error
    return websockets


@attrs.frozen(kw_only=True, eq=False)
class _Server:
    policy: Policy
    cfg: Serving
    keys: dict[str, str]
    pool: concurrent.futures.ThreadPoolExecutor
    """One thread: a device has one queue, and answers come in the order of the questions."""


def serve(policy: Policy, cfg: Serving, say: Callable[[str], None]) -> int:
    """Serves a policy until SIGTERM or Ctrl-C, and returns that signal's number. `say` is told where it listens.

    Raises ValueError where `cfg` does not fit the policy, or its first answer is no good; OSError where the address
    cannot be had.
    """
    return asyncio.run(_until_signal(policy, cfg, say))


async def _until_signal(policy: Policy, cfg: Serving, say: Callable[[str], None]) -> int:
    loop, stopped, caught = asyncio.get_running_loop(), asyncio.Event(), []

    def stop(number: int) -> None:
        caught.append(number)
        stopped.set()

    def ready(port: int) -> None:
        say(f"serving on ws://{cfg.host}:{port}")
        if cfg.host not in LOOPBACK:
            say(f"{cfg.host} is no loopback address: whoever reaches it may ask this policy")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await serve_until(policy, cfg, stopped, ready)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return int(caught[0])


async def serve_until(policy: Policy, cfg: Serving, stopped: asyncio.Event, ready: Callable[[int], None]) -> None:
    """Serves a policy until the event is set. `ready` gets the port, once the policy has answered for the first time.

    Raises as `serve` does.
    """
    websockets = _websockets()
    if cfg.execute > policy.horizon:
        raise ValueError(f"execute = {cfg.execute}, and a chunk has {policy.horizon} actions; take at most that many")
    keys = camera_keys(cfg.names, policy)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = _Server(policy=policy, cfg=cfg, keys=keys, pool=pool)
        waiting = asyncio.ensure_future(asyncio.wrap_future(pool.submit(_warm_up, policy)))
        ending = asyncio.ensure_future(stopped.wait())
        await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return
        waiting.result()
        async with websockets.asyncio.server.serve(
            functools.partial(_talk, server),
            cfg.host,
            cfg.port,
            # Pages in a browser name their origin, and have no business with a robot.
            origins=[None],
            process_request=_health,
            max_size=cfg.most_bytes,
            compression=None,
        ) as opened:
            ready(opened.sockets[0].getsockname()[1])
            await ending


def _warm_up(policy: Policy) -> None:
    blank = Observation(
        images={name: np.zeros((16, 16, 3), np.uint8) for name in policy.cameras},
        state=np.zeros(policy.state_dims, np.float32),
        task="warm up",
    )
    (chunk,) = policy.act([blank], [0])
    if chunk.shape != (policy.horizon, policy.action_dims):
        raise ValueError(
            f"the policy answers with {list(chunk.shape)}, and not [{policy.horizon}, {policy.action_dims}] as it says"
        )


def _health(connection: Any, request: Any) -> Any:
    return connection.respond(http.HTTPStatus.OK, "OK\n") if request.path == PATH else None


def metadata(policy: Policy, cfg: Serving) -> dict[str, Any]:
    """Returns what a connection is told first: the facts of the policy, and which keys messages may have."""
    return {
        "cameras": list(policy.cameras),
        "state_dims": policy.state_dims,
        "action_dims": policy.action_dims,
        "horizon": policy.horizon,
        "fps": policy.fps,
        "execute": cfg.execute,
        "keys": camera_keys(cfg.names, policy),
    }


@attrs.define
class _Chunk:
    """What is left of the last chunk of a connection."""

    actions: list[NDArray[np.float32]] = attrs.field(factory=list)


async def _talk(server: _Server, connection: Any) -> None:
    closed = _websockets().exceptions.ConnectionClosed
    kept, total = _Chunk(), 0.0
    try:
        await connection.send(pack(metadata(server.policy, server.cfg)))
        async for message in connection:
            start = time.perf_counter()
            try:
                answer = await asyncio.wait_for(_answer(server, kept, message), server.cfg.timeout)
                timing = {"infer_ms": (time.perf_counter() - start) * 1000}
                if total:
                    timing["prev_total_ms"] = total
                await connection.send(pack({**answer, "server_timing": timing}))
            except TimeoutError:
                await connection.send(f"no answer within {server.cfg.timeout:g} s; ask less often, or raise --timeout")
            except closed:
                raise
            except Exception as error:
                # Whatever one client makes go wrong is told to that client; the others are served on.
                await connection.send(
                    str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                )
            total = (time.perf_counter() - start) * 1000
    except closed:
        return


async def _answer(server: _Server, kept: _Chunk, message: bytes | str) -> dict[str, Any]:
    if isinstance(message, str):
        raise ValueError("a text message came; send binary ones, msgpack with numpy arrays")
    loop, cfg = asyncio.get_running_loop(), server.cfg
    ask = await loop.run_in_executor(None, _read, server, message)
    if cfg.execute and kept.actions and not ask.reset:
        return {"actions": kept.actions.pop(0)}
    kept.actions.clear()
    start = time.perf_counter()
    chunk = await loop.run_in_executor(server.pool, _ask, server, ask)
    timing = {"policy_timing": {"infer_ms": (time.perf_counter() - start) * 1000}}
    if not cfg.execute:
        return {"actions": chunk, **timing}
    first, *rest = chunk[: cfg.execute]
    kept.actions.extend(rest)
    return {"actions": first, **timing}


def _read(server: _Server, message: bytes) -> Request:
    return read_request(server.cfg.names, server.keys, server.policy.state_dims, unpack(message))


def _ask(server: _Server, ask: Request) -> NDArray[np.float32]:
    seed = _seed(server.cfg.seed, ask.seen) if ask.seed is None else ask.seed
    (chunk,) = server.policy.act([ask.seen], [seed])
    return chunk


def _seed(seed: int, seen: Observation) -> int:
    """Returns the seed of a message without one: equal questions get equal answers, others noise of their own."""
    digest = hashlib.sha256(f"{seed}:{fingerprint(seen)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
