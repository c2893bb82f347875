"""What the README shows is what the code prints and what the benchmarks wrote."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("readme_tool", ROOT / "tools" / "readme.py")
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def test_tables_are_those_of_the_benchmarks() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    includes = re.findall(r"<!-- include: (.+?) -->\n(.*?)\n<!-- end -->", text, re.S)
    assert len(includes) == 4
    for path, shown in includes:
        assert shown == (ROOT / path).read_text(encoding="utf-8").strip()


def test_outputs_are_those_of_the_commands() -> None:
    if not torch.__version__.startswith("2.13") or torch.get_num_threads() != 2:
        pytest.skip("the README was made with torch 2.13 and 2 threads; others may save and pack other tensors")
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("the README was made with AVX-512: oneDNN's layouts are other ones here")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- run: .+? -->\n.*?<!-- end -->", text, re.S)
    assert len(blocks) == 4
    for block in blocks:
        assert tool.filled(block) == block
