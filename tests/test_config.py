"""Config files: loading, flags, differences, types, JSON and the command line of a launch."""

import ast
import collections.abc
import enum
import functools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import lf
from lf import config, launch
from lf.models.spec import ModelConfig

ROOT = Path(__file__).parents[1]

USER_FILE = '''
"""A whole experiment in one file: family, optimiser and data source."""
import attrs
from attrs.validators import ge
import lf
from lf.data.config import DataConfig
from lf.models import spec
from lf.train.config import OptimConfig

@attrs.frozen(kw_only=True)
class MyModel(spec.ModelConfig):
    """One matrix."""
    width: int = attrs.field(default=8, validator=ge(1))
    """Columns of the matrix."""

@spec.paths.register
def _(cfg: MyModel) -> tuple[spec.Path, ...]:
    return ("torch", "megatron")

@attrs.frozen(kw_only=True)
class MyOptim(OptimConfig):
    """Something like Lion."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates."""

@attrs.frozen(kw_only=True)
class MyData(DataConfig):
    """Random rows."""
    rows: int = 16
    """Rows."""

cfg = lf.Run(model=MyModel(), optim=MyOptim(lr=1e-2), data=MyData(), steps=4)
small = attrs.evolve(cfg, steps=2)
'''
FILES = {"plain_cfg": USER_FILE, "future_cfg": "from __future__ import annotations\n" + USER_FILE}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[None]:
    """Undoes what loading does to sys.path and sys.modules, and makes tyro's boxes wide."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if isinstance(getattr(sys.modules[name], "__loader__", None), config._SourceLoader):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "my_cfg") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def simple(**changes: Any) -> lf.Run:
    return attrs.evolve(lf.Run(data=lf.TextData(paths=("a",))), **changes)


# Loading


def test_load_takes_any_name(tmp_path: Path) -> None:
    path = write(tmp_path, USER_FILE)
    assert config.load(path).steps == 4
    assert config.load(str(path), "small").steps == 2
    assert config.load(path) == attrs.evolve(config.load(path, "small"), steps=4)


@pytest.mark.parametrize(
    ("text", "name", "parts"),
    [
        ("import lf\ncfg = lf.Run(\n", "cfg", ("my_cfg.py:2: SyntaxError", "never closed")),
        ("def f(:\n", "cfg", ("my_cfg.py:1: SyntaxError",)),
        ("import attrs\n\n\nraise KeyError('x y')\n", "cfg", ("my_cfg.py:4: KeyError: 'x y'",)),
        ("def f():\n    return 1 / 0\n\nf()\n", "cfg", ("my_cfg.py:2: ZeroDivisionError: division by zero",)),
        ("import sys\nsys.exit(3)\n", "cfg", ("my_cfg.py:2: SystemExit: 3",)),
        ("import lf\ncfg = lf.Rum()\n", "cfg", ("my_cfg.py:2: AttributeError", "'Rum'", "Run")),
        ("import lf\ncfg = lf.Sgd(lr=-1.0)\n", "cfg", ("my_cfg.py:2: Sgd.lr = -1.0 must be > 0.0; change it",)),
        (
            "import lf\n\ncfg = lf.Sgd(\n    lr='3e-4',\n)\n",
            "cfg",
            ("my_cfg.py:3: Sgd.lr = '3e-4' (str) must be float; leave out the quotes",),
        ),
        ("import lf\ncfg = lf.Eval(every=None)\n", "cfg", ("my_cfg.py:2: Eval.every = None (NoneType) must be int",)),
        ("import lf\ncfg = lf.TextData(paths=3)\n", "cfg", ("TextData.paths = 3 (int) must be tuple[str, ...]",)),
        ("import lf\n\nlen(3)\n", "cfg", ("my_cfg.py:3: TypeError: object of type 'int' has no len()",)),
        ("import lf\na = lf.Sgd()\n_b = a\n", "cfg", ("no config called cfg", "configs in it: a (Sgd)")),
        ("", "cfg", ("no config called cfg", "configs in it: none")),
        ("import lf\ncfg = lf.Sgd()\n", "smal", ("no config called smal", "cfg (Sgd)")),
        ("cfg = {'steps': 3}\n", "cfg", ("cfg = {'steps': 3} (dict) is no config", "lf.Run(...)")),
        ("import lf\ncfg = lf.Run\n", "cfg", ("cfg is a class", "cfg = Run(...)")),
        ("x = '\0'\n", "cfg", ("my_cfg.py", "null bytes")),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, text: str, name: str, parts: tuple[str, ...]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"my_cfg\.py") as caught:
        config.load(path, name)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gone.py", "no such file"),
        ("cfg.yaml", "a Python file (.py) or the config.json"),
        ("wave.py", "`import wave` already means a standard module"),
        ("conftest.py", "`import conftest` already means another module"),
        ("cattrs.py", "`import cattrs` already means"),
        ("qwen3-0.6b.py", "no dot before .py"),
        ("run", "config.json"),
    ],
)
def test_a_path_that_cannot_be_a_config_is_refused(
    tmp_path: Path, name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "conftest", types.ModuleType("conftest"))
    if name == "run":
        write(tmp_path / "run", "")
        (tmp_path / "run/config.json").write_text("{}")
    elif name != "gone.py":
        (tmp_path / name).write_text("import lf\ncfg = lf.Sgd()\n")
    with pytest.raises(ValueError, match=r"\S") as caught:
        config.load(tmp_path / name)
    assert part in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_decay_rates_of_one_or_more_are_refused() -> None:
    with pytest.raises(ValueError, match=r"betas = \(0\.9, 2\.0\) must be at least 0 and below 1; change 2\.0"):
        lf.AdamW(betas=(0.9, 2.0))


def test_a_copy_of_a_file_that_is_on_the_path_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write(tmp_path / "here", USER_FILE, "twin_cfg")
    copy = write(tmp_path / "run", USER_FILE, "twin_cfg")
    monkeypatch.syspath_prepend(original.parent)
    assert config.load(copy) == config.load(original)
    assert original in config.loaded_files()
    assert copy not in config.loaded_files()


def test_a_failed_load_leaves_the_module_that_worked(tmp_path: Path) -> None:
    path = write(tmp_path, USER_FILE)
    good = config.load(path)
    path.write_text("1 / 0\n")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        config.load(path)
    assert pickle.loads(pickle.dumps(good)) == good


def test_a_file_edited_within_a_second_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "import lf\ncfg = lf.Sgd(lr=0.1)\n")
    os.utime(path, (1e9, 1e9))
    assert config.load(path).lr == 0.1
    path.write_text("import lf\ncfg = lf.Sgd(lr=0.2)\n")
    os.utime(path, (1e9, 1e9))
    assert config.load(path).lr == 0.2
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "RATE = 0.25\n", "rates_for_test")
    assert config.load(write(tmp_path, "import lf, rates_for_test as r\ncfg = lf.Sgd(lr=r.RATE)\n")).lr == 0.25


def test_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    first = config.load(write(tmp_path / "a", USER_FILE))
    second = config.load(
        write(
            tmp_path / "b",
            USER_FILE.replace("width: int = attrs.field(default=8", "width: int = attrs.field(default=9"),
        )
    )
    assert (first.model.width, second.model.width) == (8, 9)
    spec = sys.modules["my_cfg"].__spec__
    assert spec is not None
    assert spec.origin == str(tmp_path / "b/my_cfg.py")
    found = config.importlib.machinery.PathFinder.find_spec("my_cfg")
    assert found is not None
    assert found.origin == spec.origin, "a spawned worker would import the other file"


# A user's own classes


def describe(cfg: lf.Run) -> tuple[Any, ...]:
    from lf.models import spec

    assert cfg.model is not None
    return type(cfg.model).__module__, spec.paths(cfg.model), cfg.optim, cfg.data, config.to_json(cfg)


def test_classes_of_a_config_file_pickle_into_spawned_workers(tmp_path: Path) -> None:
    cfgs = [config.load(write(tmp_path, text, name)) for name, text in FILES.items()]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.map(describe, cfgs)
    for cfg, name, seen in zip(cfgs, FILES, there, strict=True):
        assert seen == (name, ("torch", "megatron"), cfg.optim, cfg.data, config.to_json(cfg))


FRESH = """
import json, sys
from pathlib import Path
from lf import config
for path in sys.argv[1:]:
    cfg = config.load(path)
    assert config.to_json(cfg) == Path(path).read_text()
    config.check_round_trip(cfg)
    print(type(cfg.model).__module__, type(cfg.optim).__name__, cfg.data.rows, cfg.optim.lr)
