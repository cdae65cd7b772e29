"""The checks of lesson 04: stub, solution, and near misses with their own words."""

import pytest
import torch

from zerolab import check


def stub(*_):
    raise NotImplementedError("your code here")


def expect(number, answer, points, *words):
    verdict = check(number, answer)
    assert float(verdict) == points, str(verdict)
    for word in words:
        assert word in str(verdict), str(verdict)
    return verdict


@pytest.mark.parametrize("number", ["04.1", "04.2", "04.3"])
@pytest.mark.parametrize("answer", [stub, None, ...])
def test_the_empty_stub_fails_and_is_called_not_attempted(number, answer):
    assert expect(number, answer, 0, "not attempted").status == "not attempted"


@pytest.mark.parametrize("answer", ["208 GB", 208e9, "193.7 GiB", "0.208 TB", lambda: "208 GB"])
def test_04_1_passes(answer):
    expect("04.1", answer, 1, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("193.7 GB", "GiB written as GB"),
        ("156 GB", "master copy"),
        ("26 GB", "parameters alone"),
        ("52 GB", "AdamW's states are missing"),
        ("182 GB", "without the gradient"),
        ("234 GB", "gradients of 4 bytes"),
        ("260 GB", "second, fp32 copy"),
        ("223.3 GB", "multiplied by 2^30"),
        (208, "number of GB"),
        (16, "for one parameter"),
        ("208 apples", "is not a size"),
        (["208 GB"], "a list"),
        ("1 GB", "too little"),
        ("900 GB", "too much"),
        (float("nan"), "04.1"),
    ],
)
def test_04_1_near_misses_are_named(answer, words):
    expect("04.1", answer, 0, words)


def bytes_alive(tensors):
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def test_04_2_passes():
    expect("04.2", bytes_alive, 2, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda ts: sum(t.numel() for t in ts), "elements times bytes"),
        (lambda ts: sum(t.numel() * 4 for t in ts), "bf16 has 2 bytes"),
        (lambda ts: sum(t.numel() * t.element_size() for t in ts), "counted one storage twice"),
        (lambda ts: sum({t.data_ptr(): t.numel() * t.element_size() for t in ts}.values()),
         "keeps all of its storage alive"),
        (lambda ts: sum({t.data_ptr(): t.untyped_storage().nbytes() for t in ts}.values()),
         "share one storage"),
        (lambda ts: sum({t.untyped_storage().nbytes() for t in ts}), "not the same memory"),
        (lambda ts: float(bytes_alive(ts)), "as an int"),
        (lambda ts: None, "nothing (None)"),
        (lambda ts: ts[0].nonsense, "AttributeError"),
        (lambda: 0, "TypeError"),
    ],
)  # fmt: skip
def test_04_2_near_misses_are_named(answer, words):
    expect("04.2", answer, 0, words)


def states(weights, **other):
    made = {
        "parameters": weights.bfloat16(),
        "gradients": torch.zeros_like(weights).bfloat16(),
        "master": weights.clone(),
        "momentum": torch.zeros_like(weights),
        "variance": torch.zeros_like(weights),
    }
    return made | other


kept_alive = []


def keeps_something(weights):
    kept_alive.append(weights * 2)
    return states(weights)


def shares_moments(weights):
    zeros = torch.zeros_like(weights)
    return states(weights, momentum=zeros, variance=zeros)


def shares_moments_beside_another_buffer(weights):
    kept_alive.append(weights * 2)
    return shares_moments(weights)


def overlapping_moments(weights):
    both = torch.zeros(len(weights) + 1)
    return states(weights, momentum=both[:-1], variance=both[1:])


def without_master(weights):
    made = states(weights)
    del made["master"]
    return made


@pytest.mark.parametrize("answer", [states, lambda w: states(w, master=w)])
def test_04_3_passes(answer):
    expect("04.3", answer, 3, "passed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (without_master, "exactly these five"),
        (shares_moments, "share their memory"),
        (shares_moments_beside_another_buffer, "momentum share their memory"),
        (overlapping_moments, "momentum share their memory"),
        (lambda w: states(w, variance=torch.zeros(1).expand(len(w))), "many times over"),
        (keeps_something, "Something else is still held"),
        (lambda w: states(w, gradients=torch.zeros_like(w)), "16 bits"),
        (lambda w: states(w, parameters=w.half()), "fp16 has 2 bytes as well"),
        (lambda w: states(w, variance=torch.zeros_like(w).half()), "running averages"),
        (lambda w: states(w, gradients=None), "has its place all the same"),
        (lambda w: states(w, momentum=torch.zeros_like(w).bfloat16()), "running averages"),
        (lambda w: states(w, master=w.bfloat16()), "too small to change a 16-bit weight"),
        (lambda w: states(w, master=w.bfloat16().float()), "not their 16-bit rounding"),
        (lambda w: states(w, variance=torch.ones_like(w)), "starts from zero"),
        (lambda w: states(w, momentum=torch.zeros(3)), "shape"),
        (lambda w: list(states(w).values()), "a list"),
        (lambda w: None, "nothing (None)"),
    ],
)
def test_04_3_near_misses_are_named(answer, words):
    expect("04.3", answer, 0, words)


def test_an_unknown_exercise_is_answered_with_the_nearest_ids():
    with pytest.raises(ValueError, match=r"did you mean .*04\.2"):
        check("4.2", None)


def without_gradients(weights):
    torch.set_grad_enabled(False)
    return states(weights)


def test_an_answer_that_switches_gradients_off_does_so_for_itself_alone():
    expect("04.3", without_gradients, 3, "passed")
    assert torch.is_grad_enabled()
