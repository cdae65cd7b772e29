"""zerolab plan: tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from zerolab.commands import plan_options

if TYPE_CHECKING:
    from zerolab.theory.plan import Plan

DESCRIPTION = """What each rank holds and sends, what fits, what bounds the step, and why. Bytes are
exact, GB is 1e9 bytes, rates are of one direction. An unknown name is answered with the nearest."""


def add_plan(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    text = "bytes that each rank will hold and send"
    parser = commands.add_parser("plan", help=text, description=DESCRIPTION)
    plan_options.add_options(parser)
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Prints the answer; 1 where a published figure is not ours. ValueError for what cannot be."""
    plan_options.check(options)
    if options.published:
        return _published(options.json)
    if options.compare:
        return _compare(options)
    from zerolab.course.search import fastest
    from zerolab.theory.plan import plan

    strategy = plan_options.strategy_of(options)
    machine = plan_options.machine_of(options, strategy)
    find = fastest if options.fastest else plan
    made = find(plan_options.model_of(options), machine, strategy)
    print(json.dumps(_shown(made, options), indent=2) if options.json else _text(made, options))
    return 0


def as_dict(p: Plan) -> dict:
    """Exact ints per rank and step."""
    from zerolab.course.edges import edges

    return {
        "stage": p.strategy.stage,
        "ranks": p.ranks,
        "params": p.params,
        "recipe": p.strategy.recipe,
        "held_bytes": p.held,
        "sent_bytes": p.sent,
        "tiers": p.tiers,
        "residuals": [vars(r) for r in p.residuals],
        "fits": [{**vars(fit), "verdict": fit.verdict} for fit in p.fits],
        "verdict": p.verdict,
        "leaves_out": p.leaves_out,
        "sent_s": p.sent_s,
        "step_s": p.timeline and p.timeline.total_s,
        "bound": p.timeline and p.timeline.bound,
        "edges": [{**vars(edge), "enough": edge.enough} for edge in edges(p)],
    }


def as_text(p: Plan) -> str:
    """A small table: exact bytes, then GB (1e9)."""
    from zerolab.course.edges import edges
    from zerolab.course.search import gigabytes as gb

    rows = [f"{p.model.name}, stage {p.strategy.stage}, {p.ranks} ranks, {p.strategy.recipe}"]
    for side, sizes in (("held", p.held), ("sent", p.sent)):
        for name, size in sizes.items():
            row = f"  {side} {name:17}{size:>22,} B  {gb(size, 3):>14}"
            rows.append(f"{row}  {p.tiers.get(name, '') if side == 'held' else ''}".rstrip())
    for r in p.residuals:
        rows.append(f"  besides, on {r.tier}: {r.name}, {gb(r.low)} to {gb(r.high)} ({r.source})")
    for f in p.fits:
        where = f.tier if f.tier == "gpu" else f"{f.tier} of a node"
        need = f"{gb(f.low_bytes)} to {gb(f.high_bytes)}"
        rows.append(f"  {where}: {need} of {gb(f.capacity_bytes)}: {f.verdict}")
    if p.timeline:
        rows.append(f"  step {p.timeline.total_s:.3f} s, bound by {p.timeline.bound}")
        rows += [f"  edge {edge}" for edge in edges(p)]
    elif p.sent_s is not None:
        rows.append(f"  sent in {p.sent_s:.3f} s at the link's rate, without latency or overlap")
    return "\n".join([*rows, f"  per rank and step; leaves out {p.leaves_out}"])


def _shown(p: Plan, options: argparse.Namespace) -> dict:
    """The plan and what else was asked for."""
    from zerolab.commands.plan_why import why
    from zerolab.course.search import what_next
    from zerolab.course.typed import deepspeed_config, pytorch_lines

    shown = {**as_dict(p), "next": what_next(p)}
    if options.fastest:
        shown |= {"strategy": vars(p.strategy), "tokens_per_s": p.tokens_per_s}
    if options.type:
        shown["pytorch"] = pytorch_lines(p)
        try:
            shown["deepspeed"] = deepspeed_config(p)
        except ValueError as error:
            shown["deepspeed"] = str(error)
    if options.why:
        shown["why"] = [{"line": line, "derivation": str(d)} for line, d in why(p)]
    return shown


def _text(p: Plan, options: argparse.Namespace) -> str:
    from zerolab.course.search import changes
    from zerolab.theory.strategy import Strategy

    shown, blocks = _shown(p, options), [as_text(p)]
    if options.fastest:
        stage = p.strategy.stage
        how = f"--stage {stage} {changes(Strategy(stage), p.strategy)}".rstrip()
        blocks.append(f"Fastest of those tried: {how}; {p.tokens_per_s:,.0f} tokens/s")
    if shown["next"]:
        blocks.append("\n  ".join(["What to try next:", *shown["next"]]))
    if options.type:
        said = shown["deepspeed"]
        said = said if isinstance(said, str) else json.dumps(said, indent=2)
        blocks += ["PyTorch:\n" + shown["pytorch"], "DeepSpeed:\n" + said]
    if options.why:
        blocks += [f"{entry['line']}:\n{entry['derivation']}" for entry in shown["why"]]
    return "\n\n".join(blocks)


def _compare(options: argparse.Namespace) -> int:
    """One question under all recipes, then the public calculators' answers."""
    from zerolab.course.compare import compare
    from zerolab.course.search import gigabytes
    from zerolab.theory.catalog import model
    from zerolab.theory.memory import RECIPES

    m = model(plan_options.model_of(options), options.tied)
    ranks, stage = plan_options.machine_of(options).gpus, options.stage
    answers = compare(m.params, ranks, stage, largest_layer=m.vocabulary * m.hidden)
    if options.json:
        shown = [{"ours": answer.who in RECIPES, **vars(answer)} for answer in answers]
        question = {"params": m.params, "ranks": ranks, "stage": stage}
        print(json.dumps({"question": question, "answers": shown}, indent=2))
        return 0
    print(f"{m.name}, stage {stage}, {ranks} ranks: bytes of states per GPU, no activations")
    for title, ours in (("ours, by recipe", True), ("public calculators", False)):
        print(f"{title}:")
        for answer in answers:
            if (answer.who in RECIPES) == ours:
                size, times = answer.num_bytes, answer.num_bytes / answers[0].num_bytes
                cells = f"{size:>19,} B {gigabytes(size):>12} {times:6.2f}x"
                print(f"  {answer.who:33}{cells}  {answer.convention}")
    print(f"x: times {answers[0].who}; a calculator that is not listed has no answer here")
    return 0


def _published(as_json: bool) -> int:
    """Every published figure beside ours; 1 where one differs."""
    from zerolab.course.oracles import EXCLUDED, disagreements, rows

    table = rows()
    agrees = not disagreements(table)
    if as_json:
        shown = [{"source": row.source, "what": row.what, "published": row.published,
                  "ours": row.printed, "agrees": row.agrees} for row in table]  # fmt: skip
        left_out = [{"what": what, "why": why} for what, why in EXCLUDED]
        print(json.dumps({"agrees": agrees, "rows": shown, "left_out": left_out}, indent=2))
        return 0 if agrees else 1
    columns = "{:23} {:57} {:34} {:34} {}"
    print(columns.format("source", "what", "published", "ours", ""))
    for row in table:
        verdict = "agrees" if row.agrees else "DIFFERS"
        print(columns.format(row.source, row.what, row.published, row.printed, verdict))
    print(f"{sum(row.agrees for row in table)} of {len(table)} rows agree; left out:")
    for what, why in EXCLUDED:
        print(f"  {what}: {why}")
    return 0 if agrees else 1
