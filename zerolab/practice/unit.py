"""Units: groups of parameters that are flattened, reduced, gathered and freed together.

Stages 0 and 1 make the whole model one unit, since they send nothing before the step. Stages 2
and 3 make one of each module in `model.units()`, so that a unit's gradients can leave, and its
parameters come and go, while the rest of the model is still at work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from zerolab.practice.adamw import AdamW, AdamWOptions
from zerolab.practice.comm import Comm
from zerolab.practice.guards import expect_same_weights, expect_unwrapped, refuse_changes
from zerolab.practice.meter import label
from zerolab.practice.precision import Precision
from zerolab.practice.sharding import flatten, padded_numel, shard_of, views


class Unit:
    """One flat buffer of parameters, and the gradients that backward leaves in another.

    full_params   (padded numel,) working dtype; the model's parameters are views of it
    full_grads    (padded numel,) gradient dtype, from the first gradient until `drop_grads`;
                  `forget_grads` keeps the memory for the next ones
    param_shard   the part of the parameters that this rank updates, see `own`
    grad_shard    its gradients, where a stage keeps them apart; None before there are any
    adamw         its optimizer states; a frozen unit has none

    A gradient is moved here as soon as autograd has finished it, and added to what earlier
    micro-batches left. `on_complete` is called when all gradients of a backward pass are there.
    """

    full_grads: Tensor | None = None
    param_shard: Tensor
    grad_shard: Tensor | None = None
    adamw: AdamW
    on_complete: Callable[[], None] | None = None

    def __init__(
        self, named_params: list[tuple[str, nn.Parameter]], world_size: int, precision: Precision
    ) -> None:
        self.names, self.params = [n for n, _ in named_params], [p for _, p in named_params]
        self.shapes, self.precision = [p.shape for p in self.params], precision
        self.trainable = self.params[0].requires_grad
        self.numel = sum(shape.numel() for shape in self.shapes)
        self.padded = padded_numel(self.numel, world_size)
        self._initial = flatten([p.data for p in self.params], self.padded, torch.float32)
        self.full_params = label(self._initial.to(precision.working), "parameters")
        self.missing: set[int] = set(range(len(self.params)))
        self._unwritten = set(self.missing)
        for place, (param, view) in enumerate(
            zip(self.params, views(self.full_params, self.shapes), strict=True)
        ):
            param.data = view
            if self.trainable:
                param.register_post_accumulate_grad_hook(self._take(place))

    def _take(self, place: int) -> Callable[[Tensor], None]:
        start = sum(shape.numel() for shape in self.shapes[:place])
        stop = start + self.shapes[place].numel()
        me = weakref.ref(self)  # a parameter keeps its hooks, and a cycle through it never dies

        def take(param: Tensor) -> None:
            unit = me()
            if unit is not None and param.grad is not None:
                unit._accept(place, slice(start, stop), param.grad.reshape(-1))
                param.grad = None

        return take

    def _accept(self, place: int, where: slice, grad: Tensor) -> None:
        mine = self._buffer()[where]
        if place in self._unwritten:
            self._unwritten.discard(place)
            mine.copy_(grad)
        else:
            mine.add_(grad)
        self.missing.discard(place)
        if not self.missing and self.on_complete:
            self.on_complete()

    def own(
        self, world_size: int, rank: int, options: AdamWOptions | None, apart: bool = False
    ) -> None:
        """Keeps the optimizer states of one shard: the rank's, of world_size; call it once.

        `param_shard` is a view of `full_params`, or a copy that stands `apart`: then it is all that
        remains of them.
        """
        shard = shard_of(self.full_params, world_size, rank)
        self.param_shard = label(shard.clone(), "parameters") if apart else shard
        if self.trainable:
            master = self.param_shard
            if self.precision.master_weights:
                master = label(
                    shard_of(self._initial, world_size, rank).clone(), "optimizer_states"
                )
            self.adamw = AdamW(master, options)
        del self._initial
        if apart:
            self.free_params()

    def _buffer(self) -> Tensor:
        """`full_grads`, of which only the padding is written if it is new."""
        if self.full_grads is None:
            empty = self.full_params.new_empty(self.padded, dtype=self.precision.gradient)
            self.full_grads = label(empty, "gradients")
            self.full_grads[self.numel :].zero_()
            self._unwritten = set(range(len(self.params)))
        return self.full_grads

    def grads(self) -> Tensor:
        """`full_grads`, with zeros where no gradient has come."""
        full = self._buffer()
        parts = views(full, self.shapes) if self._unwritten else []
        for place in self._unwritten:
            parts[place].zero_()
        self._unwritten.clear()
        return full

    def own_grads(self) -> Tensor:
        """`grad_shard`, made of zeros if there is none yet."""
        if self.grad_shard is None:
            zeros = torch.zeros_like(self.param_shard, dtype=self.precision.gradient)
            self.grad_shard = label(zeros, "gradients")
        return self.grad_shard

    def whole(self, shard: Tensor, comm: Comm) -> dict[str, Tensor]:
        """A shard-like tensor of every rank, gathered and cut into the parameters, by name.

        `shard` is `param_shard` or a state of `adamw`. All ranks must call it.
        """
        full = shard
        if shard.numel() < self.padded:
            full = shard.new_empty(self.padded)
            comm.all_gather(full, shard)
        return dict(zip(self.names, views(full, self.shapes), strict=True))

    def drop_grads(self) -> None:
        """Frees the whole gradients; the next backward pass begins with none."""
        self.full_grads = None
        self.forget_grads()

    def forget_grads(self) -> None:
        """Lets the next backward pass write over the gradients, for a stage that holds them whole.

        New memory for them in each step would cost more than filling it: the system clears it.
        """
        self.missing = set(range(len(self.params)))
        self._unwritten = set(self.missing)

    def free_params(self) -> None:
        """Gives the memory of the whole parameters back; `param_shard` remains (stage 3)."""
        self.full_params.untyped_storage().resize_(0)
        label(self.full_params, "gathered")


def make_units(
    model: nn.Module,
    modules: Iterable[nn.Module],
    comm: Comm,
    precision: Precision,
    claim: Callable[[Unit], None] = lambda unit: None,
) -> dict[nn.Module, list[Unit]]:
    """Units of the given modules' parameters, and which of them each module needs, in order.

    A parameter that two modules share (tied weights) belongs to the unit of the first and is
    needed by both. Trainable and frozen parameters of a module are two units, so that frozen
    ones get neither gradients nor optimizer states. `claim` is called with each unit before the
    next is made, so that no second copy of the whole model arises. ValueError for a parameter in
    none of them, a model that has been given to a stage before, or one that ranks made otherwise.
    """
    expect_unwrapped(model)
    expect_same_weights(modules := list(modules), comm)
    names = {id(param): name for name, param in model.named_parameters()}
    owner: dict[int, Unit] = {}
    needs: dict[nn.Module, list[Unit]] = {}
    for module in modules:
        params = {id(p): p for p in module.parameters()}
        needs[module] = list(dict.fromkeys(owner[key] for key in params if key in owner))
        for trainable in (True, False):
            new = [(names[key], p) for key, p in params.items()
                   if key not in owner and p.requires_grad == trainable]  # fmt: skip
            if new:
                unit = Unit(new, comm.world_size, precision)
                claim(unit)
                owner |= {id(param): unit for _, param in new}
                needs[module].append(unit)
    outside = [name for key, name in names.items() if key not in owner]
    if outside:
        raise ValueError(
            f"The parameter {outside[0]} is in no unit: model.units() must list modules that "
            "hold every parameter."
        )
    refuse_changes(model, owner.values())
    return needs


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules that a model wants as units: what its method `units()` returns.

    They hold all parameters between them, stand in the order in which they run, and each runs
    once in a forward pass, on every rank: experts that ranks choose between are one module, or
    a rank would gather one while its neighbour gathers another. TypeError for a model without
    that method, or where it returns something else; ValueError for a module that is not the
    model's, or is inside of another one.
    """
    if not callable(getattr(model, "units", None)):
        raise TypeError(
            f"{type(model).__name__} has no method units(): let it return the modules, in forward "
            "order, whose parameters are gathered and freed together."
        )
    found = model.units()  # type: ignore[operator]
    in_order = isinstance(found, Iterable) and not isinstance(found, set | frozenset)
    modules = list(found) if in_order else []
    if not all(isinstance(module, nn.Module) for module in modules) or not modules:
        raise TypeError(
            "model.units() must return a list of modules, in forward order, whose parameters are "
            "gathered and freed together."
        )
    for module in modules:
        inside = set(module.modules()) - {module}
        if module not in set(model.modules()):
            raise ValueError(f"model.units() lists a {type(module).__name__} that is not in it.")
        if nested := inside.intersection(modules):
            raise ValueError(
                f"model.units() lists a {type(module).__name__} and, on its own, a "
                f"{type(nested.pop()).__name__} inside of it: list one of them."
            )
    return modules


def all_units(needs: dict[nn.Module, list[Unit]]) -> list[Unit]:
    """Each unit once, in the order of the modules that own them."""
    return list(dict.fromkeys(unit for units in needs.values() for unit in units))
