"""What an explorer shows is what the theory says, at every end of every control, in sentences."""

from __future__ import annotations

from itertools import product
from random import Random

import ipywidgets
import pytest

from zerolab.course import widgets
from zerolab.course.plots import FIGURE_DATA
from zerolab.course.walk import walk
from zerolab.course.widgets.base import WIDGET_VIEW, Explorer, View, slider
from zerolab.course.widgets.memory import differences, memory_explorer, memory_view, typed_model
from zerolab.course.widgets.offload import offload_plan, offload_planner, tier_rows
from zerolab.course.widgets.overlap import overlap_explorer, overlap_plans
from zerolab.course.widgets.shards import shard_map_explorer, shard_view
from zerolab.theory.catalog import MODELS, NODES, Cluster
from zerolab.theory.memory import RECIPES, held_bytes
from zerolab.theory.plan import plan
from zerolab.theory.strategy import Strategy

EXPLORERS = {
    "memory": memory_explorer,
    "overlap": overlap_explorer,
    "shards": shard_map_explorer,
    "offload": offload_planner,
}


def cells(view: View, row: str) -> tuple[str, ...]:
    """The row of a view's table that begins so."""
    (found,) = [line for line in view.table if line[0] == row]
    return found[1:]


def ends(control) -> list:
    """The first and the last thing that a control can be set to."""
    if isinstance(control, ipywidgets.Combobox):
        return ["1", "1e14", control.options[0], control.options[-1]]
    values = [o[1] if isinstance(o, tuple) else o for o in control.options]
    return [values[0], values[-1]]


@pytest.fixture(params=EXPLORERS)
def explorer(request):
    return EXPLORERS[request.param]()


def test_the_memory_explorer_shows_what_is_derived():
    view = memory_view("7.5e9", 64, 1, "adamw-mixed", "fsdp2-mixed", 32)
    for place, recipe in enumerate(("adamw-mixed", "fsdp2-mixed")):
        held = held_bytes(1, 64, 7.5e9, recipe)
        assert cells(view, "total")[place] == f"{held['total'] / 1e9:.2f} GB"
        assert cells(view, "left of 32 GB")[place] == f"{(32e9 - held['total']) / 1e9:.2f} GB"
    widths = [bar[2] for bar in view.numbers[0]["bars"]]
    assert widths == pytest.approx([15, 15, 90 / 64, 30, 30, 60 / 64], rel=1e-5)
    assert "adamw-mixed takes 31.41 GB and leaves 0.59 GB" in view.words
    assert "fsdp2-mixed takes 60.94 GB and does not fit: 28.94 GB too many" in view.words


def test_two_recipes_side_by_side_say_why_they_differ():
    assert differences(RECIPES["adamw-mixed"], RECIPES["deepspeed-estimator"]) == [
        "fp32 gradient none and 4"
    ]
    words = memory_view("llama2-7b", 8, 0, "adamw-mixed", "adamw-fp32", 80).words
    assert "They are 0.00 GB apart" in words, "16 bytes and 16 bytes, made of other pieces"
    assert "working parameter 2 and 4; gradient 2 and 4; master weight 4 and none." in words
    assert "apart" not in memory_view("llama2-7b", 8, 0, "adamw-mixed", "adamw-mixed", 80).words


def test_a_stage_that_no_software_of_a_recipe_has_is_said():
    words = memory_view("7e9", 8, 3, "adamw-mixed", "adamw-mixed-fp32-grads", 80).words
    assert "software behind adamw-mixed-fp32-grads has no stage 3" in words


