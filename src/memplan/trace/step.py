"""Makes a ``build`` for `record` and `measure` from a module, its inputs and a loss."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import DeviceError, InputError, MemplanError, TargetError
from memplan.trace.naming.step_parts import Loss, Optimizer, loss_of, optimizer_of
from memplan.trace.recording.boundaries import Build, Step
from memplan.trace.records import HOST
from memplan.trace.spec import as_spec, batch_of, dtype_of, is_shape, like, realize, with_batch

CUDA = "cuda"

_AUTOCAST = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


@dataclass(frozen=True)
class StepOptions:
    """Inputs, loss, optimizer and modes of a model's training step: see `memplan.explain`."""

    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: Any = ()
    """A target, or a list or tuple of targets; a tuple once checked."""
    loss: Loss | None = None
    optimizer: Optimizer | None = None
    autocast: torch.dtype | str | None = None
    train: bool = True
    dtype: torch.dtype | str | None = None
    """Dtype to convert the model's floating-point parameters to."""

    def checked(self) -> StepOptions:
        """Return the options with texts and shapes resolved to specs, callables and dtypes. Raises InputError: an input
        that does not describe a tensor; no such loss, optimizer or dtype."""
        autocast = self.autocast
        if isinstance(autocast, str):
            autocast = _AUTOCAST.get(autocast)
            if autocast is None:
                raise InputError(f"autocast={self.autocast!r}", expected=f"one of {', '.join(_AUTOCAST)}, or None")
        return replace(
            self,
            inputs=tuple(as_spec(value) for value in self.inputs),
            kwargs={name: as_spec(value, shapes=False) for name, value in self.kwargs.items()},
            targets=tuple(as_spec(value) for value in _as_sequence(self.targets)),
            loss=None if self.loss is None else loss_of(self.loss),
            optimizer=None if self.optimizer is None else optimizer_of(self.optimizer),
            autocast=autocast,
            dtype=None if self.dtype is None else dtype_of(self.dtype),
        )

    def refuse_with_trace(self) -> None:
        """Raise InputError if there are any options besides ``train``: a Trace has its inputs and options."""
        if replace(self, train=True) != StepOptions():
            raise InputError(
                "a Trace and inputs or other options of a module's step",
                expected="a Trace alone: its step is already recorded",
            )

    @property
    def callables(self) -> tuple[Callable[..., Any] | None, Callable[[Any], Any] | None]:
        """Loss and optimizer of checked options, each a callable or None."""
        loss, optimizer = self.loss, self.optimizer
        assert not isinstance(loss, str), "options were checked"
        assert not isinstance(optimizer, str), "options were checked"
        return loss, optimizer

    @property
    def batch(self) -> int | None:
        """Leading dimension of the first input that has dimensions, or None."""
        return batch_of(*self.inputs, *self.kwargs.values())

    def with_batch(self, new: int) -> StepOptions:
        """Return the options with batch size ``new``: the leading dimension of all inputs, keyword arguments and
        targets in which it was `batch`."""
        old = self.batch
        if old is None:
            return self
        return replace(
            self,
            inputs=with_batch(self.inputs, old, new),
            kwargs=with_batch(dict(self.kwargs), old, new),
            targets=with_batch(self.targets, old, new),
        )


def _as_sequence(targets: Any) -> Any:
    """Return a list or tuple of targets unchanged, a single target (which may be a shape) as a tuple."""
    return targets if isinstance(targets, (list, tuple)) and not is_shape(targets) else (targets,)


