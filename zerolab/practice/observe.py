"""Watches any engine or step function on this rank, and tells what it held and sent.

What is watched is `make(model, comm)` or `make(model)`: it gets a small GPT with fp32 weights, the
same on every rank, and returns either an engine with `backward(loss)` and `step()`, as the stages
have, or a function `step(tokens, targets)` that makes a whole step.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerolab.practice import data
from zerolab.practice.comm import Comm
from zerolab.practice.gpt import GPT, GPTConfig, num_parameters
from zerolab.practice.measure import digest, loopback_at_rest
from zerolab.practice.meter import Meter, hear_resizes, label, steady, young_garbage
from zerolab.practice.peers import Peer, local, peer_named

MODEL = GPTConfig()
Make = Callable[..., Any]


@dataclass(frozen=True)
class Seen:
    """What one rank showed; bytes, sent ones per step.

    params         of the model, all ranks together hold at least these
    element        bytes of a parameter while it works: 4, or 2 in 16 bits
    held           after the last backward and before the update, by kind; "other" is nameless
    kept           the same after the step, when gradients have gone
    peak           the largest sum of live bytes inside a step of one micro-batch
    sent           bytes by collective, in a step of one micro-batch
    elements       the same in elements
    elements_of_2  the same for a step of two micro-batches; None for a function of a whole step
    wire           bytes on the loopback in that step, all ranks together; None where not counted
    weights        digests of the parameters that are here (of all that is, where none are), after
                   the second step and after the third
    """

    params: int
    element: int
    held: dict[str, int]
    kept: dict[str, int]
    peak: int
    sent: dict[str, int]
    elements: dict[str, int]
    elements_of_2: dict[str, int] | None
    wire: int | None
    weights: tuple[str, str]


class Witness(Meter):
    """A meter that counts what is sent in elements as well, whatever their size.

    An all-reduce of one element, a norm or a flag, is control and no state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def _book(self, op: str, args: Any) -> None:
        before, sending = Counter(self.sent), self.sending
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if op == "allreduce_" and sum(t.numel() for t in tensors) == 1:
            self.sending = "control"
        super()._book(op, args)
        self.sending = sending
        size = next((t.element_size() for t in tensors), 1)
        for name, num_bytes in (self.sent - before).items():
            self.elements[name] += num_bytes // size

    def alive(self) -> dict[int, tuple[int, str]]:
        """Bytes and kind of each storage that lives now, and goes on living a moment later."""
        gc.collect()
        return steady(self._sizes)

    def _sizes(self) -> dict[int, tuple[int, str]]:
        self.held()
        return {key: (size, kind) for key, (_, size, kind, _) in self._live.items() if size}


def load(file: str, function: str) -> Make:
    """The function of a Python file; ValueError, in one sentence, where there is none."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"There is no file {file}: name one, as in steps.py:make.")
    name = f"zerolab_watched_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file: its name must end in .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{file} cannot be run: {type(error).__name__}: {error}.") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and v.__module__ == name]
        has = f"it has {', '.join(names)}" if names else "it has none"
        raise ValueError(f"{file} has no function {function}: {has}.")
    return found


def observe(make: Make | tuple[str, str] | str, config: GPTConfig = MODEL) -> Seen:
    """Trains with what `make` returns and tells what the meter saw (call it on all ranks).

    `make` may also be a file and the name of a function in it, or the name of a peer. TypeError
    for what does not return an engine or a step.
    """
    if isinstance(make, str):
        make = peer_named(make)
    elif isinstance(make, tuple):
        make = load(*make)
    comm, model = Comm(), GPT(config)
    with young_garbage():
        with Witness() as meter, hear_resizes(meter):
            engine = _made(make, model, comm)
            train = _Training(engine, model, comm, meter)
            train.step(1)
            train.step(1)  # DDP regroups its buckets after a first step
            early = train.fingerprint()
            held, kept = train.step(1), train.kept
            peak, sent, elements = meter.peak, meter.sent_bytes(), dict(meter.elements)
            late = train.fingerprint()
            elements_of_2 = None
            if train.by_phases:
                train.step(2)
                elements_of_2 = dict(meter.elements)
        start = loopback_at_rest()
        train.step(1)
        end = loopback_at_rest()
    return Seen(
        params=num_parameters(GPT(config)),
        element=train.element,
        held=held,
        kept=kept,
        peak=peak,
        sent=sent,
        elements=elements,
        elements_of_2=elements_of_2,
        wire=None if start is None or end is None else end - start,
        weights=(early, late),
    )


def _made(make: Make, model: GPT, comm: Comm) -> Any:
    try:
        wanted = len([p for p in inspect.signature(make).parameters.values()
                      if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD])  # fmt: skip
    except (TypeError, ValueError):
        wanted = 2
    name = getattr(make, "__name__", "the function")
    if wanted not in (1, 2):
        raise TypeError(
            f"{name} takes {wanted} arguments: it must take (model, comm), or (model), and return "
            "an engine with backward(loss) and step(), or a function step(tokens, targets)."
        )
    engine = make(model, comm) if wanted == 2 else make(model)
    if not (callable(engine) or _is_engine(engine)):
        raise TypeError(
            f"{name} returned {type(engine).__name__}: it must return an engine with "
            "backward(loss) and step(), or a function step(tokens, targets)."
        )
    return engine


def _is_engine(thing: Any) -> bool:
    return callable(getattr(thing, "backward", None)) and callable(getattr(thing, "step", None))


def _parameters(model: GPT, engine: Any) -> list[Tensor]:
    """The parameters that compute: the model's, or those that a wrapper put in their place."""
    wrapped = getattr(engine, "model", model)
    return list((wrapped if isinstance(wrapped, torch.nn.Module) else model).parameters())