@pytest.mark.parametrize(
    ("text", "params"),
    [("llama2-7b", 6738415616), (" 7.5e9 ", 75 * 10**8), ("7_000", 7000), ("7,000", 7000)],
)
def test_a_model_is_typed_by_name_or_by_number(text, params):
    assert typed_model(text).params == params


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Type a model's name, or a number of parameters like 7e9."),
        ("0", "A model has 1 to 1e+14 parameters here, not 0."),
        ("-7e9", "A model has 1 to 1e+14 parameters here, not -7e9."),
        ("1e30", "A model has 1 to 1e+14 parameters here, not 1e30."),
        ("nan", "A model has 1 to 1e+14 parameters here, not nan."),
        ("inf", "A model has 1 to 1e+14 parameters here, not inf."),
        ("7.5", "params must be a whole number of at least 1, not 7.5."),
        ("lama2-7b", "Model 'lama2-7b' is not known; the nearest are llama2-7b"),
    ],
)
def test_what_is_typed_out_of_range_gives_a_sentence_and_keeps_the_picture(text, sentence):
    explorer = memory_explorer()
    before = explorer.view
    explorer.controls["model"].value = text + " " if text == "" else text
    if text == "":
        explorer.controls["model"].value = ""
    assert sentence in explorer.shown.value.replace("&#x27;", "'")
    assert 'role="alert"' in explorer.shown.value
    assert explorer.view is before and "<img" in explorer.shown.value
    explorer.controls["model"].value = "gpt2"
    assert 'role="alert"' not in explorer.shown.value
    assert "124,439,808 parameters" in explorer.shown.value


def test_what_is_typed_is_shown_as_text_and_never_run():
    explorer = memory_explorer()
    explorer.controls["model"].value = "<script>x</script>"
    assert "<script" not in explorer.shown.value


def test_the_overlap_explorer_shows_the_plans_own_times():
    explorer = overlap_explorer("llama2-7b", 3, 8, 25, 4, 1)
    cluster = Cluster("8 GPUs", 8, gpu="a100-80", rank_bytes_per_s=25e9)
    strategy = Strategy(3, micro_batch=4, sequence=2048, overlap=False)
    line = plan("llama2-7b", cluster, strategy).timeline
    step, overlapped = cells(explorer.view, "the step")
    assert step == f"{line.total_s:.4g}"
    assert cells(explorer.view, "network at work")[0] == f"{line.busy_s('network'):.4g}"
    assert float(overlapped) < float(step) <= 2 * float(overlapped)
    above, below = explorer.view.numbers
    assert above["lines"][0][0][0] == pytest.approx(line.total_s, rel=1e-5)
    for axes in (above, below):
        assert sum(map(len, axes["spans"])) == 8 * 2 + 8 * 2 + 8


def test_more_prefetch_never_slows_the_overlapped_step_and_none_hides_no_gather():
    times = [
        overlap_plans("llama2-7b", 3, 8, 12, 4, ahead)[1].timeline.total_s for ahead in range(4)
    ]
    assert times[1] < times[0]
    assert times == sorted(times, reverse=True)


def test_no_model_is_given_more_tokens_than_it_can_read():
    assert overlap_plans("gpt2", 1, 8, 25, 4, 1)[0].strategy.sequence == 1024
    assert "tokens" in overlap_explorer("gpt2").view.words


@pytest.mark.parametrize(("stage", "ranks"), [*product(range(4), (1, 4))])
def test_the_map_shows_each_moment_of_the_walk(stage, ranks):
    w = walk(stage, ranks)
    for number, moment in enumerate(w.moments):
        view = shard_view(stage, ranks, number)
        assert moment.name in view.words
        assert f"{sum(w.held_bytes(moment).values()):,} bytes, padding included" in view.words
        assert len(view.table) == 1 + ranks
        if moment.sent_bytes:
            assert f"each rank sends {moment.sent_bytes:,} bytes" in view.words
        if moment.freed:
            assert "has freed" in view.words
    with pytest.raises(ValueError, match=f"moments 0 to {len(w.moments) - 1}"):
        shard_view(stage, ranks, len(w.moments))


def test_another_stage_keeps_the_moment_or_takes_its_last():
    explorer, changes = shard_map_explorer(3, 4, 19), []
    explorer.shown.observe(changes.append, "value")
    explorer.controls["stage"].value = 1
    assert len(changes) == 1, "one picture, though two sliders moved"
    assert explorer.controls["moment"].value == len(walk(1).moments) - 1
    assert (
        "Stage 1, moment 6 of 6: forget gradients; their memory waits for the next"
        in explorer.view.words
    )
    explorer.controls["stage"].value = 3
    assert "Stage 3, moment 6 of 19" in explorer.view.words
    assert "alert" not in explorer.shown.value


