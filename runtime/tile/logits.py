"""What a kernel of attention makes of a score, in fewer operations: roundings that can be left out, and one factor for all logits.

Scores of bfloat16 have the range of float32, so what is computed of them may stay in float32: it is nearer to the true value than eager's, and
infinite or nan where an operand is. Scores of float16 overflow where those of float32 do not: they keep their roundings, but for those that
change no digit.
"""

from __future__ import annotations

from math import frexp, inf

from ..ir.nodes import FLOATS, Node, const, load
from ..kernels.operands import HALF

# They pass small errors on as small errors; after all else a rounding could decide.
SMOOTH = ("add", "div", "mul", "neg", "sub", "tanh")
LEAST_FACTOR = (
    2.0**-60
)  # by a factor from here to 1, scores whose difference overflows differ by a logit that leaves one of them no weight


def unrounded(logits: Node, name: str) -> Node:
    """A logit (float32) of the score in the register `name`, without the roundings that can be left out; it reads the score as float32 if the
    score's own is one of them.
    """
    found = _unrounded(logits, name)
    return logits if found is None else found


def factored(logits: Node) -> tuple[Node, float]:
    """A logit as a value times a positive number: the logits of a row are in the same order as these values."""
    if logits.op == "mul":
        for value, factor in (logits.args, logits.args[::-1]):
            if factor.op == "const" and LEAST_FACTOR <= factor.attr <= 1:
                return value, float(factor.attr)
    if logits.op == "where":
        condition, *sides = logits.args
        made = [(a, None) if is_lowest(a) else factored(a) for a in sides]
        factors = {factor for _, factor in made if factor is not None}
        if len(factors) == 1:
            return Node("where", (condition, *(a for a, _ in made)), logits.dtype), factors.pop()
    return logits, 1.0


def is_lowest(n: Node) -> bool:
    """Whether a value is minus infinity, whatever it is multiplied by."""
    return n.op == "const" and n.dtype in FLOATS and n.attr == -inf


def score_dtype(logits: Node, name: str) -> str:
    """The dtype in which a logit reads the score."""
    return next(ld.dtype for ld in logits.loads() if ld.attr.buffer == name)


def _reads(n: Node, name: str) -> bool:
    return any(ld.attr.buffer == name for ld in n.loads())


def _unrounded(n: Node, name: str) -> Node | None:
    """A value of float32; None where something other than roundings, choices and smooth functions is made of the score."""
    if not _reads(n, name) or (n.op == "load" and n.dtype == "float32"):
        return n
    if n.dtype != "float32":
        return None  # a condition that reads the score, too
    if n.op == "to_dtype":
        return _of_half(n.args[0], name)
    if n.op != "where" and n.op not in SMOOTH:
        return None
    args = tuple(a for a in (_unrounded(a, name) for a in n.args) if a is not None)
    return Node(n.op, args, n.dtype, n.attr) if len(args) == len(n.args) else None


def _of_half(n: Node, name: str) -> Node | None:
    """A 16-bit value as one of float32."""
    if n.dtype not in HALF:
        return None
    if n.op == "const":
        return const(n.attr, "float32")
    if not _reads(n, name):
        return Node("to_dtype", (n,), "float32")
    if n.op == "load":
        return load(name, (), "float32") if n.dtype == "bfloat16" else Node("to_dtype", (n,), "float32")
    if n.op == "where" and not _reads(n.args[0], name):
        one, other = (_of_half(a, name) for a in n.args[1:])
        return None if one is None or other is None else Node("where", (n.args[0], one, other), "float32")
    if n.op != "to_dtype" or (inner := _unrounded(n.args[0], name)) is None:
        return None
    if n.dtype == "bfloat16" or _keeps_digits(n.args[0], n.dtype):
        return inner
    return Node("to_dtype", (Node("to_dtype", (inner,), n.dtype),), "float32")


def _keeps_digits(n: Node, dtype: str) -> bool:
    """Whether a value is one of a dtype times a power of two up to 1: rounding it would change it only below the least normal number."""
    if n.op != "mul":
        return False
    for value, factor in (n.args, n.args[::-1]):
        if factor.op == "const" and 0 < factor.attr <= 1 and frexp(factor.attr)[0] == 0.5:
            return value.op == "to_dtype" and value.args[0].dtype == dtype
    return False


__all__ = ["factored", "is_lowest", "score_dtype", "unrounded"]
