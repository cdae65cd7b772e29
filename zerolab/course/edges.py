"""The bandwidth that each edge of a plan needs if its bytes are to hide behind the computation."""

from __future__ import annotations

from dataclasses import dataclass

from zerolab.theory.offload import below
from zerolab.theory.plan import Plan


@dataclass(frozen=True)
class Edge:
    """An edge: bytes in a step both ways, the rate that hides them, the rate there is.

    Between GPU and CPU they are one GPU's, between CPU and NVMe one node's. Both ways share the
    rate, as in the plan's timeline.
    """

    name: str
    num_bytes: int
    needs_bytes_per_s: float
    has_bytes_per_s: float

    @property
    def enough(self) -> bool:
        return self.needs_bytes_per_s <= self.has_bytes_per_s

    def __str__(self) -> str:
        needs, has = self.needs_bytes_per_s / 1e9, self.has_bytes_per_s / 1e9
        verdict = "enough" if self.enough else f"{needs / has:.1f} times too slow"
        size = f"{self.num_bytes / 1e9:.2f} GB a step"
        return f"{self.name}: {size}, needs {needs:.2f} GB/s, has {has:.2f} GB/s: {verdict}"


def edges(p: Plan) -> tuple[Edge, ...]:
    """The edges below the GPUs that a plan uses; none where it has no timeline or no offload."""
    s, c = p.strategy, p.cluster
    if s.optimizer_on == "gpu" or s.stage == 0 or p.timeline is None:
        return ()
    schedule = "stream" if s.stage > 1 else "plain"
    moved = below(
        s.stage, s.group or p.ranks, p.params, None, s.recipe, s.optimizer_on, s.parameters_on,
        schedule, s.accumulation,
    )  # fmt: skip
    busy_s = p.timeline.busy_s("compute")
    node = c.gpus_per_node // s.tensor_parallel
    found = [
        ("GPU and CPU", moved.down + moved.up, c.host_bytes_per_s),
        ("CPU and NVMe", (moved.read + moved.written) * node, c.nvme_bytes_per_s),
    ]
    return tuple(Edge(name, size, size / busy_s, has) for name, size, has in found if size)