def build_of(what: Any, options: StepOptions, *, on_card: bool = False) -> Build:
    """Return a ``build`` for a module, for a callable that returns a module, or for a ``build``.

    An existing module is copied, never changed. ``on_card``: module, inputs and targets are moved to "cuda"; a
    ``build`` moves its own.

    Raises:
        TargetError: ``what`` is none of these.
        DeviceError: the module is on a device that this version has no model of.
    """
    if isinstance(what, nn.Module):
        _check_device(what, on_card)
    elif not callable(what):
        raise TargetError(
            f"{type(what).__name__} {what!r:.60}",
            expected="a module, a callable that makes one, a build that returns a step, or a Trace",
            do="Pass one of these",
        )

    def build() -> Step:
        """Return a step: that of ``what``, or one that trains the module that ``what`` is or returns."""
        result = copy_module(what) if isinstance(what, nn.Module) else what()
        if isinstance(result, nn.Module):
            return _step(result, options, CUDA if on_card else HOST)
        title = title_of(what, otherwise="it")
        if not callable(result):
            raise TargetError(
                f"{title} returned {_describe(result)}",
                expected="a module, or a step: a callable without arguments that runs one training step",
                do="Return one of these",
            )
        if options != StepOptions():
            raise InputError(
                f"{title} returned a step, and inputs or other options of a module's step were given, too",
                expected="only what a module needs; a step brings its own",
                do="Leave them out, or pass a callable that returns the module",
            )
        return result

    return build


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module; under a fake mode, its parameters, buffers and other tensors become fake. Raises
    TargetError if it cannot be copied."""
    memo: dict[int, Any] = {}  # id of a tensor -> its copy, which deepcopy then takes
    for part in module.modules():
        registered = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        for tensor in (*registered, *_torch.tree_leaves(list(vars(part).values()))):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo and _torch.has_shape(tensor):
                with _torch.no_modes():  # a fake mode reads .grad, which warns for a tensor that is not a leaf
                    detached = tensor.detach()
                new = like(detached)
                new = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                memo[id(tensor)] = new
            elif isinstance(tensor, torch.Generator):  # it has a real state
                with _torch.no_modes():
                    memo[id(tensor)] = copy.deepcopy(tensor)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # __deepcopy__ is the user's code and can raise anything
        raise TargetError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {str(error).splitlines()[0]})",
            expected="a module that copy.deepcopy takes, so that yours is left as it is",
            do="Pass a callable that makes the module instead",
        ) from error


def _check_device(module: nn.Module, on_card: bool) -> None:
    """Raise DeviceError for a parameter or buffer on a device that a recording cannot copy from."""
    allowed = ("cpu", "meta", *((CUDA,) if on_card else ()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type not in allowed:
            raise DeviceError(
                f"{name} is on {tensor.device}",
                expected=f"a module on {' or '.join(allowed)}",
                do="Say device='cuda', or pass a callable that makes the module: nothing of it will be allocated",
            )


def _step(model: nn.Module, options: StepOptions, device: str) -> Step:
    """Return a step that trains the model on ``device``, or runs inference (options without ``train``)."""
    if device != HOST:
        model.to(device)
    if options.dtype is not None:
        assert isinstance(options.dtype, torch.dtype), "options were checked"
        model.to(options.dtype)
    if model.training != options.train:  # a model in training mode may have layers in evaluation mode: leave these
        model.train(options.train)
    _check_inputs(model, options)
    inputs, kwargs, targets = _placed((options.inputs, dict(options.kwargs), options.targets), device)

    def infer() -> None:
        """Run the model without gradients, and free its output."""
        with torch.no_grad(), _autocast(options, device):
            output = model(*inputs, **kwargs)
        del output

    if not options.train:
        return infer
    optimizer = _optimizer(model, options)

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        else:
            model.zero_grad()
        with _autocast(options, device):
            output = model(*inputs, **kwargs)
            loss = _loss(output, targets, options)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def forward_of(model: nn.Module, options: StepOptions) -> Step:
    """Return a step that runs only the forward pass, in evaluation mode with grad enabled."""
    model.eval()
    _check_inputs(model, options)
    inputs, kwargs = _placed((options.inputs, dict(options.kwargs)), HOST)

    def step() -> None:
        with torch.enable_grad(), _autocast(options, HOST):
            output = model(*inputs, **kwargs)
        del output

    return step


def _placed(value: Any, device: str) -> Any:
    """Return nested inputs with a tensor for each spec, and all tensors on ``device``."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)  # stays a leaf of the autograd graph

    realized = realize(value)
    return realized if device == HOST else _torch.tree_map(move, realized)


def _autocast(options: StepOptions, device: str) -> AbstractContextManager[Any]:
    """Return `torch.autocast` with the dtype of checked options, or a context that does nothing."""
    if options.autocast is None:
        return nullcontext()
    assert isinstance(options.autocast, torch.dtype), "options were checked"
    return torch.autocast(device, dtype=options.autocast)


def _optimizer(model: nn.Module, options: StepOptions) -> Any:
    """Return the optimizer of the options, constructed for the model, or None; raise InputError if the constructor
    raises."""
    if options.optimizer is None:
        return None
    assert not isinstance(options.optimizer, str), "options were checked"
    try:
        return options.optimizer(model.parameters())
    except Exception as error:  # an optimizer can refuse its parameters in any way
        raise InputError(
            f"the optimizer raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="a callable that takes the model's parameters, as torch.optim.AdamW does",
            do="Pass such a callable",
        ) from error


