"""Joint graphs made up for tests: a tape that writes forward ops and derives a backward pass, random ones, and the
shapes of networks that people train (residual, transformer, U-Net), with plausible bytes and seconds."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Kind, Ref, SavedForm, Value
from memplan.planning.levers.lever import GradientUse

MB = 1_000_000

EARLY, HELD = GradientUse(updates_early=True), GradientUse(accumulates=True)
"""Parameters are updated in the backward pass; gradients are held when the step begins."""


@dataclass
class Node:
    op: GraphOp
    inputs: tuple[int, ...]
    parameters: tuple[int, ...]
    saves: tuple[int, ...]
    split: bool
    """Whether the gradients of its parameters come from an op of their own."""


@dataclass
class Tape:
    values: list[Value] = field(default_factory=list)
    ops: list[GraphOp] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    mutations: list[tuple[int, int]] = field(default_factory=list)
    forms: list[SavedForm] = field(default_factory=list)
    smooth: set[int] = field(default_factory=set)
    """Values that a gradient is wanted of."""

    def value(self, kind: Kind, size: int, op: int | None = None) -> int:
        id = len(self.values)
        path = "" if kind in ("result", "encoded", "host") else f"{kind}{id}"
        self.values.append(Value(id, f"v{id}", kind, id, size, (size // 4,), (1,), "float32", op, path))
        if kind == "parameter":
            self.smooth.add(id)
        return id

    def raw(self, target: str, reads: Sequence[int], sizes: Sequence[int], **more: Any) -> tuple[int, ...]:
        """An op of either pass; ``sizes`` are the bytes of its results."""
        index = len(self.ops)
        makes = tuple(self.value("result", size, index) for size in sizes)
        reads = tuple(dict.fromkeys(reads))
        args = tuple(Ref(value) for value in reads)
        more.setdefault("phase", "forward")
        self.ops.append(
            GraphOp(
                index, target, args, {}, outputs=makes, returns_tuple=len(makes) != 1, reads=reads, makes=makes, **more
            )
        )
        return makes

    def op(
        self,
        target: str,
        inputs: Sequence[int],
        size: int,
        seconds: float,
        *,
        parameters: Sequence[int] = (),
        extra: Sequence[int] = (),
        saves: str | Sequence[int] = "",
        split: bool = False,
        **more: Any,
    ) -> int:
        """A forward op with one result that matters, and ``extra`` bytes of others that its backward op reads.
        ``saves``: "i" its inputs, "o" its result, or both; or the values themselves."""
        made = self.raw(target, (*inputs, *parameters), (size, *extra), seconds=seconds, **more)
        saved = list(made[1:])
        if isinstance(saves, str):
            saved += [*inputs] * ("i" in saves) + [made[0]] * ("o" in saves)
        else:
            saved += saves
        if self.smooth & {*inputs, *parameters}:
            self.smooth.add(made[0])
        node = Node(self.ops[-1], tuple(inputs), tuple(parameters), tuple(saved), split)
        self.nodes.append(node)
        return made[0]

    def finish(self, loss: int, *, ratio: float = 2.0) -> JointGraph:
        """Derive the backward pass of one output."""
        self.outputs.append(loss)
        grads = {loss: self.value("tangent", self.values[loss].bytes)}
        for node in reversed(self.nodes):
            result = node.op.makes[0]
            if result not in grads:
                continue
            wanted = [v for v in dict.fromkeys((*node.inputs, *node.parameters)) if v in self.smooth]
            parts = [wanted]
            if node.split:
                parts = [[v for v in wanted if v not in node.parameters], [v for v in wanted if v in node.parameters]]
            for part in filter(None, parts):
                self._differentiate(node, grads, part, ratio / len(parts))
        self.gradients += [(v.id, grads[v.id]) for v in self.values if v.kind == "parameter" and v.id in grads]
        return self.graph()

    def _differentiate(self, node: Node, grads: dict[int, int], wanted: list[int], ratio: float) -> None:
        gradient = grads[node.op.makes[0]]
        weights = [v for v in node.parameters if v not in wanted] if node.split else list(node.parameters)
        reads = (gradient, *node.saves, *weights)
        size = self.values[wanted[0]].bytes
        fits = len(node.saves) <= 2 and size == self.values[gradient].bytes and node.op.scratch == 0
        made = self.raw(
            node.op.target + "_backward",
            reads,
            [self.values[v].bytes for v in wanted],
            phase="backward",
            seconds=ratio * node.op.seconds,
            scratch=node.op.scratch,
            overwrites=(gradient,) if fits else (),
            gradient_of=node.op.index,
        )
        for value, part in zip(wanted, made, strict=True):
            if value not in grads:
                grads[value] = part
                continue
            old = grads[value]
            size = self.values[value].bytes
            (grads[value],) = self.raw(
                "aten.add.Tensor", (old, part), [size], phase="backward", seconds=size / 5e9, overwrites=(old, part)
            )

    def bits(self, value: int, *, whole: bool, scratch: bool = False) -> None:
        """Let a value be kept with an eighth (whole) or a thirty-second of its bytes."""
        size = self.values[value].bytes
        encoded = self.value("encoded", max(size // (8 if whole else 32), 1))
        direct = () if whole else self._direct(value)
        seconds = size / 4e9
        some = size // 2 if scratch else 0
        codec = "bits" if whole else "sign"
        self.forms.append(
            SavedForm("encode", value, encoded, codec, seconds, seconds, some, some, whole, direct, some)
        )  # fmt: skip

    def away(self, value: int, copy_seconds: float, use_seconds: float = 0.0) -> None:
        """Let a value wait in host memory."""
        host = self.value("host", 0)
        self.forms.append(SavedForm("offload", value, host, store_seconds=use_seconds, copy_seconds=copy_seconds))

    def _direct(self, value: int) -> tuple[int, ...]:
        maker = self.values[value].op
        return tuple(op.index for op in self.ops if op.gradient_of == maker and value in op.reads)

    def graph(self) -> JointGraph:
        return JointGraph(
            tuple(self.values),
            tuple(self.ops),
            tuple(self.outputs),
            tuple(self.gradients),
            tuple(self.mutations),
            tuple(self.forms),
            "2.13",
        )


# Networks


def residual(blocks: int = 16, size: int = 20 * MB, *, bottleneck: bool = True) -> JointGraph:
    """Blocks of conv, batch norm, ReLU with a way around; 16 of them are a ResNet-50."""
    tape = Tape()
    x = tape.value("input", size // 4)
    relus = list[int]()

    def conv_norm(x: int, size: int, weight: int, relu: bool) -> int:
        parameter, gamma = tape.value("parameter", weight), tape.value("parameter", 1024)
        x = tape.op("aten.convolution.default", [x], size, size * 4e-10, parameters=[parameter], saves="i")
        y = tape.op("aten.batch_norm.default", [x], size, size / 5e9, parameters=[gamma], extra=[512, 512], saves=[x])
        if relu:
            y = tape.op("aten.relu.default", [y], size, size / 6e9, saves="o", overwrites=(y,))
            relus.append(y)
        return y

    x = conv_norm(x, size, 40_000, True)
    for at in range(blocks):
        stage = at * 4 // blocks
        inner, outer = size >> stage, (2 * size if bottleneck else size) >> stage
        weight = 40_000 << (2 * stage)
        y = conv_norm(x, inner, weight, True)
        if bottleneck:
            y = conv_norm(y, inner, 9 * weight // 4, True)
        y = conv_norm(y, outer, weight, False)
        if tape.values[x].bytes != outer:
            x = conv_norm(x, outer, weight, False)
        y = tape.op("aten.add.Tensor", [y, x], outer, outer / 4e9, overwrites=(y,))
        x = tape.op("aten.relu.default", [y], outer, outer / 6e9, saves="o", overwrites=(y,))
        relus.append(x)
    pooled = tape.op("aten.mean.dim", [x], 65_536, 1e-4)
    head = tape.value("parameter", 8 * MB)
    logits = tape.op("aten.addmm.default", [pooled], 32_000, 1e-3, parameters=[head], saves="i")
    loss = tape.op("aten.nll_loss.default", [logits], 4, 1e-5, saves="i")
    tape.finish(loss)
    for relu in relus:
        tape.bits(relu, whole=False)
    return tape.graph()


def transformer(layers: int = 8, size: int = 2 * MB, *, dropout: bool = True, vocabulary: int = 16) -> JointGraph:
    """Blocks of attention and feed-forward; ``size`` is the bytes of the residual stream."""
    tape = Tape()
    tokens = tape.value("input", size // 256)
    table = tape.value("parameter", vocabulary * size // 2)
    x = tape.op("aten.embedding.default", [tokens], size, size / 2e9, parameters=[table], saves=[tokens])
    masks = list[int]()

    def norm(x: int) -> int:
        gamma = tape.value("parameter", 2048)
        return tape.op(
            "aten.native_layer_norm.default", [x], size, size / 4e9, parameters=[gamma], extra=[4096, 4096], saves=[x]
        )

    def linear(x: int, out: int, weight: int) -> int:
        parameter = tape.value("parameter", weight)
        work = weight * 1e-9 * size / 2e6
        return tape.op("aten.addmm.default", [x], out, work, parameters=[parameter], saves="i", split=True)

    def drop(x: int) -> int:
        if not dropout:
            return x
        y = tape.op(
            "aten.native_dropout.default", [x], size, size / 1e9, extra=[size // 4], random=True, overwrites=(x,)
        )
        masks.append(y + 1)
        return y

    for _ in range(layers):
        y = norm(x)
        qkv = linear(y, 3 * size, 3 * MB)
        heads = tape.op(
            "aten._scaled_dot_product_flash_attention_for_cpu.default", [qkv], size, size * 2e-9, extra=[size // 64],
            saves="io",
        )  # fmt: skip
        x = tape.op("aten.add.Tensor", [x, drop(linear(heads, size, 1 * MB))], size, size / 4e9)
        hidden = linear(norm(x), 4 * size, 4 * MB)
        hidden = tape.op("aten.gelu.default", [hidden], 4 * size, size * 2e-9, saves="i")
        x = tape.op("aten.add.Tensor", [x, drop(linear(hidden, size, 4 * MB))], size, size / 4e9)
    logits = linear(norm(x), vocabulary * size, vocabulary * size // 2)
    logp = tape.op("aten._log_softmax.default", [logits], vocabulary * size, size * 5e-9, saves="o")
    loss = tape.op("aten.nll_loss_forward.default", [logp], 4, 1e-4, saves=[tokens])
    tape.finish(loss)
    for mask in masks:
        tape.bits(mask, whole=True)
    return tape.graph()


def unet(depth: int = 4, size: int = 32 * MB) -> JointGraph:
    """Two conv-norm-ReLU a level, down and up, with a skip at every level."""
    tape = Tape()
    x = tape.value("input", size // 16)

    def double(x: int, size: int, weight: int) -> int:
        for _ in range(2):
            parameter = tape.value("parameter", weight)
            x = tape.op("aten.convolution.default", [x], size, size * 1e-9, parameters=[parameter], saves="i")
            x = tape.op("aten.instance_norm.default", [x], size, size / 4e9, extra=[512, 512], saves=[x])
            x = tape.op("aten.leaky_relu.default", [x], size, size / 6e9, saves="i", overwrites=(x,))
        return x

    skips = list[int]()
    for level in range(depth):
        skips.append(x := double(x, size >> (2 * level), 10_000 << (2 * level)))
        small = size >> (2 * level + 2)
        x = tape.op("aten.max_pool3d_with_indices.default", [x], small, size * 1e-10, extra=[2 * small], saves="i")
    x = double(x, size >> (2 * depth), 10_000 << (2 * depth))
    for level in reversed(range(depth)):
        bytes_ = size >> (2 * level)
        x = tape.op("aten.upsample.default", [x], bytes_, bytes_ * 1e-10)
        x = tape.op("aten.cat.default", [skips[level], x], 2 * bytes_, bytes_ * 3e-10)
        x = double(x, bytes_, 20_000 << (2 * level))
    tape.finish(tape.op("aten.mse_loss.default", [x], 4, 1e-4, saves="i"))
    return tape.graph()


# Random graphs


def random_graph(seed: int, ops: int = 8, *, hooks: bool = False, more_forms: bool = False) -> JointGraph:
    """A small graph with everything that a graph can have: several results, masks, random ops, encodings, writes; with
    ``hooks`` also parameters that may change as soon as their gradient is given, and with ``more_forms`` values that a
    second lever keeps a part of."""
    draw = random.Random(seed)
    tape = Tape()
    sizes = [64, 128, 256, 512]
    live = [tape.value("input", draw.choice(sizes)) for _ in range(draw.randint(1, 2))]
    buffers = [tape.value("buffer", 64) for _ in range(draw.randint(0, 1))]
    parameters = [tape.value("parameter", draw.choice(sizes)) for _ in range(draw.randint(1, 4))]
    for at in range(ops):
        inputs = draw.sample(live[-4:], min(len(live[-4:]), draw.choice([1, 1, 1, 2])))
        own = draw.sample(parameters, 1) if at == 0 or draw.random() < 0.5 else []
        size = draw.choice([*sizes, tape.values[inputs[0]].bytes])
        extra = [draw.choice(sizes) for _ in range(draw.choice([0, 0, 0, 1, 2]))]
        over = [v for v in inputs if tape.values[v].bytes == size and draw.random() < 0.6]
        live.append(
            tape.op(
                "aten.made_up.default", [*inputs, *draw.sample(buffers, len(buffers) * (draw.random() < 0.2))], size,
                draw.randint(1, 9) * 1e-3, parameters=own, extra=extra, saves=draw.choice(["", "i", "o", "io"]),
                split=draw.random() < 0.5, overwrites=tuple(over), random=draw.random() < 0.1,
                must_run_once=draw.random() < 0.05, scratch=draw.choice([0, 0, 32, 300]),
                discarded=draw.choice([0, 0, 64]), in_place_scratch=draw.choice([None, None, 0, 16, 400]),
            )
        )  # fmt: skip
        if extra and draw.random() < 0.5:
            live.insert(-1, live[-1] + 1)
    loss = live[-1]
    if draw.random() < 0.3:
        tape.outputs.append(draw.choice(live))
    if buffers and draw.random() < 0.5:
        tape.mutations.append((buffers[0], draw.choice(live)))
    tape.finish(loss)
    _decorate(tape, draw, sizes)
    _remake(tape, random.Random(f"again {seed}"))
    written = {source for _, source in tape.mutations}
    coded = {form.value for form in tape.forms}
    apart = random.Random(~seed)
    for value in [v.id for v in tape.values if v.op is not None and tape.ops[v.op].phase == "forward"]:
        if value not in written and apart.random() < (0.7 if value in coded else 0.3):
            tape.away(value, apart.choice([1e-4, 2e-3, 8e-3, 5e-2]), apart.choice([0.0, 1e-4]))
    _keep_parts(tape, random.Random(f"parts {seed}") if more_forms else None)
    for parameter in parameters if hooks else ():
        tape.values[parameter] = replace(tape.values[parameter], hooked=draw.random() < 0.5)
    return tape.graph()


def _remake(tape: Tape, draw: random.Random) -> None:
    """Ops whose first result is made again by another: of some of what they read, and of their other results."""
    for op in tape.ops:
        if op.phase == "backward" or op.random or op.must_run_once or draw.random() < 0.6:
            continue
        made, *others = op.makes
        read = sorted(draw.sample(op.reads, draw.randint(0 if others else 1, len(op.reads))))
        reads = (*read, *others)
        size = tape.values[made].bytes
        alike = [v for v in read if tape.values[v].bytes == size and tape.values[v].kind == "result"]
        over = tuple(v for v in alike if draw.random() < 0.6)
        cheaper = replace(
            op, target="aten.made_up_again.default", args=tuple(map(Ref, reads)), outputs=(made,), returns_tuple=False,
            reads=reads, makes=(made,), discarded=draw.choice([0, 0, 48]), scratch=draw.choice([0, 24, 250]),
            overwrites=over, in_place_scratch=draw.choice([None, None, 8]), seconds=op.seconds / draw.randint(2, 9),
        )  # fmt: skip
        tape.ops[op.index] = replace(op, cheaper_recompute=cheaper)


def _keep_parts(tape: Tape, draw: random.Random | None) -> None:
    """Forms of another lever that are fetched with some of what the value was made of."""
    if draw is None:
        return
    for op in tape.ops:
        if op.phase == "backward" or len(op.makes) != 1 or draw.random() < 0.4:
            continue
        (value,) = op.makes
        half = tape.value("encoded", max(tape.values[value].bytes // 2, 1))
        also = tuple(sorted(draw.sample(op.reads, draw.randint(1, len(op.reads)))))
        seconds, store, fetch = draw.randint(1, 5) * 1e-4, draw.choice([0, 20, 300]), draw.choice([0, 20, 300])
        tape.forms.append(
            SavedForm("part", value, half, "part", seconds, 3 * seconds, store, fetch, fetch_operands=also)
        )


def _decorate(tape: Tape, draw: random.Random, sizes: Sequence[int]) -> None:
    """Ops that take over saved values, gradients of inputs, shared gradients, encodings."""
    for op in tape.ops:
        if op.phase == "backward" and draw.random() < 0.4:
            size = tape.values[op.makes[0]].bytes
            some = tuple(v for v in op.reads if tape.values[v].bytes == size and tape.values[v].kind == "result")
            scratch = draw.choice([0, 16])
            tape.ops[op.index] = replace(
                op, overwrites=some, scratch=scratch, in_place_scratch=draw.choice([None, 0, 90])
            )
    backward = [v.id for v in tape.values if v.op is not None and tape.ops[v.op].phase == "backward"]
    given = {of for of, _ in tape.gradients}
    for value in tape.values[:8]:
        if value.id not in given and backward and value.kind == "input" and draw.random() < 0.5:
            tape.gradients.append((value.id, draw.choice(backward)))
    forward = [v.id for v in tape.values if v.op is not None and tape.ops[v.op].phase == "forward"]
    for value in draw.sample(forward, min(3, len(forward))):
        whole = draw.random() < 0.5
        readers = [op.index for op in tape.ops if op.phase == "backward" and value in op.reads]
        direct = tuple(draw.sample(readers, draw.randint(0, len(readers))))
        if not whole and not direct:
            continue
        encoded = tape.value("encoded", draw.choice([8, 16, 32]))
        scratch = [draw.choice([0, 24, 200]) for _ in range(3)]
        seconds = [draw.randint(1, 3) * 1e-4 for _ in range(2)]
        codec = "bits" if whole else "sign"
        tape.forms.append(
            SavedForm(
                "encode", value, encoded, codec, seconds[0], seconds[1], scratch[0], scratch[1], whole, direct,
                scratch[2],
            )
        )  # fmt: skip


def kept(**levers: Iterable[int]) -> frozenset[tuple[str, int]]:
    """Values by the lever that keeps them, as `Choices.saved_forms` has them."""
    return frozenset((lever, value) for lever, values in levers.items() for value in values)


def all_kept(graph: JointGraph, *levers: str) -> frozenset[tuple[str, int]]:
    """Every form that these levers offer."""
    return frozenset((form.lever, form.value) for form in graph.forms if form.lever in levers)


def may_follow(graph: JointGraph, ran: Collection[int]) -> list[GraphOp]:
    """The backward ops that can run next: all that makes what they read ran, and so did all before them that draw or
    have an effect, if they do."""
    left = [op for op in graph.ops if op.phase == "backward" and op.index not in ran]
    missing = {value for op in left for value in op.makes}
    fixed = [op.index for op in left if op.random or op.must_run_once]
    return [op for op in left if missing.isdisjoint(op.reads) and (op.index not in fixed or op.index == fixed[0])]


def any_order(graph: JointGraph, draw: random.Random) -> tuple[int, ...]:
    """A random order in which the backward ops can run."""
    order = list[int]()
    while following := may_follow(graph, order):
        order.append(draw.choice(following).index)
    return tuple(order)
