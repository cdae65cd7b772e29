"""From one plan to others: what to try next, and the fastest that fits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from zerolab.theory.catalog import GPUS, Cluster, Model, cluster, model
from zerolab.theory.notation import STAGES, TIERS
from zerolab.theory.plan import Plan, plan
from zerolab.theory.strategy import Strategy

VERDICTS = ("fits", "tight", "does not fit")
BATCHES = (1, 2, 4, 8, 16, 32)


def gigabytes(num_bytes: float, digits: int = 2) -> str:
    """Bytes for people: decimal GB (1e9 bytes)."""
    return f"{num_bytes / 1e9:,.{digits}f} GB"


def _plans(m: Model, c: Cluster, base: Strategy, stages: Iterable[int],
           batches: Iterable[int], same_batch: bool = False) -> list[Plan]:  # fmt: skip
    """Plans of all possible ways to vary stage, recomputation, tiers and micro-batch."""
    found, recomputes = [], dict.fromkeys((base.recompute, "full"))
    for stage, recompute, opt, par, batch in product(stages, recomputes, TIERS, TIERS, batches):
        times = base.accumulation * base.micro_batch // batch if same_batch else base.accumulation
        try:
            s = replace(base, stage=stage, recompute=recompute, optimizer_on=opt,
                        parameters_on=par, micro_batch=batch, accumulation=times)  # fmt: skip
            found.append(plan(m, c, s))
        except ValueError:  # this cluster or stage cannot do it
            continue
    return found


def changes(old: Strategy, new: Strategy) -> str:
    """What is different in `new`, as options of `zerolab plan`."""
    different = {name: value for name, value in vars(new).items() if value != vars(old)[name]}
    moved = [f"{name[:-3]}={tier}" for name, tier in different.items() if name.endswith("_on")]
    rest = [f"--{name.replace('_', '-')} {value}" for name, value in different.items()
            if not name.endswith("_on")]  # fmt: skip
    return " ".join([*rest, *(["--offload " + ",".join(moved)] if moved else [])])


def what_next(p: Plan, most: int = 6) -> tuple[str, ...]:
    """The changes nearest to a plan that make it fit, fewest first, and the fewest GPUs otherwise.

    The global batch stays: a smaller micro-batch is accumulated. Empty where the plan fits.
    """
    s = p.strategy
    if not p.cluster.gpu or p.verdict == "fits":
        return ()
    batches = sorted({s.micro_batch, 1}, reverse=True)
    tries = _plans(p.model, p.cluster, s, range(s.stage, 4), batches, same_batch=True)
    rank = VERDICTS.index
    better = [q for q in tries if rank(q.verdict) < rank(p.verdict)]
    better.sort(key=lambda q: (rank(q.verdict), len(vars(s).items() - vars(q.strategy).items())))
    texts = [f"{changes(s, q.strategy)}: {q.verdict}, {gigabytes(q.fits[0].low_bytes)} on the GPU"
             for q in better[:most]]  # fmt: skip
    states = plan(p.model, 1, Strategy(recipe=s.recipe)).held["total"]
    floor = states // GPUS[p.cluster.gpu].memory_bytes + 1
    return (*texts, f"without offload, stage 3 needs at least {floor} such GPUs for states")


def fastest(which: str | float | Model, on: str | Cluster, base: Strategy | None = None,
            batches: Sequence[int] = BATCHES, tight: bool = True) -> Plan:  # fmt: skip
    """The plan with most tokens per second among those that fit; ValueError where none does.

    `tight` admits plans that fit only without the worst of fragmentation.
    """
    if not cluster(on).gpu:
        raise ValueError("The fastest needs a GPU's speed and memory: name a device or a cluster.")
    m, c, allowed = model(which), cluster(on), VERDICTS[: 1 + tight]
    fitting = [p for p in _plans(m, c, base or Strategy(), STAGES, batches) if p.verdict in allowed]
    if not fitting:
        raise ValueError(f"Nothing tried fits {m.name} on {c.name}; more nodes or tiers may.")
    best = max(fitting, key=lambda p: p.tokens_per_s)
    if not best.timeline:
        raise ValueError("The fastest needs speeds: give a sequence and, over nodes, a link.")
    return best
