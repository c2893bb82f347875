"""An optimizer with float32 master weights, of which only the low 16 bits are stored beside the bfloat16 weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memplan import _torch
from memplan.errors import UsageError
from memplan.kernels import adamw_step, sgd_step

_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Adamax, torch.optim.Adadelta,
)  # fmt: skip
"""Optimizers that update each element from its own gradient and state, which they make in the first update."""
_IN_ONE_PASS = (torch.optim.SGD, torch.optim.AdamW)
_NOT_IN_ONE_PASS = ("amsgrad", "capturable", "differentiable", "fused")
"""Options that `memplan.kernels` does not have."""
_LOW_HALVES, _TIE_POSITIONS = "master_low", "master_ties"
"""Keys in the state of a parameter: the low halves of its master weights, and the positions (of the flat tensor) where
they are 2^15, which int16 stores as -2^15: such master weights lie in the middle between two bfloat16 numbers."""
_PIECE, _PIECE_ON_CARD = 1 << 20, 1 << 22
"""Elements of a parameter that are updated at a time."""
_HALF = 1 << 15
"""Half of a rounding step of bfloat16, in rounding steps of float32."""
_ROW = 512
"""Elements whose maximum is compared first, as comparing each takes ten times as long on a CPU."""


class PackedMasters(torch.optim.Optimizer):
    """Train bfloat16 weights by float32 master weights that take 2 bytes a parameter instead of 4.

    A bfloat16 weight is its master weight, rounded: the high half of its bits. So the low half is all that is stored,
    in the optimizer's state. ``step()`` restores up to 4 million master weights at a time (of a parameter that is not
    contiguous, and with ``fused=True``, all), casts their gradients to float32, lets ``optimizer_class`` update them
    with its states in float32, and rounds. Weights and states are bit for bit those of a training that holds the
    master weights: float32 copies of the parameters, updated by ``optimizer_class``, and copied back after each update.
    It also does without that training's float32 gradients.

    The first master weights are the weights as they are before the first update; `set_master` sets others, such as
    those of a float32 checkpoint. A weight that is changed by hand between updates stays so, to within half of a
    bfloat16 rounding step. ``state_dict`` has the low halves; float32 and float64 parameters are updated as they are.

    An even bfloat16 number is the rounded value of 65,537 float32 numbers, one more than a low half can tell apart. So
    the positions of those in the middle to the next number above are stored, too: of random ones, one in 131,072, with
    8 bytes. How many there are is read after each update, so on a card each parameter waits for its kernels, and a
    CUDA graph cannot capture ``step()``.

    With ``one_pass`` each parameter is updated by `memplan.kernels.adamw_step` or `sgd_step`: on a card in one kernel,
    without master weights in memory. The weights and states are bit for bit those of master weights that these
    functions update, which can differ in the last bit from those that a card's ``optimizer_class`` updates. An error
    amid a parameter's update can then leave a few of its master weights a bfloat16 rounding step off.

    Args:
        params: parameters, or groups of them, as of any optimizer. Their gradients may be bfloat16 or float32.
        optimizer_class: SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adamax or Adadelta of ``torch.optim``.
        one_pass: update by a kernel; SGD and AdamW, without ``amsgrad``, ``capturable``, ``differentiable`` and
            ``fused``. Learning rates and betas are numbers, or tensors, which are read for each update.
        defaults: its options.

    Raises:
        UsageError: another optimizer, ``differentiable``, options that ``one_pass`` does not take, or parameters in
            float16, which is no part of float32, or DTensors (of FSDP2), or two in the same memory. Frozen ones are
            refused by ``step()``, once they have a gradient; so are those that were converted from bfloat16 since.

    Example:
        >>> layer = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = memplan.PackedMasters(layer.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        >>> layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> torch.equal(optimizer.master(layer.weight).bfloat16(), layer.weight)
        True
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
        one_pass: bool = False, **defaults: Any,
    ) -> None:  # fmt: skip
        if one_pass and optimizer_class not in _IN_ONE_PASS:
            raise UsageError(
                f"PackedMasters of {getattr(optimizer_class, '__name__', optimizer_class)} in one pass",
                expected="torch.optim's SGD or AdamW",
                do="Leave one_pass out",
            )
        if optimizer_class not in _ELEMENTWISE:
            raise UsageError(
                f"PackedMasters of {getattr(optimizer_class, '__name__', optimizer_class)}",
                expected=f"one of torch.optim's {', '.join(kind.__name__ for kind in _ELEMENTWISE)}",
                do="Pass one of these as optimizer_class, or hold the master weights in float32",
            )
        self._one_pass = one_pass
        self._inner: Any = optimizer_class(params, **defaults)
        """Updates the master weights of a piece, with its parameter groups and state set to theirs."""
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._release()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner, "_one_pass": self._one_pass}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as `torch.optim.Optimizer.add_param_group`.

        Raises:
            UsageError: there are parameters in float16, or in the same memory, or tensors that wrap others, or options
                that ``one_pass`` does not take.
        """
        super().add_param_group(param_group)
        try:
            self._check_options(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if parameter.requires_grad:
                    _check(parameter)
            _check_memory(parameter for group in self.param_groups for parameter in group["params"])
        except UsageError:
            self.param_groups.pop()
            raise

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise UsageError if a group has options that ``one_pass`` does not take, or asks for a gradient through the
        update, which rounds."""
        refused = [name for name in _NOT_IN_ONE_PASS if self._one_pass and group.get(name)]
        if refused:
            options = f"PackedMasters in one pass with {' and '.join(refused)}"
            raise UsageError(options, expected="none of these options", do="Leave them out, or one_pass")
        if group.get("differentiable"):
            raise UsageError(
                "PackedMasters with differentiable",
                expected="updates without a gradient, as they round weights to bfloat16",
                do="Leave it out, or hold the master weights in float32",
            )

    @property
    def packed_bytes(self) -> int:
        """Bytes of the low halves: 2 for each element of a bfloat16 parameter that is trained."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return sum(
            2 * parameter.numel()
            for parameter in parameters
            if parameter.dtype == torch.bfloat16
            and (parameter.requires_grad or _LOW_HALVES in self.state.get(parameter, {}))
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, clip: torch.Tensor | None = None
    ) -> Any:
        """Update all parameters that have a gradient. ``closure`` is called first, and its result returned.

        Args:
            closure: computes the gradients.
            clip: tensor of one number, by which gradients are multiplied in float32; they stay as they are. It may be
                on the card, for which the host does not wait with ``one_pass``. That of ``clip_grad_norm_`` is
                ``(max_norm / (torch.nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1)``.

        Raises:
            UsageError: a parameter that was frozen at first has a gradient, and cannot be updated (see the class), or
                the model was converted from bfloat16, or an option that ``one_pass`` does not take was set since.
                Nothing is updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for group in self.param_groups:
            self._check_options(group)
        for parameter, _ in trained:
            _check(parameter)
            self._check_dtype(parameter)
        try:
            for parameter, group in trained:
                update = self._update_in_one_pass if self._one_pass else self._update
                update(parameter, group, None if clip is None else clip.to(parameter.device))
        finally:
            self._release()
        return loss

    @torch.no_grad()
    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 master weight of a parameter, as a new tensor of its shape; a copy of a float64 parameter.

        Raises:
            UsageError: the parameter was converted from bfloat16 since its last update.
        """
        state = self.state.get(parameter, {})
        if _LOW_HALVES not in state:
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            return parameter.detach().to(dtype, copy=True)
        self._check_dtype(parameter)
        return _unpacked(parameter.detach(), state[_LOW_HALVES], state[_TIE_POSITIONS])

    def _check_dtype(self, parameter: torch.Tensor) -> None:
        """Raise UsageError if the state has low halves of a parameter that is no longer in bfloat16."""
        if parameter.dtype != torch.bfloat16 and _LOW_HALVES in self.state.get(parameter, {}):
            raise UsageError(
                f"PackedMasters of a parameter of shape {tuple(parameter.shape)} that was converted from bfloat16 to "
                f"{str(parameter.dtype).removeprefix('torch.')}",
                expected="bfloat16, the high half of master weights whose low half is in the optimizer's state",
                do="Call master(parameter) before the model is converted, and train on with another optimizer",
            )

    @torch.no_grad()
    def set_master(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Set the master weight of a parameter, and the parameter to its rounded value."""
        weight = parameter.detach()
        if weight.dtype != torch.bfloat16:
            weight.copy_(master)
            return
        copy = torch.empty_like(weight, dtype=torch.float32).copy_(master)
        state = self._packed_state(parameter)
        low_halves, tie_positions = _rounded(copy, weight)
        state[_LOW_HALVES].copy_(low_halves)
        state[_TIE_POSITIONS] = tie_positions

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as `torch.optim.Optimizer.load_state_dict`, but in the dtypes that it has.

        Raises:
            UsageError: it has options that ``one_pass`` does not take. Nothing is loaded then.
        """
        loaded: list[dict[str, Any]] = []  # the state_dict, as the pre-hooks before ours changed it

        def keep(_: Any, changed: dict[str, Any]) -> None:
            for group in changed["param_groups"]:
                self._check_options(group)
            loaded.append(changed)

        pre_hook = self.register_load_state_dict_pre_hook(keep)
        post_hook = self.register_load_state_dict_post_hook(lambda _: self._restore_dtypes(*loaded), prepend=True)
        try:
            super().load_state_dict(state_dict)  # casts states to the dtype of their parameter
        finally:
            pre_hook.remove()
            post_hook.remove()

    def _restore_dtypes(self, loaded: dict[str, Any]) -> None:
        """Set the states to those of a state_dict that was loaded, in its dtypes."""
        numbers = chain.from_iterable(group["params"] for group in loaded["param_groups"])  # keys of loaded["state"]
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in loaded["state"].get(number, {}).items():
                if name == "step" or not isinstance(value, torch.Tensor):  # torch keeps these as they are
                    continue
                if value.shape == parameter.shape:
                    self.state[parameter][name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()
                else:
                    self.state[parameter][name] = value.to(parameter.device)

    def _packed_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a bfloat16 parameter. If it has no master weights yet, these become the weights: low
        halves of 0, and no ties."""
        state = self.state[parameter]
        if _LOW_HALVES not in state:
            state[_LOW_HALVES] = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
            state[_TIE_POSITIONS] = state[_LOW_HALVES].new_empty(0, dtype=torch.int64)
        return state

    def _update_in_one_pass(self, parameter: torch.Tensor, group: dict[str, Any], clip: torch.Tensor | None) -> None:
        """Update a parameter by `memplan.kernels` with the options of its group.

        The kernel updates weight, moments and low halves in place, and returns the new positions of ties.
        """
        weight, gradient = parameter.detach(), parameter.grad
        assert gradient is not None
        is_packed = weight.dtype == torch.bfloat16
        state = self._packed_state(parameter) if is_packed else self.state[parameter]
        options: dict[str, Any] = {name: float(group[name]) for name in ("lr", "weight_decay")}
        options |= {"maximize": group["maximize"], "clip": clip}
        options |= {"low": state[_LOW_HALVES], "ties": state[_TIE_POSITIONS]} if is_packed else {}

        def buffer_of(name: str) -> torch.Tensor:
            """Return a tensor of the state, zeros before the first update."""
            if state.get(name) is None:
                state[name] = torch.zeros_like(weight, dtype=torch.float32 if is_packed else weight.dtype)
            return state[name]

        if isinstance(self._inner, torch.optim.AdamW):
            step = state.get("step", torch.tensor(0.0)) + 1
            moments = buffer_of("exp_avg"), buffer_of("exp_avg_sq")
            beta1, beta2 = (float(beta) for beta in group["betas"])
            options |= {"betas": (beta1, beta2), "eps": group["eps"], "step": int(step)}
            tie_positions = adamw_step(weight, gradient, *moments, **options)
            state["step"] = step
        else:
            is_first, momentum = state.get("momentum_buffer") is None, float(group["momentum"])
            momentum_buffer = buffer_of("momentum_buffer") if momentum else None
            options |= {name: group[name] for name in ("dampening", "nesterov")}
            tie_positions = sgd_step(weight, gradient, momentum_buffer, momentum=momentum, first=is_first, **options)
        if is_packed:
            state[_TIE_POSITIONS] = tie_positions

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], clip: torch.Tensor | None) -> None:
        """Update a parameter with the options of its group, piece by piece where that cannot change a bit. Fused
        kernels get the whole tensor, as their arithmetic may depend on the position in it.

        After an error, as of memory, the pieces before are updated, with low halves that fit their weights. The number
        of updates in the state does not count this update.
        """
        weight, gradient = parameter.detach(), parameter.grad
        assert gradient is not None
        is_packed = weight.dtype == torch.bfloat16
        state = self._packed_state(parameter) if is_packed else self.state[parameter]
        for name, value in state.items():
            if _is_elementwise(value, weight):  # the weight may have another memory format than in the first update
                state[name] = _laid_out_as(weight, value)
        if group.get("fused"):  # the kernel goes through memory, whatever the strides are
            gradient = _laid_out_as(weight, gradient)
        old_states = {name: value for name, value in state.items() if name not in (_LOW_HALVES, _TIE_POSITIONS)}
        new_states = dict[str, Any]()
        """States that the first update creates, and states that have no value for each element."""
        elements_at_a_time = _PIECE if weight.device.type == "cpu" else _PIECE_ON_CARD
        if group.get("fused") or not (_is_flat(weight) and _is_flat(gradient)):
            elements_at_a_time = weight.numel()
        for start, piece_of in _pieces(weight.numel(), elements_at_a_time):
            master, ties_elsewhere = piece_of(weight), None
            if is_packed:
                ties = ties_elsewhere = state[_TIE_POSITIONS]
                if len(ties):
                    is_inside = (ties >= start) & (ties < start + elements_at_a_time)
                    ties, ties_elsewhere = ties[is_inside] - start, ties[~is_inside]
                master = _unpacked(master, piece_of(state[_LOW_HALVES]), ties)
            master.grad = piece_of(gradient).to(master.dtype)
            if clip is not None:
                master.grad = master.grad * clip.to(master.dtype)
            old_piece_states = {
                # others, such as the number of updates, are copied: each piece begins with the same
                name: piece_of(value) if _is_elementwise(value, weight) else _copied(value)
                for name, value in old_states.items()
            }
            new_piece_states = self._updated(master, dict(old_piece_states), group)
            master.grad = None
            for name, value in new_piece_states.items():
                if not _is_elementwise(value, master) or value.shape == weight.shape:
                    new_states[name] = value  # a state without a value for each element is the same after each piece
                elif value is not old_piece_states.get(name):  # else it was updated in place
                    states = old_states if _is_elementwise(old_states.get(name), weight) else new_states
                    if name not in states:
                        states[name] = torch.empty_like(weight, dtype=value.dtype)
                    piece_of(states[name]).copy_(value)
            if ties_elsewhere is not None:
                low_halves, ties = _rounded(master, piece_of(weight))
                tie_positions = torch.cat([ties_elsewhere, ties + start])
                piece_of(state[_LOW_HALVES]).copy_(low_halves)
                state[_TIE_POSITIONS] = tie_positions
        state.update(new_states)

    def _updated(self, master: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """Update master weights from their ``grad`` by `optimizer_class`, with the options of a group. Returns the new
        state; tensors of the old state may be changed in place."""
        self._inner.param_groups = [{**group, "params": [master]}]
        self._inner.state = defaultdict(dict, {master: state})
        _torch.bare_step(self._inner)()
        return self._inner.state[master]

    def _release(self) -> None:
        """Drop the inner optimizer's references to parameters and states."""
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)


