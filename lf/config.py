"""Config files: loading, command-line overrides, differences, type checks and JSON. Knows no model.

A config is a frozen attrs value that a Python file defines, by the name `cfg` or any other.
"""

import importlib.machinery
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import tyro

from lf import config_json
from lf.config_json import brief as brief
from lf.config_json import check_types as check_types
from lf.config_json import children, inside, refused_field, show
from lf.config_json import to_json as to_json

T = TypeVar("T")

Change = tuple[str, Any, Any]
"""A difference between two configs: dotted path, old value, new value."""


def load(path: str | Path, name: str = "cfg") -> Any:
    """Returns the config `name` of a Python file, or the config that a run saved as `config.json`.

    A Python file becomes the module called like the file, which spawned workers can import too, so the classes in it
    pickle. A saved config is read after the copy of the config file beside it is executed, if its classes come from
    there: load no run that you do not trust. Raises ValueError, in one line, for what is wrong with the file.
    """
    path = Path(path)
    if path.is_dir() and (path / "config.json").is_file():
        raise ValueError(f"{path} is a folder; for the config saved in it, give {path / 'config.json'}")
    if path.suffix not in (".py", ".json"):
        raise ValueError(f"{path}: a config is a Python file (.py) or the config.json of a run; give one of these")
    if not path.is_file():
        raise ValueError(f"{path}: no such file; check the path of the config")
    return _load_saved(path, name) if path.suffix == ".json" else _load_python(path, name)


def load_function(spec: str) -> Callable[..., Any]:
    """Returns the function that `FILE.py:NAME` names; the file is executed as a config file is.

    Raises ValueError, in one line, for what is wrong with the file or the name.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"{spec!r} must be FILE.py:NAME, an existing Python file and a function in it")
    function: Callable[..., Any] | None = vars(_execute(Path(path))).get(name)
    if not callable(function):
        raise ValueError(f"{path} has no function {name}; {spec!r} must name one that is in the file")
    return function


def load_classes(file: str | Path) -> None:
    """Executes a Python file as a config file is, so that `from_json` knows the classes in it.

    Raises ValueError, in one line, for what is wrong with the file.
    """
    file = Path(file)
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{str(file)!r} must be an existing Python file (.py)")
    _execute(file)


def code_of(text: str, folder: Path) -> list[Path]:
    """Returns the Python files of a folder that may define the classes of a config saved as the JSON `text`."""
    foreign = {module for module in re.findall(r'"([\w.-]+):[\w.]+"', text) if not inside(module, ("lf",))}
    files = sorted(folder.glob("*.py"))
    return [file for file in files if file.stem in foreign] or (files if foreign and len(files) == 1 else [])


def _load_python(path: Path, name: str) -> Any:
    values = vars(_execute(path))
    configs = {key: v for key, v in values.items() if attrs.has(type(v)) and not key.startswith("_")}
    if name in configs:
        return configs[name]
    if isinstance(values.get(name), type):
        raise ValueError(
            f"{path}: {name} is a class; a config is a value, so write {name} = {values[name].__name__}(...)"
        )
    if name in values:
        raise ValueError(f"{path}: {name} = {show(values[name])} is no config; write {name} = lf.Run(...)")
    known = ", ".join(f"{key} ({type(v).__name__})" for key, v in configs.items()) or "none"
    raise ValueError(f"{path} has no config called {name}; configs in it: {known}")


def _load_saved(path: Path, name: str) -> Any:
    if name != "cfg":
        raise ValueError(f"{path} holds one config, which has no name; leave out :{name}")
    text = read_text(path)
    for file in code_of(text, path.parent):
        _execute(file)
    return from_json(text, source=str(path))


def read_text(path: Path) -> str:
    """Returns the text of a saved config; raises ValueError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start + 1}, 0x{error.object[error.start]:02x}, is not UTF-8 ({error.reason}); the "
            "file is damaged or was saved in another encoding, so take a whole copy of it"
        ) from error


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the source itself: a bytecode cache mistakes two edits of equal size within a second for one."""

    source = b""

    def get_code(self, fullname: str) -> types.CodeType:
        self.source = self.get_data(self.path)
        code: types.CodeType = self.source_to_code(self.source, self.path)
        return code


def _is_config_file(module: types.ModuleType) -> bool:
    return isinstance(vars(module).get("__loader__"), _SourceLoader)


def loaded_files() -> tuple[Path, ...]:
    """Returns the config files that this process has executed."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    return tuple(Path(vars(module)["__loader__"].path) for module in modules if _is_config_file(module))


def _execute(path: Path) -> types.ModuleType:
    """Returns the module of a config file; a file that was executed before and has not changed is not run again."""
    file, name = _original(path), path.stem
    old = sys.modules.get(name)
    loader = getattr(old, "__loader__", None)
    ours = loader if isinstance(loader, _SourceLoader) else None
    if old and ours and ours.path == str(file) and ours.source == file.read_bytes():
        return old
    _make_importable(path, file, replaces=ours is not None)
    new = _SourceLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=new)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the code runs, which looks its own annotations up here
    try:
        new.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        if old is not None:
            sys.modules[name] = old
        raise ValueError(_failure(path, error)) from error
    return module


