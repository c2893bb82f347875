"""The rules of the house that no linter knows: sizes, layers, private torch names, what an import costs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memplan

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "memplan"
FILES = sorted(SRC.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

# What `from memplan import *` gives. Adding a name here is a promise to keep it.
PUBLIC = [
    "BudgetError",
    "Comparison",
    "Explanation",
    "Finding",
    "Fitted",
    "Heuristics",
    "MemplanError",
    "Plan",
    "Proof",
    "Quantized",
    "Replay",
    "Sweep",
    "Timeline",
    "Trace",
    "__version__",
    "check",
    "compare",
    "explain",
    "fit",
    "largest",
    "load_plan",
    "load_trace",
    "measure",
    "plan",
    "quantize",
    "record",
    "replay",
    "save_plan",
    "save_trace",
    "simulate",
    "spec",
    "sweep",
    "verify",
    "with_loss",
]

# Too slow to load for a command that only prints its help.
HEAVY = {"torch", "numpy", "scipy", "loky", "plotly", "networkx", "monai", "transformers"}

# A name with one leading underscore: dunders such as torch.__version__ are public.
PRIVATE_TORCH = re.compile(r"torch(\.\w+)*\._(?!_)\w")

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every torch attribute and import; texts and comments may mention any name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_the_public_names_are_these() -> None:
    assert sorted(memplan.__all__) == sorted(PUBLIC)
    assert [name for name in PUBLIC if not hasattr(memplan, name)] == []


@each_file
def test_a_file_stays_under_500_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 500


@each_file
def test_a_function_stays_under_60_lines(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines >= 60} == {}


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("torch._C._foo()", True),
        ("torch.utils._pytree.tree_map(f, x)", True),
        ("torch.Tensor._make_subclass", True),
        ("import torch._subclasses.fake_tensor", True),
        ("from torch import _C", True),
        ("from torch.utils._python_dispatch import TorchDispatchMode", True),
        ("from torch.utils import _pytree as pytree", True),
        ("torch.__version__", False),
        ("torch.nn.functional.relu(self._x)", False),
        ("from memplan import _torch", False),
        ("x = 'torch._C'  # torch._C", False),
    ],
)
def test_private_torch_names_are_recognised(code: str, private: bool) -> None:
    assert any(PRIVATE_TORCH.match(name) for _, name in torch_names(ast.parse(code))) is private


@each_file
def test_private_torch_names_live_in_one_room(path: Path) -> None:
    if SRC / "_torch" in path.parents:
        return
    names = torch_names(ast.parse(path.read_text(encoding="utf-8")))
    assert [(line, name) for line, name in names if PRIVATE_TORCH.match(name)] == []


@pytest.mark.parametrize("name", [module_name(path) for path in FILES if path.name != "__main__.py"])
def test_every_module_imports(name: str) -> None:
    importlib.import_module(name)


def test_arrows_point_down_only() -> None:
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed: pip install 'memplan[check]'")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import memplan",
        "import memplan.cli",
        "from memplan.cli import main\nsys.argv = ['memplan', '--help']\nmain()",
    ],
    ids=["import memplan", "import memplan.cli", "memplan --help"],
)
def test_help_and_imports_load_nothing_heavy(code: str) -> None:
    # --help leaves by SystemExit, so the modules are listed on the way out.
    listing = "import atexit, sys\natexit.register(lambda: print('loaded:', *sys.modules))\n"
    done = subprocess.run([sys.executable, "-c", listing + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("loaded:")[2].split())
    assert "memplan" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_tests_mirror_the_source(path: Path) -> None:
    """tests/room/test_x.py tests src/memplan/room/x.py; test_x_more.py may hold more of them."""
    room = path.parent.relative_to(ROOT / "tests")
    if room in (Path(), Path("goldens")):  # the package as a whole, and held against real recordings
        return
    subject = path.stem.removeprefix("test_")
    modules = {
        room.name,
        *(found.stem.strip("_") for found in (SRC / room).glob("*") if found.stem != "__init__"),
    }
    assert any(subject == module or subject.startswith(f"{module}_") for module in modules), sorted(modules)
