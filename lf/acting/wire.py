"""Messages between robots and policy servers as bytes: msgpack with numpy arrays, as `openpi-client` packs them.

An array is a map with the binary keys `__ndarray__` (true), `data` (its bytes, C order), `dtype` (numpy's `dtype.str`)
and `shape`; a numpy scalar one with `__npgeneric__`, `data` (a plain number) and `dtype`. The facts are those of
`openpi_client/msgpack_numpy.py` (openpi-client 0.1.2). Nothing is ever unpickled: only numbers, booleans and text have
a form on the wire.
"""

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_DTYPE = re.compile(r"[<>=|]?(?:[biuf][1248]|f16|U[1-9][0-9]{0,5})")
_MOST_DIMS = 32


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise ValueError(f"messages are read by msgpack, which is missing ({error}); install lf[serve]") from error
    return msgpack


def pack(value: Any) -> bytes:
    """Returns a value of maps, lists, plain values and numpy arrays as bytes.

    Raises ValueError for what has no form on the wire: arrays of objects or records, complex numbers, other types.
    """
    try:
        return bytes(_msgpack().packb(value, default=_packed))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a message cannot be packed ({error}); give numbers, text, arrays, lists and maps") from error


def _packed(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) and _DTYPE.fullmatch(value.dtype.str) is None:
        raise ValueError(f"an array of dtype {value.dtype} has no form on the wire; give numbers, booleans or text")
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} has no form on the wire")


def unpack(data: bytes) -> Any:
    """Returns the value of a message; arrays are read-only. Raises ValueError for bytes that are none."""
    try:
        return _msgpack().unpackb(data, object_hook=_unpacked)
    except ValueError as error:  # msgpack's own errors are such
        raise ValueError(
            f"a message is no msgpack with numpy arrays ({_told(error)}); send what openpi-client sends"
        ) from (error)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _unpacked(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return _array(found)
    if b"__npgeneric__" in found:
        return _scalar(found)
    return found


def _dtype(found: Mapping[Any, Any]) -> np.dtype[Any]:
    name = found.get(b"dtype")
    if not isinstance(name, str) or _DTYPE.fullmatch(name) is None:
        raise ValueError(f"an array has dtype {name!r:.40}, and only numbers, booleans and text are taken")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise ValueError(f"an array has dtype {name!r}, which numpy does not know") from error


def _array(found: Mapping[Any, Any]) -> Any:
    dtype, data, shape = _dtype(found), found.get(b"data"), found.get(b"shape")
    if not isinstance(data, bytes):
        raise ValueError(f"the data of an array is {type(data).__name__}, and must be bytes")
    whole = (
        isinstance(shape, list) and len(shape) <= _MOST_DIMS and all(type(n) is int and 0 <= n < 2**31 for n in shape)
    )
    if not whole or not isinstance(shape, list) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of {dtype.str} and shape {shape!r:.80} does not fit its {len(data)} bytes")
    if dtype.kind == "U":
        codes = np.frombuffer(data, np.dtype("u4").newbyteorder(dtype.byteorder))
        if codes.size and int(codes.max()) > sys.maxunicode:
            raise ValueError(f"an array of {dtype.str} has the code {int(codes.max())}, which is no character")
    return np.ndarray(shape, dtype, data)


def _scalar(found: Mapping[Any, Any]) -> Any:
    dtype, value = _dtype(found), found.get(b"data")
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"a scalar is {type(value).__name__}, and must be a number or text")
    try:
        return dtype.type(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a scalar of {dtype.str} cannot be {value!r:.40} ({error})") from error