def _pieces(elements: int, at_a_time: int) -> list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
    """Return (first element, function that returns the piece of a tensor) for each piece of contiguous tensors with
    ``elements`` elements. A single piece is the tensor itself, which need not be contiguous."""
    if elements <= at_a_time:
        return [(0, lambda tensor: tensor)]
    return [
        (start, lambda tensor, start=start: tensor.view(-1)[start : start + at_a_time])
        for start in range(0, elements, at_a_time)
    ]


def _check(parameter: torch.Tensor) -> None:
    """Raise UsageError if a parameter cannot be updated here."""
    is_plain = "" in _torch.inner_tensors(parameter)  # the only tensor in it is itself
    if is_plain and parameter.dtype in (torch.bfloat16, torch.float32, torch.float64):
        return
    kind = str(parameter.dtype).removeprefix("torch.") if is_plain else type(parameter.data).__name__
    raise UsageError(
        f"PackedMasters of a parameter of shape {tuple(parameter.shape)} and type {kind}",
        expected="a plain tensor in bfloat16, whose bits are the high half of a float32 number, or in float32 "
        "or float64",
        do="Train in bfloat16, or hold the master weights in float32",
    )


def _check_memory(parameters: Iterable[torch.Tensor]) -> None:
    """Raise UsageError if two trained parameters are in the same memory, and one is in bfloat16: the update of one
    would change the high halves of the other. Parameters with gaps are not looked at."""
    intervals = defaultdict[Any, list[tuple[int, int, torch.Tensor]]](list)
    for parameter in parameters:
        if not parameter.requires_grad or is_lazy(parameter) or not parameter.numel():
            continue
        start, elements = int(parameter.storage_offset()), parameter.numel()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        if extent == elements:
            key, width = _torch.storage_key(parameter.untyped_storage()), parameter.element_size()
            intervals[key].append((start * width, (start + elements) * width, parameter))
    for in_storage in intervals.values():
        in_storage.sort(key=lambda interval: interval[:2])
        for (_, end, first), (start, _, second) in pairwise(in_storage):
            if start < end and torch.bfloat16 in (first.dtype, second.dtype):
                raise UsageError(
                    f"PackedMasters of two parameters in the same memory, of shapes {tuple(first.shape)} and "
                    f"{tuple(second.shape)}",
                    expected="memory of its own for each parameter, whose master weight is its bits and low halves",
                    do="Tie the modules by one Parameter, transposed where it is used, or copy it",
                )


