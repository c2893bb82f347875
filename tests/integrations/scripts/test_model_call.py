"""The first training call of a model, seen while a script runs as under python."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from memplan import _torch, spec
from memplan.integrations.scripts.model_call import CallWatch, ModelCall

LOOP = """
for _ in range(2):
    net(torch.zeros(4, 8)).sum().backward()
    opt.step()
"""


def call_of(folder: Path, text: str, **files: str) -> ModelCall | None:
    """Write a script and other files beside it, run it, and return the call that was kept."""
    for name, other in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(other), encoding="utf-8")
    path = folder / "train.py"
    path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text), encoding="utf-8")
    watch, depth, made = CallWatch(str(folder), lambda: 0), [0], torch.optim.Optimizer.__init__

    def moved(by: int) -> Any:
        def move(*given: Any) -> None:
            depth[0] += by

        return move

    def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        made(optimizer, *args, **kwargs)
        watch.optimizer_created(optimizer)

    handles = [
        hooks.register_module_forward_pre_hook(moved(1)), hooks.register_module_forward_hook(moved(-1)),
        register_optimizer_step_post_hook(lambda optimizer, *_: watch.update_ended(optimizer)),
    ]  # fmt: skip
    try:
        with watch.watching(lambda: not depth[0]), _torch.patched(torch.optim.Optimizer, __init__=noted):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        for handle in handles:
            handle.remove()
    return watch.call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_plain_loop(folder: Path) -> None:
    call = call_of(folder, "net = nn.Linear(8, 2)\nopt = torch.optim.SGD(\n    net.parameters(), lr=1,\n)" + LOOP)
    assert call is not None
    assert (call.inputs, call.kwargs, call.autocast) == ((spec("4x8"),), {}, None)
    assert (call.optimizer, call.options["lr"]) == (torch.optim.SGD, 1)
    assert (call.name, call.line, call.before) == ("net", "train.py:6", False)  # the statement's last line


def test_inference_before_and_models_without_weights_are_passed_over(folder: Path) -> None:
    text = """
        net, loss = nn.Linear(8, 2), nn.MSELoss()
        loss(torch.zeros(2), torch.zeros(2))
        with torch.no_grad():
            net(torch.zeros(1, 8))
        net.eval()(torch.zeros(2, 8))
        net.train()(torch.zeros(3, 8))
        """
    call = call_of(folder, text)
    assert call is not None
    assert call.inputs == (spec("3x8"),)
    assert call.optimizer is None


def test_autocast_is_that_of_the_first_layer(folder: Path) -> None:
    text = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(8, 2)
            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.layer(x)
        net = Net()
        net(x=torch.zeros(4, 8))
        """
    call = call_of(folder, text)
    assert call is not None
    assert (call.autocast, call.kwargs) == (torch.bfloat16, {"x": spec("4x8")})


def test_lines_are_never_behind_a_return(folder: Path) -> None:
    """The function that makes the optimizer returns it at once, and calls the model by another name."""
    parts = "import torch\ndef make(it):\n    return torch.optim.SGD(it.parameters(), lr=1)\n"
    call = call_of(folder, "from parts import make\nnet = nn.Linear(8, 2)\nopt = make(net)" + LOOP, parts=parts)
    assert call is not None
    assert (call.name, call.line, call.before) == ("net", "train.py:5", False)


def test_what_makes_the_optimizer_as_it_trains_is_too_late(folder: Path) -> None:
    library = folder.parent / "site-packages" / f"fit_{folder.name}"
    library.parent.mkdir(exist_ok=True)
    code = "import torch\ndef train(it):\n    net = it\n    opt = torch.optim.SGD(it.parameters(), lr=1)\n"
    library.with_suffix(".py").write_text(code + textwrap.indent(LOOP, "    "), encoding="utf-8")
    text = f"""
        import sys
        sys.path.append({str(library.parent)!r})
        from {library.name} import train
        class Holder: pass
        holder = Holder()
        holder.model = mine = nn.Linear(8, 2)
        train(mine)
        """
    call = call_of(folder, text)
    assert call is not None
    assert (call.name, call.line, call.before) == ("mine", "train.py:10", True)
    assert call.optimizer is torch.optim.SGD


def test_a_model_in_an_attribute_of_a_trainer(folder: Path) -> None:
    text = """
        class Trainer:
            def __init__(self):
                self.network = nn.Linear(8, 2)
                self.opt = torch.optim.SGD(self.network.parameters(), lr=1)
            def run(self):
                self.network(torch.zeros(4, 8)).sum().backward()
        Trainer().run()
        """
    call = call_of(folder, text)
    assert call is not None
    assert (call.name, call.line) == ("self.network", "train.py:7")


def test_an_argument_that_cannot_be_described_is_said(folder: Path) -> None:
    text = """
        class Net(nn.Linear):
            def forward(self, batch):
                return super().forward(batch.x)
        class Batch:
            x = torch.zeros(4, 8)
        Net(8, 2)(Batch())
        """
    call = call_of(folder, text)
    assert call is not None
    assert call.unknown == "a Batch"


def test_modules_are_called_as_before_afterwards(folder: Path) -> None:
    plain = nn.Module.__call__
    assert call_of(folder, "x = 1") is None
    assert nn.Module.__call__ is plain
