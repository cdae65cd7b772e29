"""From one plan to others: what to try next, and the fastest that fits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from zerolab.theory.catalog import GPUS, Cluster, Model, cluster, model
from zerolab.theory.notation import STAGES, TIERS
from zerolab.theory.plan import Plan, plan
from zerolab.theory.strategy import Strategy
from zerolab.theory.values import gigabytes

VERDICTS = ("fits", "tight", "does not fit")
BATCHES = (1, 2, 4, 8, 16, 32)


def _plans(m: Model, c: Cluster, base: Strategy, stages: Iterable[int],
           batches: Iterable[int], same_batch: bool = False) -> list[Plan]:  # fmt: skip
    """Plans of all possible ways to vary stage, recomputation, tiers and micro-batch."""
    found, recomputes = [], dict.fromkeys((base.recompute, "full"))
    for stage, recompute, opt, par, batch in product(stages, recomputes, TIERS, TIERS, batches):
        times = base.accumulation * base.micro_batch // batch if same_batch else base.accumulation
        try:
            strategy = replace(base, stage=stage, recompute=recompute, optimizer_on=opt,
                               parameters_on=par, micro_batch=batch, accumulation=times)  # fmt: skip
            found.append(plan(m, c, strategy))
        except ValueError:  # this cluster or stage cannot do it
            continue
    return found


def changes(old: Strategy, new: Strategy) -> str:
    """What is different in `new`, as a reader would say it."""
    different = {name: value for name, value in vars(new).items() if value != vars(old)[name]}
    return ", ".join(f"{name} {value}" for name, value in different.items())


def what_next(p: Plan, most: int = 6) -> tuple[str, ...]:
    """The changes nearest to a plan that make it fit, fewest first, and the fewest GPUs otherwise.

    The global batch stays: a smaller micro-batch is accumulated. Empty where the plan fits.
    """
    s = p.strategy
    if not p.fits or p.verdict == "fits":
        return ()
    batches = sorted({s.micro_batch, 1}, reverse=True)
    tries = _plans(p.model, p.cluster, s, range(s.stage, 4), batches, same_batch=True)
    better = [(VERDICTS.index(q.verdict), changes(s, q.strategy), q) for q in tries
              if VERDICTS.index(q.verdict) < VERDICTS.index(p.verdict)]  # fmt: skip
    better.sort(key=lambda entry: (entry[0], entry[1].count(",")))
    texts = [f"{change}: {q.verdict}, {gigabytes(q.fits[0].low_bytes)} on the GPU"
             for _, change, q in better[:most]]  # fmt: skip
    states = plan(p.model, 1, Strategy(recipe=s.recipe)).held["total"]
    floor = states // GPUS[p.cluster.gpu].memory_bytes + 1
    return (*texts, f"without offload, stage 3 needs at least {floor} such GPUs for states")


def fastest(which: str | float | Model, on: str | Cluster, base: Strategy | None = None,
            batches: Sequence[int] = BATCHES, tight: bool = True) -> Plan:  # fmt: skip
    """The plan with most tokens per second among those that fit; ValueError where none does.

    `tight` admits plans that fit only without the worst of fragmentation.
    """
    m, c, allowed = model(which), cluster(on), VERDICTS[: 1 + tight]
    fitting = [p for p in _plans(m, c, base or Strategy(), STAGES, batches) if p.verdict in allowed]
    if not fitting:
        raise ValueError(f"Nothing tried fits {m.name} on {c.name}; more nodes or tiers may.")
    return max(fitting, key=lambda p: p.tokens_per_s)