def _is_flat(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements can be viewed in one dimension."""
    return tensor.layout == torch.strided and tensor.is_contiguous()


def _laid_out_as(weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of a copy of a weight: itself, if it has them."""
    if tensor.layout != torch.strided or tensor.stride() == torch.empty_like(weight, device="meta").stride():
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)


def _is_elementwise(value: Any, tensor: torch.Tensor) -> bool:
    """Return whether a state has a value for each element of a tensor."""
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _unpacked(weight: torch.Tensor, low_halves: torch.Tensor, tie_positions: torch.Tensor) -> torch.Tensor:
    """Return master weights in float32.

    The bits of a master weight, as an integer, are those of its bfloat16 weight, shifted by 16, plus the low half. An
    even bfloat16 number is the rounded value of 65,537 float32 numbers, with low halves from -2^15 to 2^15. In int16
    the last wraps around to the first, so its positions are stored: the middle to the next number, a tie of rounding.

    Args:
        weight: in bfloat16.
        low_halves: in int16.
        tie_positions: those of low halves of 2^15, as if the tensors were one-dimensional.
    """
    master = weight.float()
    bits = master.view(torch.int32).add_(low_halves)
    if len(tie_positions):  # -2^15 was added in place of 2^15
        bits.put_(tie_positions, torch.full_like(tie_positions, 2 * _HALF, dtype=torch.int32), accumulate=True)
    if not _torch.is_fake(master) and master.sum().isnan():
        # a weight that was set to 0 by hand has the low half of another, and must not become a NaN
        master = torch.where(master.isnan(), weight, master)
    return master


def _rounded(master: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write master weights, rounded to bfloat16, to ``weight``. Returns the low halves in int32, and the positions
    where they are 2^15.

    The low halves overwrite ``master``. All memory is allocated here, so that the caller cannot fail between writing
    low halves and positions.
    """
    weight.copy_(master)
    low_halves = master.view(torch.int32).sub_(weight.float().view(torch.int32))
    if _torch.is_fake(low_halves):  # a recording knows no values
        return low_halves, low_halves.new_empty(0, dtype=torch.int64)
    flat = low_halves.reshape(-1)
    table_end = flat.numel() // _ROW * _ROW
    table = flat[:table_end].view(-1, _ROW)  # comparing the maximum of each row first is faster
    rows_with_ties = (table.amax(1) >= _HALF).nonzero().squeeze(1)
    row, column = (table[rows_with_ties] == _HALF).nonzero(as_tuple=True)
    ties_after_table = (flat[table_end:] == _HALF).nonzero().squeeze(1) + table_end
    return low_halves, torch.cat([rows_with_ties[row] * _ROW + column, ties_after_table])
