"""Offload: what each tier holds, what crosses, and the bits of training without it."""

import pytest

from zerolab.course.offload import measure_offload
from zerolab.practice.gpt import GPTConfig
from zerolab.practice.offload import CHOICES, Offload
from zerolab.practice.measure import Job


def possible(stage):
    """Every offload that a stage can run."""
    for optimizer in CHOICES["optimizer"]:
        for parameters in CHOICES["parameters"]:
            for schedule in CHOICES["schedule"]:
                offload = Offload(optimizer, parameters, schedule)
                try:
                    offload.check(stage, "adamw-mixed")
                except ValueError:
                    continue
                yield offload


def expect_agreement(compared):
    assert compared.measured == compared.predicted
    assert compared.equal
    assert compared.bitwise
    assert compared.agrees
    return compared


CASES = [(stage, offload) for stage in (1, 2, 3) for offload in possible(stage)]


def name_of(value):
    return (
        "-".join([value.optimizer, value.parameters, value.schedule])
        if isinstance(value, Offload)
        else str(value)
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("stage", "offload"), CASES, ids=name_of)
def test_every_byte_is_derived_and_no_bit_changes(world_of, ranks, stage, offload):
    compared = expect_agreement(
        measure_offload(stage, ranks, offload, steps=2, world=world_of(ranks))
    )
    assert compared.measured["held on the device"]["optimizer_states"] == 0
    assert compared.same_as_undelayed == (offload.schedule != "delayed")