class _Training:
    """Steps of an engine or of a step function, under a meter that is cleared before each."""

    def __init__(self, engine: Any, model: GPT, comm: Comm, meter: Witness) -> None:
        self.engine, self.model, self.comm, self.meter = engine, model, comm, meter
        self.by_phases = _is_engine(engine)
        self.loss = engine.loss if callable(getattr(engine, "loss", None)) else model.loss
        self.at, self.kept, self.element = 0, dict[str, int](), 4

    def step(self, micro_batches: int) -> dict[str, int]:
        """Makes a step; returns what is held after its last backward, by kind."""
        meter, begin = self.meter, self.meter.alive()
        meter.sent.clear()
        meter.elements.clear()
        meter.reset_peak()
        middle: dict[int, tuple[int, str]] = {}
        if self.by_phases:
            for _ in range(micro_batches):
                loss = self.loss(*self._batch())
                self.engine.backward(loss / micro_batches)
                del loss
            middle = self._look()
            self.engine.step()
        else:
            with _after_backward(lambda: middle.update(self._look())):
                self.engine(*self._batch())
        end = meter.alive()
        # what nobody named, came with this step's backward and went with its update: gradients
        for key in set(middle) - set(begin) - set(end):
            if middle[key][1] == "other":
                middle[key] = (middle[key][0], "gradients")
        self.kept = _totals(end)
        return _totals(middle or end)

    def fingerprint(self) -> str:
        """A digest of the parameters that this rank holds; where it holds none, of everything."""
        here = [local(p.detach()) for p in _parameters(self.model, self.engine)]
        here = [t for t in here if t.untyped_storage().nbytes()]
        if not here:
            found = [reference() for reference, *_ in list(self.meter._live.values())]
            here = [torch.empty(0, dtype=torch.uint8).set_(s) for s in found if s is not None]
        return digest(torch.cat([t.float().flatten() for t in here]))

    def _batch(self) -> tuple[Tensor, Tensor]:
        batch = data.batch(self.at, self.comm.rank, self.comm.world_size)
        self.at += 1
        return batch

    def _look(self) -> dict[int, tuple[int, str]]:
        """What lives now; parameters and gradients get names if they have none."""
        if isinstance(self.engine, Peer):
            self.engine.label_states()
        for parameter in _parameters(self.model, self.engine):
            self.element = parameter.element_size()
            for tensor, kind in ((parameter, "parameters"), (parameter.grad, "gradients")):
                if tensor is not None:
                    storage = local(tensor).untyped_storage()
                    if not hasattr(storage, "zerolab_kind"):
                        label(local(tensor), kind)
        return self.meter.alive()


def _totals(alive: dict[int, tuple[int, str]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for size, kind in alive.values():
        totals[kind] += size
    return dict(totals)


@contextlib.contextmanager
def _after_backward(look: Callable[[], None]) -> Iterator[None]:
    """Looks each time that a backward pass inside has ended."""
    backward = torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        look()

    torch.autograd.backward = watched
    try:
        yield
    finally:
        torch.autograd.backward = backward
