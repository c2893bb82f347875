from __future__ import annotations

import ast
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from planning.graphs import EARLY, HELD, all_kept
from torch import Tensor, nn

from memplan.errors import RecordingError
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.codegen import program, read_in_backward, returned_gradients
from memplan.planning.schedule.scheduler import schedule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x)))
        h = torch.nn.functional.max_pool2d(h, 2)
        return self.head(h.mean((2, 3))).sum()


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture(Net(), call_of((torch.randn(4, 3, 64, 64),), {}))


def functions(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(text, "plan", "exec"), found)
    return found


def handed_in(captured: Captured, model: nn.Module, x: Tensor) -> list[Any]:
    found = dict(model.named_parameters()) | dict(model.named_buffers()) | {"0": x}
    kinds = ("parameter", "buffer", "input", "constant")
    return [found[value.path] for value in captured.graph.values if value.kind in kinds]


CHOICES: dict[str, Any] = {
    "all kept": lambda graph: Choices(),
    "recomputed": lambda graph: Choices(recompute=recomputable_values(graph)),
    "encoded": lambda graph: Choices(saved_forms=all_kept(graph, "encode")),
    "not in place": lambda graph: Choices(recompute=recomputable_values(graph), in_place=False),
    "early": lambda graph: Choices(gradients=EARLY),
    "held": lambda graph: Choices(gradients=HELD),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_program_runs_by_itself_and_gives_autograds_gradients(captured: Captured, choice: str) -> None:
    made = schedule(captured.graph, CHOICES[choice](captured.graph))
    found = functions(program(made))
    torch.manual_seed(1)
    model, x = Net(), torch.randn(4, 3, 64, 64)
    reference = copy.deepcopy(model)
    expected = reference(x)
    expected.backward()
    inputs, tangents = handed_in(captured, model, x), [torch.ones(())]
    with torch.no_grad():
        handed = list(inputs)
        (loss,), saved = found["forward"](handed)
        assert handed == []
        assert torch.equal(loss, expected)
        names, steps = dict(model.named_parameters()), []
        for given in found["backward"](inputs, saved, tangents):
            steps.append(tuple(of for of, _ in given))
            for of, gradient in given:
                name = captured.graph.values[of].path
                wanted = reference.get_parameter(name).grad
                assert wanted is not None
                assert torch.equal(gradient, wanted), name
                del names[name]
            given.clear()
    assert inputs == saved == tangents == []
    assert tuple(steps) == returned_gradients(made)
    assert not names
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True))


@pytest.mark.parametrize("choice", CHOICES)
def test_every_variable_is_deleted_once_after_its_last_use(captured: Captured, choice: str) -> None:
    made = schedule(captured.graph, CHOICES[choice](captured.graph))
    for function in ast.parse(program(made)).body[-2:]:
        assert isinstance(function, ast.FunctionDef)
        dead: set[str] = set()
        there: set[str] = {argument.arg for argument in function.args.args}
        for statement in function.body:
            names = [one for one in ast.walk(statement) if isinstance(one, ast.Name)]
            used = {one.id for one in names if isinstance(one.ctx, ast.Load)} - {"aten", "torch", "device"}
            assert not used & dead
            assert used <= there
            there |= {one.id for one in names if isinstance(one.ctx, ast.Store)}
            gone = {one.id for one in names if isinstance(one.ctx, ast.Del)}
            assert gone <= there
            dead |= gone
        if function.name == "backward":
            paths = {value.path.replace(".", "_") for value in captured.graph.values if value.path} | {"input_0"}
            assert there - dead - paths <= {"inputs", "saved", "tangents", "given", "_"}


def test_it_is_readable(captured: Captured) -> None:
    graph = captured.graph
    made = schedule(graph, CHOICES["recomputed"](graph))
    text = program(made)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert "conv_weight" in text
    assert sum("# again: " in line for line in lines) == sum(action.recomputed for action in made.backward) > 3
    assert any("tests/planning/schedule/test_codegen.py:" in line and "conv" in line for line in lines)
    compile(text, "plan", "exec")


def test_what_backward_reads_of_what_is_handed_in(captured: Captured) -> None:
    made = schedule(captured.graph, Choices())
    read = {captured.graph.values[value].path for value in read_in_backward(made)}
    assert {"norm.weight", "head.weight", "0"} <= read
    assert not read & {"conv.bias", "head.bias", "norm.running_mean", "norm.num_batches_tracked"}


def changed(graph: JointGraph, **changes: Any) -> JointGraph:
    """The graph with its first op changed."""
    return replace(graph, ops=(replace(graph.ops[0], **changes), *graph.ops[1:]))


HOSTILE = 'x"); __import__("os").abort()  #\n    import os\n    os.abort()\r\u2028os.abort()'


def test_names_of_strangers_are_data(captured: Captured) -> None:
    graph = changed(captured.graph, layer=HOSTILE, where=HOSTILE)
    values = [
        replace(value, name=HOSTILE, path=value.path and HOSTILE) if value.kind != "result" else value
        for value in graph.values
    ]
    values[-1] = replace(values[-1], name="torch")
    values[-2] = replace(values[-2], name="class")
    text = program(schedule(replace(graph, values=tuple(values)), Choices(recompute=recomputable_values(graph))))
    assert "abort" in text
    tree = ast.parse(text)
    called = {ast.unparse(node.func).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "abort" not in attributes
    assert "__import__" not in called
    assert [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))] == [
        "import torch", "from torch import device, inf, nan", "import memplan.planning.ops.piecewise",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target": "aten.relu.default(); print"}, "a name that Python allows"),
        ({"kwargs": {"a=print()": 1}}, "a name that Python allows"),
        ({"kwargs": {"generator": torch.Generator()}}, "Generator"),
        ({"kwargs": {"x": [(object(),)]}}, "takes a object"),
    ],
)
def test_what_cannot_be_written_down_is_refused_by_name(captured: Captured, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecordingError, match=text):
        program(schedule(changed(captured.graph, **changes), Choices()))


@pytest.mark.parametrize(
    "argument",
    [None, True, 3, -1.5, float("inf"), float("-inf"), "none", torch.float16, torch.device("cuda:1"), torch.strided,
     torch.channels_last, (1,), (), [[1, 2], []], torch.Size([2, 3]), 1j],
)  # fmt: skip
def test_plain_arguments_come_back_as_they_were(captured: Captured, argument: Any) -> None:
    text = program(schedule(changed(captured.graph, kwargs={"here": argument}), Choices()))
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword) and node.arg == "here"]
    names = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    found = eval(ast.unparse(calls[0].value), names)
    assert found == argument
