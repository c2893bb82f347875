"""The optimum of the schedule space as a mixed-integer program, written from the rules alone: fixed order; what is not
kept is made again at most once, just before the op that first reads it, and freed after its last use.

For plain graphs: no encodings, no memory taken over, nothing written into what was handed in.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
from planning.graphs import random_graph
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from memplan.planning.graph.joint_graph import JointGraph, recomputable_values
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.scheduler import schedule


def plain_graph(seed: int, ops: int) -> JointGraph:
    """A random graph without what the program leaves out."""
    graph = random_graph(seed, ops)
    plain = [
        replace(
            op, cheaper_recompute=op.cheaper_recompute and replace(op.cheaper_recompute, overwrites=()), overwrites=()
        )
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(plain), forms=(), mutations=())


class Rules:
    """Variables and conditions; a variable is its index, a sum is {variable: factor}."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.lower: list[float] = []
        self.integer: list[int] = []
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float]] = []
        """Sum >= value."""
        self.levels: list[tuple[dict[int, float], float]] = []
        """Sum + value are bytes at some moment."""
        self.forward = graph.forward_ops
        self.at = {op.index: f for f, op in enumerate(self.forward)}
        self.bytes = {v.id: v.bytes for v in graph.values}
        self.made = {v: f for f, op in enumerate(self.forward) for v in op.makes}
        self.outputs = {graph.base(v) for v in graph.outputs}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for slot, op in enumerate(graph.backward_ops):
            for v in op.reads:
                if v in self.made:
                    self.readers[v].append(slot)
        self.slots = len(graph.backward_ops)
        self.values = [v for v in self.made if v not in self.outputs]
        self._decide()
        self._run()
        self._backward()
        self._forward()

    def variable(self, *, integer: bool = False, cost: float = 0.0, least: float = 0.0) -> int:
        self.lower.append(least)
        self.integer.append(int(integer))
        self.costs.append(cost)
        return len(self.lower) - 1

    def need(self, terms: dict[int, float], value: float) -> None:
        self.rows.append((terms, value))

    def _decide(self) -> None:
        """kept[v]; again[v, slot]: in which slot it is made again."""
        free = recomputable_values(self.graph)
        self.kept = {v: self.variable(integer=True, least=0.0 if v in free else 1.0) for v in self.values}
        self.recomputes = {(v, s): self.variable(integer=True) for v in self.values for s in range(self.slots)}
        self.users: dict[int, list[int]] = defaultdict(list)
        """Value -> values whose op reads it."""
        for op in self.forward:
            for v in op.recompute_op.reads:
                self.users[v] += op.recompute_op.makes
        for v in self.values:
            self.need({self.kept[v]: -1.0, **{self.recomputes[v, s]: -1.0 for s in range(self.slots)}}, -1.0)
            for s in range(self.slots):
                there = {self.kept[v]: 1.0, **{self.recomputes[v, t]: 1.0 for t in range(s + 1)}}
                reasons = {self.recomputes[w, s]: 1.0 for w in self.users[v] if w in self.kept}
                read = float(s in self.readers[v])
                self.need(there, read)
                for reason in reasons:
                    self.need({**there, reason: -1.0}, 0.0)
                self.need({**reasons, self.recomputes[v, s]: -1.0}, -read)

    def _run(self) -> None:
        self.runs = {
            (f, s): self.variable(cost=op.recompute_op.seconds)
            for f, op in enumerate(self.forward)
            for s in range(self.slots)
        }
        for (v, s), recompute in self.recomputes.items():
            self.need({self.runs[self.made[v], s]: 1.0, recompute: -1.0}, 0.0)

    def _backward(self) -> None:
        """The level at every position: each forward op that may run in a slot, then the slot's own op."""
        count = len(self.forward)
        total: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for v in self.values:
            later: int | None = None
            for s in reversed(range(self.slots)):
                for p in reversed(range(count + 1)):
                    use = self.variable()
                    if later is not None:
                        self.need({use: 1.0, later: -1.0}, 0.0)
                    if p == count and s in self.readers[v]:
                        self.need({use: 1.0}, 1.0)
                    for w in self.users[v]:
                        if p < count and self.made[w] == p and w in self.kept:
                            self.need({use: 1.0, self.recomputes[w, s]: -1.0}, 0.0)
                    live = self.variable()
                    upto = s + 1 if p > self.made[v] else s
                    there = {self.recomputes[v, t]: -1.0 for t in range(upto)}
                    self.need({live: 1.0, self.kept[v]: -1.0, **there, use: -1.0}, -1.0)
                    total[s, p][live] = float(self.bytes[v])
                    later = use
        before, during = self._rest(total)
        for s in range(self.slots):
            for p, op in enumerate(one.recompute_op for one in self.forward):
                own = sum(self.bytes[v] for v in op.makes) + op.discarded + op.scratch
                self.levels.append(({**total[s, p], self.runs[p, s]: float(own)}, before[s]))
            self.levels.append((total[s, count], during[s]))

    def _rest(self, total: dict[tuple[int, int], dict[int, float]]) -> tuple[list[float], list[float]]:
        """Bytes of all but forward values before each backward op, and while it runs. What follows it, before the next
        slot begins, is added as a level of its own."""
        graph = self.graph
        made = schedule(graph, Choices(in_place=False))
        resident = sum(v.bytes for v in graph.values if v.kind in ("parameter", "buffer", "input", "constant"))
        level = self.base = resident + sum(self.bytes[v] for v in self.outputs if v in self.made)
        before, during = list[float](), list[float]()
        for action in made.backward:
            if action.kind == "run" and action.op is not None:
                op = graph.ops[action.op]
                before.append(level)
                during.append(level + sum(self.bytes[v] for v in op.makes) + op.discarded + op.scratch)
            level += sum(self.bytes[v] for v in action.makes)
            if action.kind == "give" and action.returns_copy and action.value is not None:
                level += self.bytes[action.value]
            if action.kind != "run":
                self.levels.append((total.get((len(before), 0), {}), level))
            level -= sum(self.bytes[v] for v in action.frees if v not in self.made)
        return before, during

    def _forward(self) -> None:
        last = {v: self.at[op.index] for op in self.forward for v in (*op.reads, *op.makes) if v in self.made}
        saved = dict[int, int]()
        for v in self.values:
            saved[v] = self.variable()
            if self.readers[v]:
                self.need({saved[v]: 1.0, self.kept[v]: -1.0}, 0.0)
            for w in self.users[v]:
                if w in self.kept:
                    for s in range(self.slots):
                        self.need({saved[v]: 1.0, self.kept[v]: -1.0, self.recomputes[w, s]: -1.0}, -1.0)
        base = self.base - sum(self.bytes[v] for v in self.outputs if v in self.made)
        for f, op in enumerate(self.forward):
            own = base + op.discarded + op.scratch
            own += sum(self.bytes[v] for v, m in self.made.items() if m <= f and (last[v] >= f or v in self.outputs))
            gone = {saved[v]: float(self.bytes[v]) for v in self.values if last[v] < f}
            self.levels.append((gone, own))
        tangents = sum(v.bytes for v in self.graph.values if v.kind == "tangent")
        boundary = {saved[v]: float(self.bytes[v]) for v in self.values}
        self.levels.append((boundary, self.base + tangents))

    def least_seconds(self, budget: int) -> float | None:
        """The optimum; None if there is no schedule within the budget."""
        unit = float(budget)
        rows = [
            *self.rows,
            *(
                ({k: -b / unit for k, b in terms.items()}, (level - budget - 0.5) / unit)
                for terms, level in self.levels
            ),
        ]
        return self._solve(np.array(self.costs), rows)

    def smallest_peak(self) -> int:
        """The least budget that there is a schedule for."""
        budget = self.variable()
        upper = max(level + sum(terms.values()) for terms, level in self.levels)
        rows = [
            *self.rows,
            *(
                ({**{k: -b / upper for k, b in terms.items()}, budget: 1.0}, level / upper)
                for terms, level in self.levels
            ),
        ]
        costs = np.zeros(len(self.lower))
        costs[budget] = 1.0
        found = self._solve(costs, rows)
        assert found is not None
        return round(found * upper)

    def _solve(self, costs: np.ndarray, rows: list[tuple[dict[int, float], float]]) -> float | None:
        at = [row for row, (terms, _) in enumerate(rows) for _ in terms]
        columns = [column for terms, _ in rows for column in terms]
        entries = [factor for terms, _ in rows for factor in terms.values()]
        matrix = sparse.csr_matrix((entries, (at, columns)), shape=(len(rows), len(self.lower)))
        least = np.array([value for _, value in rows])
        for presolve in (True, False):
            # HiGHS' presolve calls some of these infeasible that are not: its word for it is not taken.
            found = milp(
                costs,
                integrality=np.array(self.integer),
                bounds=Bounds(np.array(self.lower), np.ones(len(self.lower))),  # pyright: ignore[reportArgumentType]
                constraints=LinearConstraint(matrix, lb=least),  # pyright: ignore[reportArgumentType]
                options={"mip_rel_gap": 1e-6, "presolve": presolve},
            )
            assert found.status in (0, 2), found.message
            if found.status == 0:
                return float(found.fun)
        return None
