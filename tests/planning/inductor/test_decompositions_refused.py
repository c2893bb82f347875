"""What fake tensors refuse and the CPU runs: lowered by name, and run as torch's own kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan import _torch
from memplan.planning.inductor import decompositions

pytestmark = pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")


class Experts(nn.Module):
    """Rows in groups, each with a matrix of its own, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(3, *shape) / 8) for shape in ((64, 32), (32, 64)))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([10, 30, 48], dtype=torch.int32)
        hidden = torch.relu(torch.nn.functional.grouped_mm(x, self.up, offs=ends))
        return torch.nn.functional.grouped_mm(hidden, self.down, offs=ends).square().mean()


@pytest.mark.slow
def test_products_in_groups_run_as_one_kernel(capfd: pytest.CaptureFixture[str]) -> None:
    """Though `torch.compile`, which the proof asks what rounding is, does not run them."""
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(48, 64)
    model(x).backward()
    eager = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    fitted = memplan.fit(model, x, budget="1GB", engine="inductor", pairs=0)
    assert fitted.proof.ok
    model(x).backward()
    ours = [one.grad for one in model.parameters() if one.grad is not None]
    assert len(ours) == len(eager) == 2
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other)
    fusion = fitted.plan.fusion
    assert fusion is not None
    called = [group.kernel for group in fusion.groups if group.kernel == "memplan.grouped_mm.default"]
    assert len(called) == 5  # two forward, two for the matrices and one for the hidden rows
    assert "Traceback" not in capfd.readouterr().err


def test_each_is_torchs_own() -> None:
    a, b = torch.randn(48, 64), torch.randn(3, 64, 32)
    ends = torch.tensor([10, 30, 48], dtype=torch.int32)
    indices, offsets = torch.tensor([1, 2, 2, 0]), torch.tensor([0, 2])
    bags = torch.ops.aten._embedding_bag(torch.randn(5, 8), indices, offsets, False, 1)[1:]
    arguments = {
        "aten::_grouped_mm": (a, b, ends),
        "aten::linalg_lstsq": (torch.randn(5, 3), torch.randn(5, 2)),
        "aten::_embedding_bag_backward": (torch.randn(2, 8), indices, offsets, *bags, 5, False, 1, False, None),
    }
    corrected = decompositions._with_fake_kernels()
    assert len(corrected) == len(arguments)
    for torchs, ours in corrected.items():
        given = arguments[torchs._schema.name]
        for one, other in zip(_torch.tree_leaves(ours(*given)), _torch.tree_leaves(torchs(*given)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # LAPACK's bits follow addresses
