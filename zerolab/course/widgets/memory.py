"""Memory explorer: what a rank holds under two recipes, and what is left for activations."""

from __future__ import annotations

from zerolab.course.plots.memory import held_bars
from zerolab.course.search import gigabytes
from zerolab.course.widgets.base import Explorer, View, canvas, chooser, numbered, slider, typed
from zerolab.theory import catalog
from zerolab.theory.memory import RECIPES, Recipe, held_bytes, recipe_named
from zerolab.theory.notation import KINDS, STAGES

RANKS = [2**power for power in range(11)]
GPU_GB = [8, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192]
MOST_PARAMS = 10**14


def typed_model(text: str) -> catalog.Model:
    """A model from what a person types: a name, or a number such as 7.5e9; ValueError else."""
    words = text.strip().replace(",", "").replace("_", "")
    try:
        number = float(words)
    except ValueError:
        if not words:
            raise ValueError("Type a model's name, or a number of parameters like 7e9.") from None
        return catalog.model(text.strip())
    if not 1 <= number <= MOST_PARAMS:
        raise ValueError(f"A model has 1 to {MOST_PARAMS:.0e} parameters here, not {words}.")
    return catalog.model(number)


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Where two recipes differ, in bytes per parameter: 'gradient 2 and 4'."""
    sizes = [dict(recipe.components) for recipe in (one, other)]
    names = dict.fromkeys([*sizes[0], *sizes[1]])
    pairs = [(name, *(size.get(name, 0) for size in sizes)) for name in names]
    return [f"{name} {a or 'none'} and {b or 'none'}" for name, a, b in pairs if a != b]


def memory_view(
    model: str, ranks: int, stage: int, recipe: str, other: str, gpu_gb: int
) -> View:  # fmt: skip
    """Bytes per rank under two recipes, beside the memory of a GPU (GB = 1e9 bytes)."""
    which = typed_model(model)
    recipes = [recipe_named(name) for name in dict.fromkeys((recipe, other))]
    held = [held_bytes(stage, ranks, which.params, each) for each in recipes]
    capacity = gpu_gb * 10**9
    left = [capacity - sizes["total"] for sizes in held]
    rows = {r.name: {kind: sizes[kind] / 1e9 for kind in KINDS}
            for r, sizes in zip(recipes, held, strict=True)}  # fmt: skip
    figure, (ax,) = canvas(7.2, 1.5 + 0.45 * len(rows), (0.29, 0.3, 0.69, 0.55))
    held_bars(ax, rows, "GB per rank", capacity / 1e9)
    head = ("per rank", *(r.name for r in recipes))
    table = [head, *((kind.replace("_", " "), *(gigabytes(sizes[kind]) for sizes in held))
                     for kind in (*KINDS, "total"))]  # fmt: skip
    table.append((f"left of {gpu_gb} GB", *map(gigabytes, left)))
    return View.of(figure, " ".join(_words(which, ranks, stage, recipes, held, left)), tuple(table))


def _words(
    which: catalog.Model, ranks: int, stage: int, recipes: list[Recipe],
    held: list[dict[str, int]], left: list[int],
) -> list[str]:  # fmt: skip
    on = f"{ranks:,} rank{'s' if ranks > 1 else ''}"
    params = f"{which.params:,} parameter{'s' if which.params > 1 else ''}"
    sentences = [f"{params} at stage {stage} on {on}."]
    for recipe, sizes, rest in zip(recipes, held, left, strict=True):
        fits = (f"leaves {gigabytes(rest)} for activations, buffers and fragmentation"
                if rest >= 0 else f"does not fit: {gigabytes(-rest)} too many")  # fmt: skip
        sentences.append(f"{recipe.name} takes {gigabytes(sizes['total'])} and {fits}.")
        if stage not in recipe.offered:
            sentences.append(f"(The software behind {recipe.name} has no stage {stage}.)")
    if len(recipes) == 2:
        apart = gigabytes(abs(held[0]["total"] - held[1]["total"]))
        why = "; ".join(differences(*recipes)) or "nothing that is stored"
        sentences.append(f"They are {apart} apart. In bytes per parameter they differ in: {why}.")
    return sentences


def memory_explorer(
    model: str = "llama2-7b", ranks: int = 8, stage: int = 1, recipe: str = "adamw-mixed",
    other: str = "adamw-mixed-fp32-grads", gpu_gb: int = 80,
) -> Explorer:  # fmt: skip
    """What a rank holds: model, ranks, stage, and two recipes side by side."""
    controls = {
        "model": typed("model or parameters", model, list(catalog.MODELS)),
        "ranks": slider("ranks", numbered(RANKS), ranks),
        "stage": slider("stage", numbered(STAGES), stage),
        "gpu_gb": slider("GPU memory", numbered(GPU_GB, " GB"), gpu_gb),
        "recipe": chooser("recipe", list(RECIPES), recipe),
        "other": chooser("another recipe", list(RECIPES), other),
    }
    return Explorer("Memory explorer", controls, memory_view)