def _original(path: Path) -> Path:
    """Returns the file that `import NAME` finds already if it is the same as this one, which may be a run's copy."""
    importlib.invalidate_caches()
    spec = importlib.machinery.PathFinder.find_spec(path.stem)
    found = Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else path
    return (found if found.read_bytes() == path.read_bytes() else path).resolve()


def _make_importable(path: Path, file: Path, *, replaces: bool) -> None:
    """Makes `import NAME` find the file, here and in spawned workers, without hiding any other module."""
    name = path.stem
    if "." in name:
        raise ValueError(f"{path}: the file is imported as a module, so its name has no dot before .py; rename it")
    importlib.invalidate_caches()
    spec = importlib.machinery.PathFinder.find_spec(name)
    found = Path(spec.origin).resolve() if spec and spec.origin else None
    standard = name in sys.stdlib_module_names
    if standard or (found != file and not replaces and (found or name in sys.modules)):
        owner = "a standard module" if standard else found or "another module"
        raise ValueError(f"{path}: `import {name}` already means {owner}; rename the config file")
    if found == file:
        return
    before = [i for i, entry in enumerate(sys.path) if found and Path(entry).resolve() == found.parent]
    sys.path.insert(before[0] if before else len(sys.path), str(file.parent))


def _failure(path: Path, error: BaseException) -> str:
    file = str(path.resolve())
    if isinstance(error, SyntaxError):
        place = path if error.filename in (None, file) else error.filename
        return f"{place}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"{path}:{lines[-1]}" if lines else str(path)
    misfit = refused_field(error) if isinstance(error, (TypeError, ValueError)) else None
    if misfit is not None:
        return f"{place}: {misfit}"
    return f"{place}: {type(error).__name__}: {' '.join(str(error).split())}"


def override(cfg: T, args: Sequence[str], prog: str, *, description: str | None = None) -> T:
    """Returns the config with the leaf values that flags such as `--optim.lr 3e-4` give.

    `--help` prints the flags of this very config with its values and exits with 0; a wrong flag or value is explained
    on stderr and exits with 2. Raises ValueError for a value that is not what its field takes, infinity among them.
    """
    for path in _empty(cfg):
        for arg in args:
            if arg.replace("-", "_").startswith(f"__{path}."):
                raise ValueError(f"{arg}: {path} is None in this config; flags change values only, so set it in Python")
    try:
        changed: T = tyro.cli(
            type(cfg),
            default=cfg,
            args=list(args),
            prog=prog,
            description=description,
            config=(tyro.conf.AvoidSubcommands,),
        )
    except TypeError as error:  # tyro explains ValueError only, and some validators of attrs raise this
        raise ValueError(f"{prog}: {error.args[0] if error.args else error}") from error
    check_types(changed)
    return changed


def _empty(value: Any, at: str = "") -> Iterator[str]:
    for path, child, _ in children(value, at):
        if child is None:
            yield path
        yield from _empty(child, path)


def diff(old: Any, new: Any, at: str = "") -> Iterator[Change]:
    """Yields (path, old, new) of each leaf that differs; a part whose class differs is a leaf."""
    if attrs.has(type(new)) and type(old) is type(new):
        for field in attrs.fields(type(new)):
            yield from diff(getattr(old, field.name), getattr(new, field.name), f"{at}.{field.name}".lstrip("."))
    elif _has_parts(old) and _has_parts(new) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from diff(a, b, f"{at}.{i}")
    elif old != new:
        yield at, old, new


def _has_parts(value: Any) -> bool:
    return isinstance(value, tuple) and any(attrs.has(type(item)) for item in value)


def resume_changes(old: Any, new: Any) -> tuple[list[Change], list[Change]]:
    """Returns the differences that a resume may make, then those that it may not.

    A top field that a resume may change has the metadata `{"resume": True}`.
    """
    if type(old) is not type(new):
        return [], [("", old, new)]
    allowed: list[Change] = []
    refused: list[Change] = []
    for field in attrs.fields(type(new)):
        changes = diff(getattr(old, field.name), getattr(new, field.name), field.name)
        (allowed if field.metadata.get("resume") else refused).extend(changes)
    return allowed, refused


def from_json(text: str, allow: Collection[str] = (), source: str = "the saved config", kind: type = object) -> Any:
    """Returns the config that `to_json` wrote; classes and functions come from lf, loaded config files and `allow`.

    `allow` names more modules (or packages) to import from; nothing else is imported. A class may also be in any module
    that is loaded, if it is a subclass of what its field is annotated with (of `kind` for the whole config); a function
    also in `torch.nn`. Raises ValueError with `source` and a line for each JSON path that is wrong.
    """
    loaded = [name for name, m in list(sys.modules.items()) if isinstance(m, types.ModuleType) and _is_config_file(m)]
    return config_json.from_json(text, [*allow, *loaded], source, kind)


def check_round_trip(cfg: Any, allow: Collection[str] = ()) -> None:
    """Raises ValueError unless the config is equal after a trip through JSON; `allow` is that of `from_json`."""
    back = from_json(to_json(cfg), allow)
    for path, old, new in diff(cfg, back):
        raise ValueError(
            f"{path} = {show(old)} comes back from JSON as {show(new)}; annotate the field with the type that it holds"
        )
