"""The update of a shard is the same slice of the whole update, and is AdamW."""

import pytest
import torch

from zerolab.practice.adamw import AdamW, AdamWOptions, adamw_by_hand

OPTIONS = AdamWOptions(lr=0.01, weight_decay=0.1)


def gradients(numel, steps=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) for _ in range(steps)]


def weights_after(start, grads, options=OPTIONS):
    adamw = AdamW(start.clone(), options)
    for grad in grads:
        adamw.update(grad.clone(), scale=0.5)
    return adamw.master


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 7, 8, 16, 1000])
def test_sliced_adamw_has_the_bits_of_whole_adamw(shards):
    numel = 1001  # no number of shards above divides it, but 7
    torch.manual_seed(0)
    start, grads = torch.randn(numel), gradients(numel)
    length = -(-numel // shards)
    parts = [
        weights_after(start[at : at + length], [g[at : at + length] for g in grads])
        for at in range(0, numel, length)
    ]
    assert torch.equal(torch.cat(parts), weights_after(start, grads))


def test_it_is_torch_optim_adamw():
    torch.manual_seed(0)
    start, grads = torch.randn(130), gradients(130)
    param = torch.nn.Parameter(start.clone())
    peer = torch.optim.AdamW([param], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay)
    for grad in grads:
        param.grad = grad * 0.5
        peer.step()
    torch.testing.assert_close(weights_after(start, grads), param.data, rtol=1e-6, atol=1e-7)


def test_it_is_what_the_version_by_hand_says():
    torch.manual_seed(0)
    start, grads = torch.randn(130), gradients(130)
    weights, momentum, variance = start.clone(), torch.zeros(130), torch.zeros(130)
    for step, grad in enumerate(grads, 1):
        adamw_by_hand(weights, grad * 0.5, momentum, variance, step, OPTIONS)
    torch.testing.assert_close(weights_after(start, grads), weights, rtol=1e-6, atol=1e-7)


def test_a_known_step_by_head():
    # first step: m_hat = g and v_hat = g*g, so the weight moves by lr against the sign of g
    adamw = AdamW(torch.tensor([1.0]), AdamWOptions(lr=0.1, weight_decay=0.0))
    adamw.update(torch.tensor([-4.0]), scale=1.0)
    assert adamw.master.item() == pytest.approx(1.1)


def test_a_16_bit_gradient_is_widened_before_it_is_scaled():
    grad = torch.full((3,), 3e-38, dtype=torch.bfloat16)
    adamw = AdamW(torch.zeros(3), AdamWOptions(lr=1.0, eps=0.0, weight_decay=0.0))
    adamw.update(grad, scale=1e20)
    assert torch.allclose(adamw.momentum, grad.float() * 1e20 * 0.1)


def test_an_empty_shard_takes_a_step():
    adamw = AdamW(torch.zeros(0), OPTIONS)
    adamw.update(torch.zeros(0), scale=1.0)
    assert adamw.steps == 1 and adamw.master.numel() == 0


def test_gradients_of_more_than_the_shard_are_refused():
    adamw = AdamW(torch.ones(8))
    with pytest.raises(ValueError, match="32 gradients for 8 weights"):
        adamw.update(torch.ones(32), 1.0)
    assert adamw.steps == 0 and torch.equal(adamw.master, torch.ones(8))
