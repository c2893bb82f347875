"""A planned step's text runs where the captured step does not exist: it defines its segments."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn

from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.ops.tile import tile_of
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.codegen import program
from memplan.planning.schedule.scheduler import schedule
from memplan.planning.tiles.tiled import Axis, Tile


def model_and_input(rank: int) -> tuple[nn.Module, torch.Tensor]:
    """Norm, padding by a value that is no number, a cast and slices: their arguments are of many types."""
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = convolution(2, 4, 3, padding=1, bias=False), convolution(4, 3, 3, padding=1)
            self.norm = nn.GroupNorm(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.nn.functional.silu(self.norm(self.first(x)))
            hidden = hidden.masked_fill(hidden.double() > 3.0, float("-inf")).clamp(min=-1.0)
            return self.last(torch.cat([hidden[:, 2:], hidden[:, :2]], 1)).square().mean()

    return Net(), torch.randn(2, 2, *(12,) * rank)


@pytest.mark.parametrize(("rank", "axis"), [(2, Axis(2)), *slow((1, Axis(2)), (3, Axis(2)), (2, Axis(0, 2)))])
def test_a_text_with_segments_runs_by_itself(rank: int, axis: Axis) -> None:
    torch.manual_seed(0)
    model, x = model_and_input(rank)
    plain = capture(model, call_of((x,), {}))
    calls = [op.call for op in plain.graph.forward_ops if op.call is not None]
    tiled = capture(model, call_of((x,), {}), tiles=[Tile(calls[0], calls[-3], axis, pieces=2)])
    made = schedule(tiled.graph, Choices())
    text, without_segments = program(made, defines_segments=True), program(made)
    values, keys = tiled.graph.values, [op.args[-1] for op in tiled.graph.ops if op.target == "memplan.tile.default"]
    (tile,) = map(weakref.ref, map(tile_of, keys))
    paths = [v.path for v in values if v.kind in ("parameter", "buffer", "input", "constant")]
    path_of_value = {of: values[of].path for of, _ in tiled.graph.gradients}
    del plain, tiled, made, values
    gc.collect()
    assert tile() is None, "the text has to define the segment"
    with pytest.raises(KeyError):
        run(without_segments, model, x, paths)

    reference = copy.deepcopy(model)
    expected = reference(x)
    expected.backward()
    output, gradients = run(text, model, x, paths)
    torch.testing.assert_close(output, expected)
    named = {path_of_value[value]: gradient for value, gradient in gradients.items()}
    assert named.keys() == dict(model.named_parameters()).keys()
    for name, gradient in named.items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad)


def run(text: str, model: nn.Module, x: torch.Tensor, paths: list[str]) -> tuple[torch.Tensor, dict[int, Any]]:
    """Run a planned step's text; return its output, and the gradients by value. ``paths``: those of its inputs."""
    module: dict[str, Any] = {}
    exec(compile(text, "plan", "exec"), module)
    found = dict(model.named_parameters()) | dict(model.named_buffers()) | {"0": x}
    inputs, gradients = [found[path] for path in paths], dict[int, Any]()
    with torch.no_grad():
        (output,), saved = module["forward"](list(inputs))
        for given in module["backward"](inputs, saved, [torch.ones(())]):
            gradients.update(given)
            given.clear()
    return output, gradients