def test_the_planner_shows_the_plans_own_tiers_and_times():
    choice = ("llama2-70b", "dgx-a100", 3, "nvme", "cpu", "cpu", 4, 2, "overlapped")
    p = offload_plan(*choice)
    explorer = offload_planner(*choice)
    for name, held, capacity in tier_rows(p):
        (fit,) = [fit for fit in p.fits if fit.tier == name]
        assert sum(held.values()) == fit.low_bytes and capacity == fit.capacity_bytes
    assert cells(explorer.view, "disks of a node")[-1] == "fits"
    assert cells(explorer.view, "disk")[0] == f"{p.timeline.busy_s('disk'):.4g} s"
    assert f"a step takes {p.timeline.total_s:.4g} s" in explorer.view.words


def test_a_tier_that_a_stage_cannot_use_gives_the_plans_own_sentence():
    explorer = offload_planner(stage=3, optimizer="nvme")
    explorer.controls["stage"].value = 1
    assert "NVMe offload needs stage 3" in explorer.shown.value
    explorer.controls["optimizer"].value = "cpu"
    assert "alert" not in explorer.shown.value


def test_every_control_reaches_both_its_ends_with_a_picture_and_a_sentence(explorer):
    for name, control in explorer.controls.items():
        start = control.value
        for value in ends(control):
            control.value = value
            assert "<img" in explorer.shown.value and explorer.view.words, (name, value)
            assert 'alt=""' not in explorer.shown.value
        control.value = start


@pytest.mark.parametrize("name", EXPLORERS)
def test_corners_together_are_a_view_or_a_sentence(name):
    explorer = EXPLORERS[name]()
    sides = [ends(control)[:2] for control in explorer.controls.values()]
    corners = list(product(*sides))
    for corner in corners if len(corners) < 16 else Random(0).sample(corners, 16):
        values = dict(zip(explorer.controls, corner, strict=True))
        try:
            sentence = explorer.look(**values).words
        except ValueError as error:
            sentence = str(error)
        assert sentence.endswith("."), values


def test_every_control_has_a_label(explorer):
    assert all(control.description for control in explorer.controls.values())


def test_a_picture_does_not_depend_on_what_was_drawn_before(explorer):
    first = explorer.view.png
    slid = [c for c in explorer.controls.values() if isinstance(c, ipywidgets.SelectionSlider)]
    for control in slid:
        for _ in control.options:  # once around
            control.index = (control.index + 1) % len(control.options)
    assert explorer.view.png == first


def test_words_and_picture_and_table_change_in_one_piece(explorer):
    changes = []
    explorer.shown.observe(changes.append, "value")
    first = next(c for c in explorer.controls.values() if isinstance(c, ipywidgets.SelectionSlider))
    first.index = (first.index + 1) % len(first.options)
    assert len(changes) == 1


def test_an_explorer_carries_its_still_figure_for_readers_without_a_kernel(explorer, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "zerolab.course.widgets.base.display", lambda what, raw=False: shown.append(what)
    )
    explorer.show()
    bundle, words = shown
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == explorer.view.words
    assert bundle[FIGURE_DATA] == explorer.view.numbers
    assert bundle[WIDGET_VIEW]["model_id"] == explorer.box.model_id
    assert explorer.view.words in words.data


def test_a_start_value_that_a_slider_lacks_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="The slider ranks has no 3: choose one of 1, 2"):
        slider("ranks", [("1", 1), ("2", 2)], 3)
    with pytest.raises(ValueError, match="recipe has no 'adam': choose one of adamw-mixed"):
        memory_explorer(recipe="adam")


def test_a_mistake_in_our_own_code_is_not_hidden_as_bad_input():
    def look(ranks):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Explorer("x", {"ranks": slider("ranks", [("1", 1)], 1)}, look)


def test_the_explorers_know_all_models_nodes_and_recipes():
    assert list(overlap_explorer().controls["model"].options) == list(MODELS)
    assert list(offload_planner().controls["node"].options) == list(NODES)
    assert list(memory_explorer().controls["other"].options) == list(RECIPES)
    assert widgets.Explorer is Explorer
