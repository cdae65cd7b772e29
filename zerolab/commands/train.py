"""`zerolab train`: the small GPT learns to add, on ranks of its own or on a launcher's."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab.practice.precision import LossScale

from zerolab.commands import expect_folder
from zerolab.commands.offload import add_offload, expect_offload, offload_of

CALL_STEPS = 5  # steps between two signs of life
CALL_LIMIT_S = 3600.0  # for one call: training is slow on some machines, and Ctrl-C is there
LARGEST_SEED = 2**32  # each rank makes a seed of its own of it, which torch keeps in 64 bits
BARS = "▁▂▃▄▅▆▇█"


def add_train(commands: Any) -> None:
    """Adds the command."""
    train = commands.add_parser(
        "train",
        help="train the small GPT to add, at any stage",
        description="Trains the small GPT on sums. On two ranks and two cores it takes about a "
        "minute; the answers turn right late and fast, between steps 200 and 400. Under torchrun "
        "or srun it runs on their ranks. torchrun's own port is open to others on the network: "
        "use it where only you, or people you trust, can reach it.",
    )
    train.add_argument("--stage", type=int, required=True, help="ZeRO stage")
    train.add_argument("--ranks", type=int, help="processes (default: the launcher's, or 2)")
    train.add_argument("--steps", type=int, default=600, help="steps in all (default 600)")
    train.add_argument("--recipe", default="adamw-mixed", help="precision recipe")
    train.add_argument("--micro-batches", type=int, default=1, help="per rank and step (default 1)")
    train.add_argument("--clip", type=float, default=1.0,
                       help="largest norm of the gradient (default 1; inf: any)")  # fmt: skip
    train.add_argument("--seed", type=int, default=0, help="of weights and dropout (default 0)")
    train.add_argument("--every", type=int, default=50,
                       help="steps between two evaluations and saves (default 50)")  # fmt: skip
    train.add_argument("--checkpoint", type=Path, metavar="DIR",
                       help="folder to save to; one that all hosts share")  # fmt: skip
    train.add_argument("--resume", action="store_true",
                       help="go on from the last one there, of any stage and ranks")  # fmt: skip
    add_offload(train)
    train.add_argument("--device-memory", metavar="SIZE", help="of a toy device, such as '8 MB'")
    train.add_argument("--json", action="store_true", help="print one JSON object")
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from zerolab.practice.launcher import rank
    from zerolab.practice.launcher.launch import launched
    from zerolab.practice.snapshots import finished

    a = arguments
    _refuse_nonsense(a, [path.name for path in finished(a.checkpoint)] if a.checkpoint else [])
    by_launcher = launched()
    size = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") if by_launcher else None
    if size and a.ranks not in (None, int(size)):
        raise ValueError(f"the launcher started {size} ranks: leave --ranks {a.ranks} away.")
    if by_launcher and a.device_memory:
        raise ValueError("a launcher's ranks have no toy device: leave --device-memory away.")
    a.ranks = int(size) if size else 2 if a.ranks is None else a.ranks
    progress = _Progress(a)
    try:
        _run(a, progress)
    except KeyboardInterrupt:
        kept = finished(a.checkpoint) if a.checkpoint else []
        after = "nothing was saved: with --checkpoint DIR one can go on"
        if kept:
            after = f"{kept[-1]} is kept, and --resume goes on from it"
        raise KeyboardInterrupt(f"stopped after step {progress.steps}; {after}") from None
    finally:
        progress.end_line()
    if progress.speaks:
        print(json.dumps(progress.as_dict(), indent=2) if a.json else progress.as_text())
    if by_launcher:
        rank.end()  # gloo now and then aborts a process that ends in another way
    return 0


def _refuse_nonsense(a: argparse.Namespace, there: list[str]) -> None:
    from zerolab.practice.measure import STAGES
    from zerolab.practice.precision import precision_of

    precision_of(a.recipe)
    if a.stage not in STAGES:
        raise ValueError(f"there is no stage {a.stage}: choose one of 0, 1, 2, 3.")
    for name in ("steps", "micro_batches", "every"):
        if getattr(a, name) < 1:
            given = f"--{name.replace('_', '-')} {getattr(a, name)}"
            raise ValueError(f"{given} trains nothing: it must be at least 1.")
    if not a.clip > 0:
        raise ValueError(f"--clip {a.clip:g} leaves no gradient: it must be above 0.")
    if abs(a.seed) >= LARGEST_SEED:
        raise ValueError(f"--seed {a.seed} is too large: it must be below {LARGEST_SEED}.")
    expect_offload(a)
    if a.offload:
        offload_of(a).check(a.stage, a.recipe)
    if a.resume and not a.checkpoint:
        raise ValueError("--resume needs --checkpoint DIR, the folder to go on from.")
    if there and not a.resume:
        raise ValueError(
            f"{a.checkpoint} already holds {there[-1]}: add --resume to go on from it, or name "
            "another folder."
        )
    if a.checkpoint and (a.checkpoint.is_dir() or not a.resume):
        expect_folder("--checkpoint", a.checkpoint)  # not only when the first one is saved


def _run(a: argparse.Namespace, progress: _Progress) -> None:
    from zerolab.course.advice import what_would_help
    from zerolab.practice.gpt import GPT, num_parameters
    from zerolab.practice.precision import precision_of
    from zerolab.practice.train import Training, on_rank
    from zerolab.practice.world import RankError, World

    below = offload_of(a) if a.offload else None
    training = Training(a.stage, a.recipe, a.micro_batches, a.clip, a.seed, offload=below)
    folder = str(a.checkpoint.absolute()) if a.checkpoint else None
    toy = {"device_memory": a.device_memory} if a.device_memory else {}
    with World(a.ranks, timeout=CALL_LIMIT_S, **toy) as world:
        progress.ranks = world.size

        def call(*what: Any) -> Any:
            try:
                answer = world.run(on_rank, *what)[0]
            except RankError as error:
                params, recipe = num_parameters(GPT()), precision_of(a.recipe).bytes_of
                advice = what_would_help(error, a.stage, world.size, params, recipe)
                if not advice:
                    raise
                raise RankError(f"{error}. {advice}") from None
            if isinstance(answer, Exception):
                raise answer
            return answer

        progress.steps, _, progress.curve, _ = call("begin", training, folder, a.resume)
        if progress.steps >= a.steps:
            raise ValueError(f"step {progress.steps} was reached already: give a larger --steps.")
        while progress.steps < a.steps:
            to_evaluation = min(a.every - progress.steps % a.every, a.steps - progress.steps)
            steps = min(CALL_STEPS, to_evaluation)
            progress.show(*call("advance", steps, steps == to_evaluation))


class _Progress:
    """How far the training is: a bar where stderr is a terminal, else a line each evaluation."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.ranks, self.steps = a, 0, 0
        self.curve: list[tuple[int, float, float]] = []
        self.loss_scale: LossScale | None = None
        self.terminal, self.open_line = sys.stderr.isatty(), False

    @property
    def speaks(self) -> bool:
        """Of a launcher's processes the first one speaks."""
        return os.environ.get("RANK", "0") == "0"

    def show(
        self,
        steps: int,
        loss: float,
        curve: list[tuple[int, float, float]],
        loss_scale: LossScale | None,
    ) -> None:
        """Draws where the training is now."""
        evaluated = len(curve) > len(self.curve)
        self.steps, self.curve, self.loss_scale = steps, curve, loss_scale
        if not self.speaks or not (self.terminal or evaluated):
            return
        right = f", {curve[-1][2]:.1%} right at step {curve[-1][0]}" if curve else ""
        scale = f", {loss_scale}" if loss_scale else ""
        text = f"step {steps:,} of {self.a.steps:,}, loss {loss:.3f}{right}{scale}"
        if self.terminal:
            done = min(20, 20 * steps // self.a.steps)
            text = f"\r[{'#' * done}{'.' * (20 - done)}] {text} "
        print(text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)
        self.open_line = self.terminal

    def end_line(self) -> None:
        """What is printed next begins on a line of its own."""
        if self.open_line:
            print(file=sys.stderr)
        self.open_line = False

    def as_dict(self) -> dict[str, Any]:
        """The training as plain numbers and strings, for JSON."""
        a, kept = self.a, None
        if a.checkpoint:
            from zerolab.practice.snapshots import finished

            kept = str(finished(a.checkpoint)[-1])
        return {
            "stage": a.stage,
            "ranks": self.ranks,
            "recipe": a.recipe,
            "steps": self.steps,
            "loss": self.curve[-1][1],
            "right": self.curve[-1][2],
            "curve": [dict(zip(("step", "loss", "right"), point, strict=True))
                      for point in self.curve],
            "loss_scale": self.loss_scale and self.loss_scale.scale,
            "skipped_steps": self.loss_scale.skipped_steps if self.loss_scale else 0,
            "checkpoint": kept,
        }  # fmt: skip

    def as_text(self) -> str:
        """How loss and right answers went, one sign an evaluation, and where they ended."""
        made = self.as_dict()
        losses, rights = ([point[place] for point in self.curve] for place in (1, 2))
        return "\n".join([
            f"stage {self.a.stage} on {self.ranks} ranks, {self.steps:,} steps, {self.a.recipe}",
            f"loss           {_bars(losses, max(losses))}  {losses[0]:.3f} -> {losses[-1]:.3f}",
            f"right answers  {_bars(rights, 1.0)}  {rights[0]:.1%} -> {rights[-1]:.1%}",
            "of 500 sums that were kept for testing (guessing: below 1 %)",
            *([f"loss {self.loss_scale}"] if self.loss_scale else []),
            *([f"checkpoint     {made['checkpoint']}"] if made["checkpoint"] else []),
        ])  # fmt: skip


def _bars(numbers: list[float], top: float) -> str:
    """A bar for each number, in one line of text; the highest stands for `top`."""
    return "".join(BARS[min(7, int(8 * number / top))] for number in numbers)
