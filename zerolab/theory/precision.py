"""Number formats: what they can hold, and why fp16 gradients are scaled and bf16 ones are not."""

from dataclasses import dataclass

import sympy as sp

from zerolab.theory.derivation import Derivation

TWO = sp.Integer(2)


@dataclass(frozen=True)
class Format:
    """A binary format by the exponents of its numbers; the smallest subnormal has one bit left."""

    name: str
    fraction_bits: int
    smallest_exponent: int  # of a normal number
    largest_exponent: int

    @property
    def largest(self) -> sp.Rational:
        return (2 - TWO**-self.fraction_bits) * TWO**self.largest_exponent

    @property
    def smallest_normal(self) -> sp.Rational:
        return TWO**self.smallest_exponent

    @property
    def smallest(self) -> sp.Rational:
        return self.smallest_normal * TWO**-self.fraction_bits

    def absorbs(self, small: sp.Rational) -> bool:
        """True where 1 + small rounds back to 1: small is at most half the spacing above 1."""
        return bool(small <= TWO ** (-self.fraction_bits - 1))


FP16 = Format("fp16", 10, -14, 15)
BF16 = Format("bf16", 7, -126, 127)
FP32 = Format("fp32", 23, -126, 127)


def derive_loss_scale(exponent: int = -30) -> Derivation:
    """What scaling the loss does to a gradient of 2**exponent in fp16."""
    scale, gradient = sp.Symbol("scale", positive=True), TWO**exponent
    state = "rounds to 0" if gradient <= FP16.smallest / 2 else "may lose bits"
    why = (f"a gradient of 2^{exponent}; fp16's smallest number is 2^-24, so unscaled it {state}; "
           "bf16 has fp32's exponents, to 2^-126, and needs no scale")  # fmt: skip
    needed = sp.Max(1, FP16.smallest_normal / gradient)
    back = f"times {needed}, a power of two: exact; divided out again in fp32"
    return Derivation("Loss scaling", gradient * scale, why).substitute({scale: needed}, back)
