"""Models that return objects, and models with hooks: the proof is of what they return, and of nothing else."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environment import slow
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, SegformerConfig, SegformerForSemanticSegmentation
from truth.module_state import everything
from verification.fitting.quick import fit, plan

from memplan.errors import UsageError
from memplan.planning.capture.loss_module import with_loss
from memplan.verification.fitting import fit as fit_module
from memplan.verification.fitting.fit import Fitted


def budget_between(model: nn.Module, *inputs: Any, **options: Any) -> int:
    """Halfway from the least to what the step takes as it is."""
    found = plan(model, *inputs, budget="1 GiB", **options)
    assert found.floor < found.eager_peak
    return (found.floor + found.eager_peak) // 2


def trained_alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # pyright: ignore[reportArgumentType]  # both trained


class Asked(fit_module.Plans):
    """Counts the kinds of calls that a plan was asked for."""

    times = 0

    def __call__(self, call: Any, held: bool) -> Any:
        Asked.times += 1
        return super().__call__(call, held)


@pytest.mark.slow
def test_a_model_of_transformers_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "Plans", Asked)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config).train()
    twin, tokens = copy.deepcopy(model), torch.arange(64).reshape(4, 16)
    given = {"attention_mask": torch.ones_like(tokens), "labels": tokens}
    fitted = fit(model, tokens, kwargs=given, budget=budget_between(model, tokens, kwargs=given), pairs=0)
    assert fitted.changed
    assert fitted.proof.exact
    before, outputs = Asked.times, []
    for one in (fitted.model, twin):
        torch.manual_seed(1)
        outputs.append(one(tokens, **given))
        outputs[-1].loss.backward()
    ours, theirs = outputs
    assert torch.equal(ours.logits, theirs.logits)
    for mine, its in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        assert torch.equal(mine.keys, its.keys)
    trained_alike(model, twin)
    # inputs and labels are one tensor: so were they in the proof, and this call is no other than that
    assert Asked.times == before > 0


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor
    kind: str = "plain"


class Returning(nn.Module):
    """Returns its tensors in an object that pytrees do not know."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        self.head, self.kind = nn.Linear(64, 8), kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.layers(x)
        return self.kind(logits=self.head(hidden), hidden=hidden)


@pytest.mark.parametrize("kind", [SimpleNamespace, *slow(Output)])
def test_a_loss_of_an_object(kind: Any) -> None:
    torch.manual_seed(0)
    model = Returning(kind)
    twin, x, y = copy.deepcopy(model), torch.randn(512, 16), torch.arange(512) % 8

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, targets) + output.hidden.pow(2).mean()

    budget = budget_between(model, x, targets=y, loss=loss)
    fitted = fit(model, x, targets=y, loss=loss, budget=budget, pairs=0)
    assert fitted.changed
    assert fitted.proof.exact
    assert fitted.loss is not None
    for call in (lambda: fitted.loss(x, y), lambda: loss(twin(x), y)):  # pyright: ignore[reportOptionalCall]
        torch.manual_seed(1)
        call().backward()
    trained_alike(model, twin)


def test_a_dataclass_without_a_loss() -> None:
    torch.manual_seed(0)
    model, x = Returning(Output), torch.randn(512, 16)
    fitted = fit(model, x, budget=budget_between(model, x), pairs=0)
    assert fitted.changed
    assert fitted.proof.exact
    measured = fitted.proof.reference_peak  # with the output in the caller's hands until the step ends
    assert abs(fitted.plan.eager_peak - measured) < 0.005 * measured
    assert fitted.proof.outputs.tensors >= 3 * 2
    output = fitted.model(x)
    assert (type(output), output.kind) == (Output, "plain")


# -- hooks of the model


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return model, torch.randn(512, 16)


def hooked(model: nn.Module) -> list[str]:
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda _, __, output: (seen.append("after"), 2 * output)[1])
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    return seen


def test_hooks_of_the_model_run_in_its_calls_and_not_in_the_proof() -> None:
    model, x = net()
    x.requires_grad_()
    twin = copy.deepcopy(model)
    budget = budget_between(model, x)
    seen, others = hooked(model), hooked(twin)
    before = everything(model, x)
    fitted: Fitted = fit(model, x, budget=budget, pairs=1)
    assert fitted.changed
    assert fitted.proof.ok
    assert seen == []
    outputs = [one(x) for one in (fitted.model, twin)]
    for output in outputs:
        output.sum().backward()
    assert torch.equal(*outputs)
    assert seen == others == ["before", "after", "backward"]
    trained_alike(model, twin)
    fitted.undo()
    model.zero_grad()
    x.grad = None
    assert everything(model, x) == before


@pytest.mark.parametrize("wrap", [False, True])
def test_a_hook_on_a_model_that_is_planned_with_its_loss_is_refused(wrap: bool) -> None:
    model, x = net()
    seen = hooked(model)
    before = everything(model, x)
    y = torch.arange(512) % 8
    step, loss = (with_loss(model, F.cross_entropy), None) if wrap else (model, F.cross_entropy)
    with pytest.raises(UsageError, match=r"The model has a forward hook, .* and is planned together with its loss"):
        fit(step, *((x, y) if wrap else (x,)), targets=() if wrap else y, loss=loss, budget="1 MiB")
    assert seen == []
    assert everything(model, x) == before


def test_a_hook_on_a_layer_is_refused_by_the_layers_name() -> None:
    model, x = net()
    model[1].register_forward_hook(lambda *_: None)  # pyright: ignore[reportIndexIssue]
    with pytest.raises(UsageError, match=r"The layer model\.1 has a forward hook"):
        fit(model, x, loss=lambda output: output.sum(), budget="1 MiB")


@pytest.mark.slow
@pytest.mark.parametrize("called_before", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_of_transformers_that_collects_hidden_states_by_hooks(called_before: bool) -> None:
    config = SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    config.num_labels = 3
    model, x = SegformerForSemanticSegmentation(config).train(), torch.randn(2, 3, 64, 64)
    given = {"labels": torch.randint(3, (2, 64, 64))}
    if called_before:
        model(x)
    twin, before = copy.deepcopy(model), hooks_of(model)
    budget = budget_between(model, x, kwargs=given)
    assert hooks_of(model) == before
    fitted = fit(model, x, kwargs=given, budget=budget, pairs=0)
    assert fitted.proof.same
    assert fitted.changed
    ours, theirs = fitted.model(x, **given), twin(x, **given)
    ours.loss.backward()
    theirs.loss.backward()
    assert torch.equal(ours.loss, theirs.loss)
    trained_alike(model, twin)
    fitted.undo()
    assert torch.equal(model.eval()(x).logits, twin.eval()(x).logits)


def hooks_of(model: nn.Module) -> list[Any]:
    return [list(one._forward_hooks.items()) for one in model.modules()]
