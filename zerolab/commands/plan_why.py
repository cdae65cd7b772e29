"""The derivation behind each line of a plan, down to its numbers."""

from collections.abc import Mapping

import sympy as sp

from zerolab.theory import notation as n
from zerolab.theory import traffic
from zerolab.theory.derivation import Derivation
from zerolab.theory.memory import derive_16psi, derive_limit, derive_stage, padded_params
from zerolab.theory.offload import derive_intensity
from zerolab.theory.plan import Plan
from zerolab.theory.residual import derive_activations
from zerolab.theory.timeline import derive_overlap_bound


def in_numbers(d: Derivation, values: Mapping[sp.Symbol, int], why: str) -> Derivation:
    """The derivation with its symbols replaced, as far as it has them."""
    return d.substitute({k: v for k, v in values.items() if k in d.result.free_symbols}, why)


def why(p: Plan) -> list[tuple[str, Derivation]]:
    """Pairs of a line of the plan and what it follows from."""
    s, m, group = p.strategy, p.model, p.strategy.group or p.ranks
    values = {n.Psi: padded_params(p.params - s.frozen, None, group), n.N_d: group}
    numbers = "Ψ with its padding" + (", of what trains alone" if s.frozen else "")
    within = ", within a group" if s.group else ""
    volumes = traffic.sent(s.stage, s.recipe, micro_batches=s.accumulation, exact=True,
                           reduce_bytes=s.reduce_bytes)  # fmt: skip
    parts = {name: volume for name, volume in volumes.items() if volume != 0}
    reason, unit = traffic.schedule(s.stage).reason, "bytes sent per rank and step"
    exact = Derivation("Traffic in its exact form", parts, reason, unit=unit)
    found = [
        ("held, unsharded", derive_16psi(s.recipe)),
        ("held, total", in_numbers(derive_stage(s.stage, s.recipe), values, numbers)),
    ]
    if s.stage:
        found.append(("held, against no sharding", derive_limit(s.stage, s.recipe)))
    found += [(f"sent, {name}", traffic.derive_ring(name)) for name in parts]
    papers = traffic.derive_sent(s.stage, s.recipe, s.reduce_bytes)
    found += [
        ("sent, in the papers' form", papers),
        (f"sent, total{within}", in_numbers(exact, values, numbers)),
    ]
    if s.stage:
        ratio = traffic.derive_ratio(s.stage, s.recipe, s.reduce_bytes)
        found.append(("sent, against stage 0", ratio))
    if s.accumulation > 1:
        found.append(("sent, with accumulation", traffic.derive_accumulation(s.stage)))
    if s.group:
        found.append(("sent, between groups", traffic.derive_hybrid()))
    if m.layers:
        shape = {n.L: m.layers, n.h: m.hidden, n.a: m.heads, n.s: s.sequence or m.sequence}
        shape |= {n.b: s.micro_batch, n.t: s.tensor_parallel}
        kept = derive_activations(s.recompute, s.activations)
        found.append(("besides, activations", in_numbers(kept, shape, "this model and batch")))
    if s.optimizer_on != "gpu":
        needs = derive_intensity("optimizer states")
        found.append((f"optimizer states on {s.optimizer_on}", needs))
    if p.timeline:
        found.append(("step", derive_overlap_bound()))
    return found
