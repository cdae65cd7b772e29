"""Sympy expressions as nested lists, [head, arguments …], and back: no text is run as code."""

from __future__ import annotations

from typing import Any

DEEPEST = 60
SYMPY = {
    "Add", "Mul", "Pow", "Max", "Min", "Abs", "ceiling", "floor", "exp", "log", "Piecewise",
    "ExprCondPair", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "StrictLessThan",
    "LessThan", "StrictGreaterThan", "GreaterThan", "And", "Or", "Not", "Tuple",
}  # fmt: skip
SYMPY_CONSTANTS = {
    "Infinity": "oo", "NegativeInfinity": "-oo", "ComplexInfinity": "zoo", "NaN": "nan",
    "Pi": "pi", "Exp1": "E", "ImaginaryUnit": "I", "BooleanTrue": "true", "BooleanFalse": "false",
}  # fmt: skip


def write(value: Any, deep: int = 0) -> Any:
    """A sympy expression as nested lists: [head, arguments …]."""
    import sympy

    if deep > DEEPEST:
        raise ValueError("too deep")
    name = type(value).__name__
    if isinstance(value, sympy.Rational):
        return ["number", str(value.p), str(value.q)]
    if isinstance(value, sympy.Float):
        return ["float", str(value), value._prec]
    if type(value) is sympy.Symbol:
        return ["symbol", value.name, dict(value._assumptions_orig)]
    if name in SYMPY_CONSTANTS:
        return ["constant", name]
    if name not in SYMPY:
        raise ValueError(f"{name} does not cross")
    return [name, *(write(argument, deep + 1) for argument in value.args)]


def read(tree: Any, deep: int = 0) -> Any:
    """The expression as it was written: nothing cancels, nothing is worked out."""
    import sympy

    if deep > DEEPEST:
        raise ValueError("too deep")
    head, *rest = tree
    match head:
        case "number":
            return sympy.Rational(int(rest[0]), int(rest[1]))
        case "float":
            return sympy.Float(str(rest[0]), precision=min(int(rest[1]), 1000))
        case "symbol":
            assumptions = {str(k): bool(v) for k, v in rest[1].items() if v is not None}
            return sympy.Symbol(str(rest[0]), **assumptions)
        case "constant":
            if rest[0] not in SYMPY_CONSTANTS:
                raise ValueError(f"no constant {rest[0]}")
            return sympy.S(SYMPY_CONSTANTS[rest[0]])
    if head not in SYMPY:
        raise ValueError(f"no function {head}")
    arguments = [read(one, deep + 1) for one in rest]
    if head == "ExprCondPair":
        return sympy.Tuple(*arguments)
    kind = getattr(sympy, head)
    if head in ("Add", "Mul", "Pow"):
        return kind(*arguments, evaluate=False)
    return kind(*arguments)
