"""The rules of the house that no linter knows: import cycles, private torch names, what an import costs, words.

Each rule is one test that names every offender at once.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx
import pytest
from source_files import FILES, ROOT, SRC, module_name

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

# Too slow to load for a command that only prints its help.
HEAVY = {"torch", "numpy", "scipy", "loky", "plotly", "networkx", "monai", "transformers"}

# A name with one leading underscore: dunders such as torch.__version__ are public.
PRIVATE_TORCH = re.compile(r"torch(\.\w+)*\._(?!_)\w")


def shown(path: Path) -> str:
    return str(path.relative_to(SRC))


def dotted(node: ast.expr) -> str:
    """`torch.nn.Linear`, and "?" for what is no name: unparsing each attribute takes as long as everything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every torch attribute and import; texts and comments may mention any name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


# Imports


def test_no_modules_import_each_other() -> None:
    """Also not by way of others, within functions, or only for their types."""
    found = grimp.build_graph("memplan", cache_dir=None)
    imports = nx.DiGraph(
        (name, other) for name in found.modules for other in found.find_modules_directly_imported_by(name)
    )
    assert imports.number_of_edges() > len(FILES)
    assert [sorted(group) for group in nx.strongly_connected_components(imports) if len(group) > 1] == []


def test_every_module_imports() -> None:
    for path in FILES:
        if path.name != "__main__.py":
            importlib.import_module(module_name(path))


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


# Private names of torch


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


def test_private_torch_names_live_in_one_room() -> None:
    assert [
        f"{shown(path)}:{line}: {name}"
        for path in FILES
        if SRC / "_torch" not in path.parents
        for line, name in torch_names(ast.parse(path.read_text(encoding="utf-8")))
        if PRIVATE_TORCH.match(name)
    ] == []


# Tests


def has_subject(path: Path) -> bool:
    """Whether tests/room/test_x.py, or test_x_more.py, has a src/memplan/room/x.py, or is of the room as a whole."""
    room = path.parent.relative_to(ROOT / "tests")
    if room in (Path(), Path("goldens")):  # the package as a whole, and predictions beside real recordings
        return True
    subject = path.stem.removeprefix("test_")
    modules = [room.name, *(found.stem.strip("_") for found in (SRC / room).glob("*") if found.stem != "__init__")]
    return any(subject == module or subject.startswith(f"{module}_") for module in modules)


def test_tests_mirror_the_source() -> None:
    assert [str(path.relative_to(ROOT / "tests")) for path in TESTS if not has_subject(path)] == []


def test_tests_import_from_no_test() -> None:
    """Its module would exist twice, and `benchmarks`, on the path for some tests, may have one of its name."""
    imports = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in TESTS
        for module in re.findall(r"^ *from (?:\S+\.)?(test_\w+) import", path.read_text(encoding="utf-8"), re.M)
    ]
    assert imports == []


# Words


def test_plain_words() -> None:
    """What style.md replaces: "depends on" for this one."""
    texts = [*FILES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        if path.name != "CHANGELOG.md"  # as it was written then
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\bhang(s|ing)? on\b", line)
    ]
    assert offenders == []