"""


def test_a_saved_run_loads_in_a_fresh_process(tmp_path: Path) -> None:
    saved = []
    for name, text in FILES.items():
        cfg = config.override(config.load(write(tmp_path, text, name)), ["--data.rows", "5"], "x")
        folder = tmp_path / "runs" / name
        write(folder, text, name)
        (folder / "config.json").write_text(config.to_json(cfg))
        saved.append(str(folder / "config.json"))
    done = subprocess.run([sys.executable, "-c", FRESH, *saved], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} MyOptim 5 0.01" for name in FILES]


def test_a_saved_run_without_its_config_file_says_what_is_missing(tmp_path: Path) -> None:
    cfg = config.load(write(tmp_path, USER_FILE))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(config.to_json(cfg))
    del sys.modules["my_cfg"]
    with pytest.raises(ValueError, match=r"run/config\.json: 'my_cfg:MyModel' is neither in lf nor"):
        config.load(tmp_path / "run/config.json")
    with pytest.raises(ValueError, match="leave out :small"):
        config.load(tmp_path / "run/config.json", "small")


def test_a_saved_run_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(config.to_json(simple()).replace('"a"', '"\xe9"').encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json: byte \d+, 0xe9, is not UTF-8 .* take a whole copy"):
        config.load(file)


def test_a_saved_run_of_lf_classes_runs_no_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "raise RuntimeError\n", "config_copy")
    (tmp_path / "config.json").write_text(config.to_json(simple()))
    assert config.load(tmp_path / "config.json") == simple()


def test_a_saved_run_finds_classes_that_its_config_file_imports(tmp_path: Path) -> None:
    write(tmp_path, USER_FILE, "robots_for_test")
    path = write(tmp_path / "run", "from robots_for_test import cfg\n")
    sys.path.append(str(tmp_path))
    try:
        cfg = config.load(path)
        (tmp_path / "run/config.json").write_text(config.to_json(cfg))
        assert '"robots_for_test:MyModel"' in config.to_json(cfg)
        assert config.load(tmp_path / "run/config.json") == cfg
        config.check_round_trip(cfg)
    finally:
        del sys.modules["robots_for_test"]


# Command line


def test_override_changes_leaves_only(tmp_path: Path) -> None:
    base = config.load(write(tmp_path, USER_FILE))
    args = [
        "--model.width",
        "3",
        "--optim.betas",
        "0.5",
        "0.6",
        "--parallel.no-overlap",
        "--log.wandb",
        "p",
        "--save.export_every=2",
    ]
    cfg = config.override(base, args, "x")
    assert [(path, new) for path, _, new in config.diff(base, cfg)] == [
        ("model.width", 3),
        ("optim.betas", (0.5, 0.6)),
        ("parallel.overlap", False),
        ("log.wandb", "p"),
        ("save.export_every", 2),
    ]
    assert type(cfg.model) is type(base.model)


def test_override_reaches_the_parts_of_a_mixture() -> None:
    parts = tuple(lf.Weighted(data=lf.TextData(paths=(p,))) for p in ("a", "b"))
    cfg = config.override(simple(data=lf.Mixture(parts=parts)), ["--data.parts.1.data.paths", "c", "d"], "x")
    assert list(config.diff(simple(data=lf.Mixture(parts=parts)), cfg)) == [
        ("data.parts.1.data.paths", ("b",), ("c", "d"))
    ]


def test_help_shows_this_config_and_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = config.load(write(tmp_path, USER_FILE))
    with pytest.raises(SystemExit) as caught:
        config.override(base, ["--help"], "train.py --cfg my_cfg.py")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for text in ("train.py --cfg my_cfg.py", "--model.width INT", "(default: 8)", "Columns of the matrix", "0.01"):
        assert text in shown
    assert "attrs" not in shown, "a class without docstring"


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("--optim.lrr 3", "--optim.lr FLOAT"),
        ("--step 3", "--steps INT"),
        ("--steps 1e4", "invalid literal for int"),
        ("--steps 0", "'steps' must be >= 1: 0"),
        ("--parallel.recompute half", "'none', 'full'"),
        ("--log.wandb", "Missing value"),
        ("spare", "Unrecognized options: spare"),
        ("--data.paths", "Length of 'paths'"),
        ("--model None", "--model"),
    ],
)
def test_bad_usage_is_explained_and_exits_with_2(args: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config.override(simple(), args.split(), "train.py")
    shown = capsys.readouterr()
    assert (caught.value.code, shown.out) == (2, "")
    assert part in shown.err


def test_a_flag_below_a_part_that_is_none_says_why() -> None:
    with pytest.raises(ValueError, match=r"--eval\.data\.paths: eval\.data is None .* set it in Python"):
        config.override(simple(), ["--eval.data.paths", "x"], "train.py")


@attrs.frozen(kw_only=True)
class Strict:
    """A class whose validator raises TypeError."""

    size: float = attrs.field(default=1.5, validator=attrs.validators.not_(attrs.validators.instance_of(int)))
    """Size."""
    kind: Any = attrs.field(default="x", validator=attrs.validators.instance_of(str))
    """Kind."""

    def __attrs_post_init__(self) -> None:
        if self.size > 2:
            raise TypeError("too large")


def test_a_flag_that_is_no_finite_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"^optim\.lr = inf must be a finite number"):
        config.override(simple(), ["--optim.lr", "inf"], "train.py")


def test_a_type_error_of_a_config_class_is_no_traceback() -> None:
    with pytest.raises(ValueError, match=r"train\.py: too large"):
        config.override(Strict(), ["--size", "3"], "train.py")


# Differences


def test_diff_names_leaves_and_takes_other_classes_whole() -> None:
    old = simple(optim=lf.AdamW(schedule=lf.Cosine(final=0.1)))
    new = simple(optim=lf.AdamW(schedule=lf.Cosine(final=0.2), betas=(0.9, 0.8)), data=lf.TextData(paths=("b", "c")))
    assert list(config.diff(old, new)) == [
        ("data.paths", ("a",), ("b", "c")),
        ("optim.schedule.final", 0.1, 0.2),
        ("optim.betas", (0.9, 0.95), (0.9, 0.8)),
    ]
    other = attrs.evolve(old, optim=lf.Sgd())
    assert list(config.diff(old, other)) == [("optim", old.optim, other.optim)]
    longer = lf.Mixture(parts=(lf.Weighted(data=old.data),) * 2)
    shorter = lf.Mixture(parts=(lf.Weighted(data=old.data),))
    assert list(config.diff(longer, shorter)) == [("parts", longer.parts, shorter.parts)]
    assert not list(config.diff(old, old))


def test_resume_changes_are_sorted_by_the_fields_of_run() -> None:
    old = simple(seed=1)
    new = simple(seed=2, steps=5, parallel=lf.TorchParallel(), save=lf.Save(keep=3), optim=lf.AdamW(lr=0.1), batch=2)
    allowed, refused = config.resume_changes(old, new)
    assert [path for path, _, _ in allowed] == ["parallel", "steps", "save.keep"]
    assert [path for path, _, _ in refused] == ["batch", "optim.lr", "seed"]
    assert config.resume_changes(old, old) == ([], [])
    assert config.resume_changes(old, lf.Sgd()) == ([], [("", old, lf.Sgd())])


def test_the_fields_that_a_resume_may_change_are_those_documented() -> None:
    may = {field.name for field in attrs.fields(lf.Run) if field.metadata.get("resume")}
    assert may == {"steps", "parallel", "balance", "eval", "log", "save", "profile"}


# Types


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"init": 3}, ("init = 3 (int) must be str", "give a value of that type")),
        ({"optim": lf.Save()}, ("optim = Save(", "must be lf.train.config.OptimConfig")),
        ({"optim": lf.AdamW}, ("optim = ", "AdamW(...)")),
        ({"model": lf.Sgd()}, ("model = Sgd(", "lf.models.spec.ModelConfig | None")),
        ({"steps": True}, ("steps = True (bool) must be int",)),
        ({"steps": 10.0}, ("steps = 10.0 (float) must be int; write 10",)),
        ({"log": lf.Log(tensorboard="yes")}, ("log.tensorboard = 'yes' (str) must be bool",)),
        ({"optim": lf.AdamW(betas=("0.9", 0.9))}, ("optim.betas", "tuple[float, float]")),
        ({"optim": lf.AdamW(betas=(0.9,))}, ("optim.betas = (0.9,) (tuple)",)),
        ({"optim": lf.AdamW(betas=[0.9, 0.8])}, ("write the tuple (0.9, 0.8)",)),
        ({"optim": lf.AdamW(betas=(0.9, float("nan")))}, ("optim.betas.1 = nan must be a finite number",)),
        ({"optim": lf.Sgd(lr=float("inf"))}, ("optim.lr = inf must be a finite number",)),
        ({"data": lf.TextData(paths="corpus")}, ("data.paths = 'corpus' (str)", "write the tuple ('corpus',)")),
        ({"tokenizer": lf.HfTokenizer(path=Path("x"))}, ("tokenizer.path", "write 'x'")),
        ({"precision": lf.Precision(params="float8")}, ("precision.params", "Literal['float32', 'bfloat16']")),
        (
            {"data": lf.Mixture(parts=(lf.Weighted(data=lf.TextData(paths=("a",), field=7)),))},
            ("data.parts.0.data.field = 7 (int) must be str",),
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        config.check_types(simple(**changes))
    for part in parts:
        assert part in str(caught.value)


def test_quotes_around_a_number_are_named() -> None:
    with pytest.raises(ValueError, match=r"gap = '7' \(str\) must be int \| None; leave out the quotes"):
        config.check_types(Odd(gap="7"))  # type: ignore[arg-type]


def test_every_wrong_value_is_listed() -> None:
    with pytest.raises(ValueError, match=r"(?s)init = 3.*\nseed = True"):
        config.check_types(simple(init=3, seed=True))


def test_an_annotation_that_is_not_there_at_run_time_is_named(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nimport attrs\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from pathlib import Path\n"
        "@attrs.frozen\nclass A:\n    x: Path\ncfg = A('x')\n"
    )
    cfg = config.load(write(tmp_path, text))
    with pytest.raises(ValueError, match=r"my_cfg:A: name 'Path' is not defined .* outside `if TYPE_CHECKING`"):
        config.check_types(cfg)


# JSON


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def double(x: float) -> float:
    return 2 * x


class Reads(typing.Protocol):
    def read(self) -> str: ...


@attrs.frozen(kw_only=True)
class Odd(ModelConfig):
    """Every kind of field that JSON has to carry."""

    act: collections.abc.Callable[[torch.Tensor], torch.Tensor] = F.silu
    maybe: collections.abc.Callable[..., Any] | None = None
    dtype: torch.dtype = torch.bfloat16
    path: Path = Path("a") / "b"
    colour: Colour = Colour.BLUE
    names: frozenset[str] = frozenset({"x"})
    gap: int | None = None
    either: int | tuple[int, ...] | str = 3
    nested: tuple[tuple[int, int], ...] = ((1, 2), (3, 4))
    window: tuple[int, int] | None = None
    optim: lf.AdamW | lf.Sgd | None = None
    parts: tuple[lf.AdamW | lf.Sgd, ...] = ()
    inner: ModelConfig | None = None
    rate: float = 1
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    source: Reads | None = None


@pytest.mark.parametrize(
    "cfg",
    [
        Odd(),
        Odd(act=F.gelu, maybe=F.relu, dtype=torch.int8, path=Path("/x"), colour=Colour.RED, names=frozenset()),
        Odd(gap=3, either=(1, 2), nested=(), window=(1, 2), rate=1e-9, kind="b", flag=True),
        Odd(either="3", optim=lf.Sgd(), parts=(lf.Sgd(momentum=0.5), lf.AdamW()), inner=Odd(inner=Odd())),
        Odd(optim=lf.AdamW(schedule=lf.Wsd(decay=3)), parts=(lf.AdamW(betas=(0.1, 0.2)),)),
    ],
)
def test_every_kind_of_value_survives_json(cfg: Odd) -> None:
    back = config.from_json(config.to_json(cfg), allow=[__name__])
    assert back == cfg
    assert hash(back) == hash(cfg)
    config.check_round_trip(cfg, allow=[__name__])
    config.check_types(back)


quick = settings(deadline=None, derandomize=True, phases=[Phase.generate])
numbers = st.floats(1e-9, 1e9, allow_nan=False)
counts = st.integers(1, 2**62)
unit = st.floats(0.0, 1.0)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
schedules = st.one_of(
    st.builds(lf.Constant, warmup=counts),
    st.builds(lf.Cosine, warmup=counts, final=unit),
    st.builds(lf.Linear, final=unit),
    st.builds(lf.Wsd, decay=counts, final=unit),
)
optims = st.one_of(
    st.builds(lf.AdamW, lr=numbers, schedule=schedules, betas=st.tuples(unit, unit), eps=numbers, clip=numbers),
    st.builds(lf.Sgd, lr=numbers, schedule=schedules, momentum=numbers),
)
text_data = st.builds(
    lf.TextData,
    paths=st.lists(texts, min_size=1, max_size=3).map(tuple),
    exclude=st.lists(texts, max_size=2).map(tuple),
    field=texts,
    seq_len=st.integers(2, 2**40),
    part=st.sampled_from(["all", "train", "held_out"]),
    cross_documents=st.booleans(),
)
weighted = st.builds(lf.Weighted, data=text_data, weight=numbers)
data = st.one_of(text_data, st.builds(lf.Mixture, parts=st.lists(weighted, min_size=1, max_size=3).map(tuple)))
parallels = st.one_of(
    st.builds(
        lf.TorchParallel, micro_batch=counts, strategy=st.sampled_from(["ddp", "fsdp", "hsdp"]), compile=st.booleans()
    ),
    st.builds(lf.MegatronParallel, tp=counts, pp=counts, overlap=st.booleans()),
)
tokenizers = st.one_of(st.none(), st.builds(lf.HfTokenizer, path=texts), st.builds(lf.TrainedBpe))
runs = st.builds(
    lf.Run,
    model=st.sampled_from([None, Odd(gap=3, rate=1.0)]),
    init=texts,
    tokenizer=tokenizers,
    data=data,
    batch=counts,
    optim=optims,
    parallel=parallels,
    steps=counts,
    seed=counts,
    eval=st.builds(lf.Eval, data=st.one_of(st.none(), text_data), every=counts),
    log=st.builds(lf.Log, wandb=texts, tensorboard=st.booleans()),
)


@settings(quick, max_examples=25)
@given(runs)
def test_any_run_survives_json(run: lf.Run) -> None:
    config.check_types(run)
    back = config.from_json(config.to_json(run))
    assert back == run
    assert not list(config.diff(run, back))
    assert config.to_json(back) == config.to_json(run)


@settings(quick, max_examples=5)
@given(runs, runs)
def test_no_flags_change_nothing_and_changes_are_those_of_diff(run: lf.Run, other: lf.Run) -> None:
    assert config.override(run, [], "x") == run
    assert bool(list(config.diff(run, other))) == (run != other)
    allowed, refused = config.resume_changes(run, other)
    assert sorted(map(repr, allowed + refused)) == sorted(map(repr, config.diff(run, other)))


@pytest.mark.parametrize(
    ("cfg", "part"),
    [
        (Odd(act=lambda x: x), "top level of the config file"),
        (Odd(maybe=torch.nn.Linear(1, 1).forward), "no importable name"),
        (Odd(rate=float("nan")), "not JSON compliant"),
        (Odd(source=object()), "not JSON serializable"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_read_back_is_not_written(cfg: Odd, part: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be saved as JSON: .*{part}"):
        config.to_json(cfg)


def test_a_class_inside_a_function_is_not_written() -> None:
    @attrs.frozen
    class Local:
        """Not to be found by name."""

    with pytest.raises(ValueError, match=r"Local'> has no importable name; define it .* top level"):
        config.to_json(Local())


def test_a_function_of_the_config_file_is_read_back(tmp_path: Path) -> None:
    text = (
        "import attrs\nfrom collections.abc import Callable\nfrom lf.models.spec import ModelConfig\n"
        "def f(x: float) -> float:\n    return x\n"
        "@attrs.frozen\nclass A(ModelConfig):\n    f: Callable[[float], float]\ncfg = A(f)\n"
    )
    cfg = config.load(write(tmp_path, text))
    assert config.from_json(config.to_json(cfg)) == cfg
    (tmp_path / "config.json").write_text(config.to_json(cfg))
    assert config.load(tmp_path / "config.json") == cfg


def test_a_round_trip_that_loses_something_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"gap = .*Sgd.*\(Sgd\) comes back from JSON as \{.*annotate the field"):
        config.check_round_trip(Loose(gap=lf.Sgd()), allow=[__name__])
    with pytest.raises(ValueError, match=r"double' is neither in lf nor in the config file"):
        config.check_round_trip(simple(model=Odd(maybe=double)))
    config.check_round_trip(Odd(maybe=double), allow=[__name__])


@attrs.frozen(kw_only=True)
class Loose(ModelConfig):
    """A field that says nothing."""

    gap: Any = None


def changed(path: str, value: Any) -> str:
    tree = json.loads(config.to_json(simple(model=Odd(), optim=lf.AdamW())))
    *heads, last = path.split(".")
    part = tree
    for head in heads:
        part = part[int(head)] if isinstance(part, list) else part[head]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("steps", "7", "'7' (str) must be int @ $.steps"),
        ("steps", 1.7, "1.7 (float) must be int @ $.steps"),
        ("steps", True, "True (bool) must be int @ $.steps"),
        ("steps", 0, "'steps' must be >= 1: 0 @ $"),
        ("optim.lr", "1", "'1' (str) must be float @ $.optim.lr"),
        ("optim.schedule.warmup", None, "None (NoneType) must be int @ $.optim.schedule.warmup"),
        ("optim.betas", [0.1], "@ $.optim.betas"),
        ("optim.betas", [0.1, 0.2, 0.3], "@ $.optim.betas"),
        ("optim.betas", [0.1, "x"], "'x' (str) must be float @ $.optim.betas[1]"),
        ("data.paths", "abc", "'abc' (str) must be a list @ $.data.paths"),
        ("data.paths", ["a", 3], "3 (int) must be str @ $.data.paths[1]"),
        ("data.part", "some", "@ $.data.part"),
        ("data", ..., "required field missing @ $.data"),
        ("data", {"paths": ["a"]}, 'must be an object with a "_type" @ $.data'),
        ("stepz", 3, "extra fields found (stepz) @ $"),
        ("optim.lrr", 3, "extra fields found (lrr) @ $.optim"),
        ("model.either", [1, "x"], "must be int | tuple[int, ...] | str @ $.model.either"),
        ("model.dtype", "float7", "'float7' (str) must be the name of a torch dtype @ $.model.dtype"),
        ("model.act", "os:system", "'os:system' is neither in lf"),
        ("model.act", "lf.config:importlib.import_module", "does not exist"),
        ("model.act", "torch.nn.functional:torch.load", "@ $.model.act"),
        ("optim._type", "subprocess:Popen", "'subprocess:Popen' is no lf.train.config.OptimConfig @ $.optim"),
        ("optim._type", "lf.train.config:Save", "'lf.train.config:Save' is no lf.train.config.OptimConfig"),
        ("optim._type", "lf.train.config:Nadam", "'lf.train.config:Nadam' does not exist"),
        ("optim._type", "lf.nowhere:AdamW", "No module named 'lf.nowhere' @ $.optim"),
        ("optim._type", "this.antigravity:X", "is neither in lf nor in the config file given"),
        ("optim._type", "lf.train.config:attrs.frozen", "@ $.optim"),
        ("optim._type", 3, "3 is neither in lf"),
        ("_type", "tests.test_config:Odd", "'tests.test_config:Odd' is neither in lf"),
        ("_type", ..., 'must be an object with a "_type" @ $'),
    ],
)
def test_wrong_json_names_its_path(path: str, value: Any, part: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        config.from_json(changed(path, value), source="run/config.json")
    message = str(caught.value)
    assert message.startswith("run/config.json: ")
    assert part in message


def test_wrong_json_lists_every_problem() -> None:
    text = changed("steps", "7").replace('"every": 10', '"every": "10"')
    with pytest.raises(ValueError, match=r"\$\.steps\nx: '10' .* @ \$\.log\.every$"):
        config.from_json(text, source="x")


def mixture(inner: Any) -> dict[str, Any]:
    part = {"_type": "lf.data.config:Weighted", "data": inner, "weight": 1.0}
    return {"_type": "lf.data.config:Mixture", "parts": [part]}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"_type": "x",\n,}', "x:2: not JSON"),
        ("", "x:1: not JSON"),
        ("[" * 100_000, "recursion"),
        ('{"_type": ' + "9" * 5000 + "}", "4300 digits"),
        (changed("data", functools.reduce(lambda inner, _: mixture(inner), range(300), {})), "x: "),
        ("[]", 'must be an object with a "_type"'),
        (changed("optim.lr", float("nan")), "NaN is not a number in JSON"),
    ],
)
def test_text_that_is_no_config_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=r"^x") as caught:
        config.from_json(text, source="x")
    assert part in str(caught.value)


def test_the_whole_config_may_be_of_a_loaded_class_of_the_kind_asked_for() -> None:
    text = config.to_json(Odd(gap=3))
    assert config.from_json(text, kind=ModelConfig) == Odd(gap=3)
    with pytest.raises(ValueError, match=r"x: 'tests.test_config:Odd' is no lf.train.config.Run @ \$"):
        config.from_json(text, source="x", kind=lf.Run)


def test_reading_imports_nothing_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, USER_FILE.replace('"""A whole', 'raise RuntimeError\n"""A whole'), "evil_for_test")
    sys.path.append(str(tmp_path))
    text = changed("optim._type", "evil_for_test:MyOptim")
    with pytest.raises(ValueError, match="neither in lf"):
        config.from_json(text)
    assert "evil_for_test" not in sys.modules


# Launch


def test_parse_gives_flags_base_and_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, USER_FILE)
    flags, base, cfg = launch.parse(["--steps", "9", "--cfg", "my_cfg.py", "--device", "cpu", "--model.width", "2"])
    assert flags == launch.Launch(cfg="my_cfg.py", out="runs/my_cfg", device="cpu")
    assert (base.steps, cfg.steps) == (4, 9)
    assert [path for path, _, _ in config.diff(base, cfg)] == ["model.width", "steps"]
    flags, _, cfg = launch.parse(["--cfg", "my_cfg.py:small", "--out=here"])
    assert (flags.out, cfg.steps) == ("here", 2)
    assert launch.parse(["--cfg", "my_cfg.py:small"])[0].out == "runs/my_cfg_small"


def test_a_saved_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "run", USER_FILE)
    cfg = config.load(path)
    (tmp_path / "run/config.json").write_text(config.to_json(cfg))
    flags, base, again = launch.parse(["--cfg", str(tmp_path / "run/config.json"), "--steps", "8"])
    assert flags.out == str(tmp_path / "run")
    assert config.to_json(base) == config.to_json(cfg)
    assert again.steps == 8


def test_init_on_the_command_line_brings_its_own_model(tmp_path: Path) -> None:
    path = write(tmp_path, USER_FILE.replace("steps=4", "steps=4, tokenizer=lf.TrainedBpe(), init='kept'"))
    _, base, cfg = launch.parse(["--cfg", str(path), "--init", "folder"])
    assert (cfg.init, cfg.model, cfg.tokenizer) == ("folder", None, None)
    assert [path for path, _, _ in config.diff(base, cfg)] == ["model", "init", "tokenizer"]
    for same in (["--init", "kept"], ["--init", ""], []):
        _, base, cfg = launch.parse(["--cfg", str(path), *same])
        assert (cfg.model, cfg.tokenizer) == (base.model, base.tokenizer)
        assert cfg.model is not None
    with pytest.raises(ValueError, match=r"--model\.width changes 8 to 3, but --init folder brings its own"):
        launch.parse(["--cfg", str(path), "--init", "folder", "--model.width", "3"])


@pytest.mark.parametrize(
    ("text", "args", "part"),
    [
        ("import lf\ncfg = lf.Sgd()\n", [], "my_cfg.py is a Sgd; training takes a Run"),
        (USER_FILE.replace("steps=4", "init=4"), [], "my_cfg.py: init = 4 (int) must be str"),
        (USER_FILE.replace("MyOptim(lr=1e-2)", "MyData()"), [], "my_cfg.py: optim = MyData(rows=16) (MyData) must be"),
        (USER_FILE.replace("(0.9, 0.99)", "(0.9, 1e999)"), [], "optim.betas.1 = inf must be a finite number"),
        (USER_FILE, ["--optim.betas", "0.9", "nan"], "optim.betas.1 = nan must be a finite number"),
        (USER_FILE, ["--devise", "cpu"], "--devise is no flag; perhaps you meant --device"),
        (USER_FILE, ["--outt=x"], "--outt is no flag; perhaps you meant --out"),
    ],
)
def test_parse_refuses_a_config_that_cannot_train(tmp_path: Path, text: str, args: list[str], part: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        launch.parse(["--cfg", str(write(tmp_path, text)), *args])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (["--help"], 0, "--cfg STR"),
        (["-h", "--steps", "3"], 0, "--device STR"),
        (["--steps", "3"], 2, "--cfg"),
        (["--cfg", "FILE", "--help"], 0, "--model.width INT"),
        (["--help", "--cfg=FILE"], 0, "--out and --device"),
        (["--cfg", "FILE", "--stepz", "3"], 2, "--steps INT"),
        (["--cfg"], 2, "--cfg"),
    ],
)
def test_help_and_usage_of_a_launch(
    tmp_path: Path, args: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, USER_FILE))
    with pytest.raises(SystemExit) as caught:
        launch.parse([arg.replace("FILE", path) for arg in args])
    shown = capsys.readouterr()
    assert caught.value.code == code
    assert part in (shown.err if code else shown.out)
    with pytest.raises(SystemExit) as caught:
        launch.parse([arg.replace("FILE", path) for arg in args], quiet=True)
    assert caught.value.code == code
    assert capsys.readouterr() == ("", "")


def test_launch_flags_and_fields_of_a_run_have_different_names() -> None:
    assert not {f.name for f in attrs.fields(launch.Launch)} & {f.name for f in attrs.fields(lf.Run)}


# What --help can show


def undocumented(file: Path) -> collections.abc.Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        if not any("attrs.frozen" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        if not ast.get_docstring(node):
            yield f"{file.name}:{node.lineno} {node.name}"
        for item, below in zip(node.body, [*node.body[1:], None], strict=True):
            text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if not isinstance(item, ast.AnnAssign) or ast.unparse(item.target).startswith("_"):
                continue
            if not (text and isinstance(below.value.value, str)):
                yield f"{file.name}:{item.lineno} {node.name}.{ast.unparse(item.target)}"


def test_every_config_class_and_field_is_documented(tmp_path: Path) -> None:
    files = sorted((ROOT / "lf").rglob("*.py"))
    assert len(files) > 10
    assert [line for file in files for line in undocumented(file)] == []
    bad = write(tmp_path, "import attrs\n@attrs.frozen\nclass A:\n    x: int\n    y: int = 3\n    '''Unit.'''\n")
    assert [line.split(" ")[1] for line in undocumented(bad)] == ["A", "A.x"]