def _loss(output: Any, targets: Any, options: StepOptions) -> torch.Tensor:
    """Return the loss of an output by the loss function of the options; by `default_loss` if there is none."""
    if options.loss is not None:
        assert not isinstance(options.loss, str), "options were checked"
        value = _call_loss(options.loss, output, targets)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise InputError(
                f"the loss returned {_describe(value)}",
                expected="a scalar tensor",
                do="Reduce it, by .mean() or .sum()",
            )
        return value
    return default_loss(output)


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output from which the backward pass starts without a loss function.

    These are its ``.loss`` if that is a scalar, else the output itself if it is a scalar, else all of its
    floating-point tensors that require a gradient.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return [loss]
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return [output]
    return _float_tensors(output)


def default_loss(output: Any) -> torch.Tensor:
    """Return the loss of an output without a loss function: the sum of its `differentiable` tensors. Raises InputError
    if there are none."""
    tensors = differentiable(output)
    if not tensors:
        raise InputError(
            f"the model returned {_describe(output)}, in which no floating-point tensor needs a gradient",
            expected="an output that depends on a parameter with requires_grad",
            do="Unfreeze a parameter, give a loss, or explain inference (train=False, --no-train)",
        )
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    total = tensors[0].sum()
    for tensor in tensors[1:]:
        total = total + tensor.sum()
    return total


def _call_loss(loss: Callable[..., Any], output: Any, targets: Any) -> Any:
    """Call the loss function; its exceptions become InputErrors with advice about the targets."""
    try:
        return loss(output, *targets)
    except (MemplanError, *_torch.DATA_DEPENDENT):
        raise
    except Exception as error:  # a loss can refuse its arguments in any way
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"the loss raised {type(error).__name__}: {text}",
            expected=f"a loss that fits the model's output, {_describe(output)}, and {len(targets)} target(s)",
            do=_target_advice(text, targets),
        ) from error


WHOLE = re.compile(r"\b(Long|int64)\b")
"""Matches torch's errors about class numbers or indices of a wrong dtype."""


def _target_advice(text: str, targets: Any) -> str:
    """Return what to do about a loss function's exception with the message ``text``."""
    if not targets:
        return "Give the targets that it takes: targets (--target)"
    if WHOLE.search(text) and any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in targets):
        return "Describe class numbers as whole numbers below the number of classes, as in 8:int64<10"
    return "Check the loss and the targets"


def _float_tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a nested output that require a gradient."""
    tensors: list[torch.Tensor] = []
    for leaf in _parts(output):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_floating_point() and leaf.requires_grad:
                tensors.append(leaf)
        elif isinstance(leaf, (list, tuple, Mapping)) or dataclasses.is_dataclass(leaf):
            tensors += _float_tensors(leaf)
    return tensors


def _parts(output: Any) -> Iterable[Any]:
    """Return the values of a mapping or dataclass (as of transformers' outputs), or the leaves of another output."""
    if isinstance(output, Mapping):
        return output.values()
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return _torch.tree_leaves(output)


def _check_inputs(model: nn.Module, options: StepOptions) -> None:
    """Raise InputError if the inputs do not match the signature of ``forward``."""
    try:
        signature = inspect.signature(model.forward)
        signature.bind(*options.inputs, **options.kwargs)
    except TypeError as error:
        inputs = f"{len(options.inputs)} input(s)" if options.inputs else "no input"
        raise InputError(
            f"{type(model).__name__}.forward{_parameters(model)} was given {inputs}"
            + (f" and the keywords {', '.join(options.kwargs)}" if options.kwargs else "")
            + f" ({error})",
            expected="an input for each parameter without a default, and no other",
            do="Describe each with an --input (or memplan.spec), or by its name with a --kwarg",
        ) from None
    except ValueError:  # forward has no signature
        return


def _parameters(model: nn.Module) -> str:
    """Return the parameters of ``forward`` as text, at most 8, without annotations and defaults."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [
        str(each.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)) for each in parameters
    ]
    return f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"


def title_of(what: Any, otherwise: str) -> str:
    """Return a name for messages and reports: of a module's class, or of a callable; of a `functools.partial`, that of
    its function. ``otherwise``: of a callable without a name."""
    if isinstance(what, nn.Module):
        return type(what).__name__
    name = getattr(what, "__qualname__", None) or getattr(getattr(what, "func", None), "__qualname__", None)
    return name or otherwise


def _describe(value: Any) -> str:
    """Return what a callable returned, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
