"""A policy that answers from another process or machine: the client side of `lf.acting.server`."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from attrs.validators import and_, ge, gt, instance_of
from numpy.typing import NDArray

from lf.acting.policy import Observation, Policy
from lf.acting.wire import pack, unpack

SCHEMES = ("ws://", "wss://")
"""How the address of a server begins."""


@attrs.frozen(kw_only=True)
class _Facts:
    """What `lf.acting.server.metadata` says that a policy needs."""

    cameras: list[str] = attrs.field(validator=instance_of(list))
    state_dims: int = attrs.field(validator=and_(instance_of(int), ge(0)))
    action_dims: int = attrs.field(validator=and_(instance_of(int), ge(1)))
    horizon: int = attrs.field(validator=and_(instance_of(int), ge(1)))
    fps: float = attrs.field(validator=gt(0.0))
    execute: int = attrs.field(validator=and_(instance_of(int), ge(0)))


@contextlib.contextmanager
def remote_policy(url: str, *, timeout: float = 60.0) -> Iterator[Policy]:
    """Gives the policy of a server of lf at `ws://HOST:PORT`, until the block ends.

    `timeout` is in seconds, for the connection and for each answer. Observations are asked about one after the other.
    Raises ValueError for a server that does not say what its policy is, and for what it refuses to answer; OSError
    where it cannot be reached, or is gone.
    """
    try:
        import websockets
        from websockets.sync.client import connect
    except ImportError as error:
        raise ValueError(f"servers are asked by websockets, which is missing ({error}); install lf[serve]") from error
    if not url.startswith(SCHEMES):
        raise ValueError(f"{url} is no address of a policy server; give ws://HOST:PORT")
    try:
        socket = connect(url, compression=None, max_size=None, open_timeout=timeout)
    except websockets.exceptions.InvalidURI as error:
        raise ValueError(f"{url} is no address of a policy server ({error}); give ws://HOST:PORT") from error
    except (OSError, websockets.exceptions.WebSocketException) as error:
        raise ConnectionError(f"{url} cannot be reached ({error}); start scripts/serve.py there") from error
    with socket:
        facts = _facts(url, _received(url, socket, timeout))
        if facts.execute:
            raise ValueError(f"{url} answers with one action at a time; start it without --execute")
        yield Policy(
            cameras=tuple(map(str, facts.cameras)),
            state_dims=facts.state_dims,
            action_dims=facts.action_dims,
            horizon=facts.horizon,
            fps=float(facts.fps),
            act=functools.partial(_act, url, socket, timeout, (facts.horizon, facts.action_dims)),
        )


def _facts(url: str, message: Any) -> _Facts:
    names = [field.name for field in attrs.fields(_Facts)]
    try:
        return _Facts(**{name: message[name] for name in names})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{url} does not say what its policy is ({type(error).__name__}: {error!s:.200}); a server of lf says "
            f"{', '.join(names)}"
        ) from error


def _received(url: str, socket: Any, timeout: float) -> Any:
    import websockets

    try:
        answer = socket.recv(timeout=timeout)
    except TimeoutError as error:
        raise TimeoutError(f"{url} did not answer within {timeout:g} s; wait for it longer, or look there") from error
    except websockets.exceptions.ConnectionClosed as error:
        raise ConnectionError(f"{url} has closed the connection ({error}); look there") from error
    if isinstance(answer, str):
        raise ValueError(f"{url} refuses: {answer}")
    return unpack(answer)


def _act(
    url: str,
    socket: Any,
    timeout: float,
    shape: tuple[int, int],
    seen: Sequence[Observation],
    seeds: Sequence[int],
) -> list[NDArray[np.float32]]:
    import websockets

    chunks = []
    for one, seed in zip(seen, seeds, strict=True):
        try:
            socket.send(pack({**one.images, "state": one.state, "task": one.task, "seed": int(seed)}))
        except websockets.exceptions.ConnectionClosed as error:
            raise ConnectionError(f"{url} has closed the connection ({error}); look there") from error
        answer = _received(url, socket, timeout)
        actions = answer.get("actions") if isinstance(answer, dict) else None
        if not isinstance(actions, np.ndarray) or actions.shape != shape or actions.dtype.kind != "f":
            raise ValueError(f"{url} answers with something else than actions {list(shape)}; it is no server of lf")
        chunks.append(actions.astype(np.float32))
    return chunks
