"""Configs against their annotations: type checks, and JSON in both directions. `lf.config` is the way in.

In JSON every attrs value carries its class as `"_type": "module:Qualname"`, so a field annotated with a base class
keeps the class it holds, and a class defined in a config file is as good as one of lf.
"""

import collections.abc
import contextlib
import functools
import importlib
import json
import math
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn
from cattrs.preconf.json import make_converter


def children(value: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields path, value and annotation of each field of a config, or of each item of a tuple."""
    if attrs.has(type(value)):
        hints = _hints(type(value))
        for field in attrs.fields(type(value)):
            yield f"{at}.{field.name}".lstrip("."), getattr(value, field.name), hints.get(field.name, Any)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield f"{at}.{i}", item, Any


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise ValueError(
            f"{cls.__module__}:{cls.__qualname__}: {error} in an annotation; import it at the top of the file, "
            "outside `if TYPE_CHECKING`"
        ) from error


def check_types(cfg: Any) -> None:
    """Raises ValueError where a value is not what its field's annotation says, naming path, value, rule and cure."""
    problems = list(_misfits(cfg, type(cfg), ""))
    if problems:
        raise ValueError("\n".join(problems))


def refused_field(error: TypeError | ValueError) -> str | None:
    """Returns what is wrong with the value that a validator of attrs refused or could not compare, else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, field, value = (frame.f_locals.get(name) for name in ("inst", "attr", "value"))
        if isinstance(field, attrs.Attribute) and attrs.has(type(owner)):
            name, rule = f"{type(owner).__name__}.{field.name}", f"'{field.name}' must be "
            if str(error).startswith(rule) and str(error).endswith(f": {value}"):
                return f"{name} = {value} must be {str(error)[len(rule) : -len(str(value)) - 2]}; change it"
            return next(_misfits(value, _hints(type(owner)).get(field.name, Any), name), None)
    return None


def _misfits(value: Any, hint: Any, at: str) -> Iterator[str]:
    if not _fits(value, hint):
        yield f"{at} = {show(value)} must be {_spell(hint)}; {_cure(value, hint)}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{at} = {value} must be a finite number; give one"
    else:
        for path, child, child_hint in children(value, at):
            yield from _misfits(child, child_hint, path)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        return any(_fits(value, arg) for arg in args)
    if origin is typing.Annotated:
        return _fits(value, args[0])
    if origin is typing.Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is tuple and isinstance(value, tuple):
        each = args[:1] * len(value) if args[1:] == (...,) else args
        return len(value) == len(each) and all(map(_fits, value, each))
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    kind = origin or hint
    checkable = isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    return not checkable or isinstance(value, kind)


def _cure(value: Any, hint: Any) -> str:
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    if isinstance(value, type):
        return f"give a value of the class, {value.__name__}(...)"
    if isinstance(value, str) and {int, float, bool} & set(members):
        return "leave out the quotes"
    if isinstance(value, float) and value.is_integer() and int in members:
        return f"write {int(value)}"
    if isinstance(value, Path) and str in members:
        return f"write {str(value)!r}"
    if isinstance(value, (list, str)) and any(typing.get_origin(member) is tuple for member in members):
        return f"write the tuple {tuple(value) if isinstance(value, list) else (value,)!r}"
    return "give a value of that type"


def brief(value: Any) -> str:
    """Returns a value as text that is cut to one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def show(value: Any) -> str:
    """Returns a value and its type as errors print them, cut to one line."""
    return f"{brief(value)} ({type(value).__name__})"


def _spell(hint: Any) -> str:
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return hint.__qualname__ if hint.__module__ == "builtins" else f"{hint.__module__}.{hint.__qualname__}"
    return str(hint).replace("typing.", "")


def to_json(cfg: Any) -> str:
    """Returns the config as JSON; raises ValueError for a value that could not be read back."""
    try:
        return json.dumps(_converter(()).unstructure(cfg), indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the config cannot be saved as JSON: {error}") from error


def from_json(text: str, allow: Collection[str], source: str, kind: type) -> Any:
    """Returns the config that `to_json` wrote; `lf.config.from_json` says what may be in it, and what is raised."""
    try:
        return _converter(allow).structure(json.loads(text, parse_constant=_refuse_constant), kind)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}:{error.lineno}: not JSON: {error.msg}") from error
    except Exception as error:
        try:
            lines = cattrs.transform_error(error, format_exception=_explain)
        except RecursionError:
            lines = ["nested too deeply"]
        raise ValueError("\n".join(f"{source}: {line}" for line in lines)) from error


def reference(value: Any) -> str:
    """Returns "module:qualname" of a class or function; raises ValueError for what cannot be found by that name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or _lookup(module, name) is not value:
        raise ValueError(f"{value!r} has no importable name; define it by name at the top level of the config file")
    return f"{module}:{name}"


def _lookup(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules.get(module))
    except AttributeError:
        return None


def inside(module: str, packages: Collection[str]) -> bool:
    """Returns whether a module is one of the packages or below one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _resolve(tag: Any, packages: Collection[str], *, loaded: bool = False) -> Any:
    """Returns what a tag names. Outside `packages` nothing is imported, and nothing taken unless `loaded` says so."""
    module, _, name = tag.partition(":") if isinstance(tag, str) else ("", "", "")
    if inside(module, packages):
        importlib.import_module(module)
    elif not (loaded and module in sys.modules):
        raise ValueError(f"{tag!r} is neither in lf nor in the config file given; load the file that defines it first")
    value = _lookup(module, name)
    if value is None or reference(value) != tag:
        raise ValueError(f"{tag!r} does not exist; the code that it came from has changed")
    return value


def _converter(allow: Collection[str]) -> cattrs.Converter:
    c = make_converter(forbid_extra_keys=True)
    writer = functools.cache(functools.partial(make_dict_unstructure_fn, converter=c))
    reader = functools.cache(functools.partial(make_dict_structure_fn, converter=c))

    def to_object(value: Any) -> dict[str, Any]:
        cls: Any = type(value)
        return {"_type": reference(cls), **writer(cls)(value)}

    def from_object(value: Any, hint: Any) -> Any:
        if not isinstance(value, dict) or "_type" not in value:
            raise ValueError(f'{show(value)} must be an object with a "_type"')
        cls = _resolve(value["_type"], ("lf", *allow), loaded=hint is not object)
        kinds = typing.get_args(hint) if _is_union(hint) else (typing.get_origin(hint) or hint,)
        if not (attrs.has(cls) and issubclass(cls, tuple(kind for kind in kinds if isinstance(kind, type)))):
            raise ValueError(f"{value['_type']!r} is no {_spell(hint)}")
        return reader(cls)({key: v for key, v in value.items() if key != "_type"}, cls)

    def from_union(value: Any, hint: Any) -> Any:
        members = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        if value is None and types.NoneType in typing.get_args(hint):
            return None
        if len(members) == 1:
            return c.structure(value, members[0])
        if isinstance(value, dict) and any(map(_is_config, members)):
            return from_object(value, hint)
        for member in members:
            with contextlib.suppress(Exception):
                return c.structure(value, member)
        raise ValueError(f"{show(value)} must be {_spell(hint)}")

    def tuple_reader(hint: Any) -> Callable[[Any, Any], Any]:
        args = typing.get_args(hint)
        exact = c.gen_structure_hetero_tuple(hint) if args[1:] != (...,) else None

        def from_list(value: Any, _: Any) -> Any:
            if not isinstance(value, list):
                raise ValueError(f"{show(value)} must be a list")
            return exact(value, hint) if exact else tuple(c.structure(value, list[args[0]]))  # type: ignore[valid-type]

        return from_list

    for kind in (int, float, bool, str):
        c.register_structure_hook(kind, _from_scalar)
    c.register_structure_hook_func(_is_union, from_union)
    c.register_structure_hook_factory(_is_tuple, tuple_reader)
    c.register_unstructure_hook_func(_is_callable, reference)
    c.register_structure_hook_func(_is_callable, lambda v, _: _resolve(v, ("lf", "torch.nn", "torch._C._nn", *allow)))
    c.register_unstructure_hook_func(_is_dtype, lambda v: str(v).removeprefix("torch."))
    c.register_structure_hook_func(_is_dtype, _from_dtype)
    c.register_unstructure_hook_func(_is_config, to_object)
    c.register_structure_hook_func(lambda hint: hint is object or _is_config(hint), from_object)
    return c


def _is_config(hint: Any) -> bool:
    return attrs.has(typing.get_origin(hint) or hint)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _is_callable(hint: Any) -> bool:
    kinds = (collections.abc.Callable, types.FunctionType, types.BuiltinFunctionType)
    return (typing.get_origin(hint) or hint) in kinds


def _is_dtype(hint: Any) -> bool:
    return getattr(hint, "__module__", "") == "torch" and getattr(hint, "__name__", "") == "dtype"


def _from_scalar(value: Any, hint: Any) -> Any:
    if not _fits(value, hint):
        raise ValueError(f"{show(value)} must be {_spell(hint)}")
    return hint(value)


def _from_dtype(name: Any, _: Any) -> Any:
    import torch  # only for a config that holds a dtype

    value = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(value, torch.dtype):
        raise ValueError(f"{show(name)} must be the name of a torch dtype")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON; give a finite one")


def _explain(error: BaseException, hint: Any) -> str:
    if isinstance(error, (ValueError, TypeError, ImportError, RecursionError)) and error.args:
        return str(error.args[0])
    return cattrs.v.format_exception(error, hint)
