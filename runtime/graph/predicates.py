"""What a rule's `when` and `replace` may ask about the things it matched. Names here are the vocabulary of `specs/rewrites.yaml`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.operators.schema import reads_storage
from ..torch_compat import FakeTensor, known_equal, size_hint


def value(x: Any) -> Any:
    """The fake value of a node, or the plain argument itself."""
    return x.meta["val"] if isinstance(x, torch.fx.Node) else x


def is_tensor(x: Any) -> bool:
    return isinstance(value(x), torch.Tensor)


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def rank(x: Any) -> int:
    return len(shape(x))


def shape(x: Any) -> list[Any]:
    """The sizes of a tensor; a number has no dimensions."""
    return list(value(x).shape) if is_tensor(x) else []


def size(x: Any, dim: int) -> Any:
    return value(x).shape[dim]


def dtype(x: Any) -> torch.dtype:
    return value(x).dtype  # type: ignore[no-any-return]


def is_float(x: Any) -> bool:
    """Whether it is a tensor of a floating dtype. A Python number that an operator takes in the place of a tensor is none of any dtype."""
    return is_tensor(x) and dtype(x).is_floating_point


def is_int(x: Any) -> bool:
    return is_tensor(x) and not dtype(x).is_floating_point and not dtype(x).is_complex and dtype(x) != torch.bool


def is_bool(x: Any) -> bool:
    return is_tensor(x) and dtype(x) == torch.bool


def same_dtype(x: Any, y: Any) -> bool:
    return is_tensor(x) and is_tensor(y) and bool(dtype(x) == dtype(y))


def same_shape(x: Any, y: Any) -> bool:
    return same_sizes(shape(x), shape(y))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes are equal as far as is known: a rewrite adds no guard, or it would run for fewer sizes than the program does."""
    return len(a) == len(b) and all(map(known_equal, a, b))


def same_type(x: Any, y: Any) -> bool:
    """Shape, dtype, device and strides of two tensors agree: one can stand for the other."""
    a, b = value(x), value(y)
    return (
        is_tensor(x)
        and is_tensor(y)
        and same_sizes(a.shape, b.shape)
        and a.dtype == b.dtype
        and a.device == b.device
        and same_layout(a, b)
    )


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal strides where a dimension has more than one element."""
    return a.layout == b.layout and all(
        known_equal(n, 1) or known_equal(s, t) for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def has_elements(x: Any, n: int) -> bool:
    """Whether it has at least `n` elements, as far as that is known: of symbolic sizes nothing is asked, which would be a guard; they count
    as large, but for those that are 0 in the example inputs.
    """
    sizes = shape(x)
    if all(isinstance(k, int) for k in sizes):
        return math.prod(sizes) >= n
    return n <= 0 or all(size_hint(k, n) != 0 for k in sizes)


def are_known(sizes: Sequence[Any]) -> bool:
    """Whether no size is a symbol."""
    return all(isinstance(n, int) for n in sizes)


def is_small(x: Any, most: int) -> bool:
    """Whether it has elements, and no more than `most`, in the example inputs where a size is a symbol: a guess, for what is right for all sizes."""
    return 1 <= math.prod(size_hint(k, most + 1) for k in shape(x)) <= most


def is_half(x: Any) -> bool:
    return is_tensor(x) and dtype(x) in (torch.float16, torch.bfloat16)


def is_few(n: Any, most: int) -> bool:
    """Whether a size is known, not none and at most `most`."""
    return isinstance(n, int) and 1 <= n <= most


def made_of_smaller(x: Any, calls: int = 8) -> bool:
    """Whether a tensor is made by a few calls, element by element, of one that has as many elements of fewer bytes (a quantized weight)."""
    count, each = value(x).numel(), value(x).element_size()
    work, met = [x], 0
    while work and met < calls:
        node = work.pop()
        met += 1
        for source in node.all_input_nodes:
            t = value(source)
            if isinstance(t, torch.Tensor) and known_equal(t.numel(), count):
                if t.element_size() < each:
                    return True
                work.append(source)
    return False


def dtype_of_positions(x: Any, n: int) -> torch.dtype:
    """The narrowest signed integers that hold the positions in its last `n` dimensions; 64 bits where a size is a symbol."""
    sizes = shape(x)[-n:]
    count = math.prod(sizes) if all(isinstance(k, int) for k in sizes) else 2**63
    return next((d for d in (torch.int16, torch.int32) if count <= torch.iinfo(d).max), torch.int64)


def has_backward(x: Any) -> bool:
    """Whether the graph computes gradients too: what its backward saves or computes again is then still to be chosen."""
    return any(n.meta.get("backward") for n in x.graph.nodes)


def is_returned(x: Any) -> bool:
    """Whether the graph returns a tensor, or all of it in another shape."""
    return _is_returned(x, whole=True)


def is_seen(x: Any) -> bool:
    """Whether the graph returns a tensor or a view of it, or looks at its storage: who gets that knows where it begins."""
    return _is_returned(x, whole=False)


def _is_returned(x: Any, whole: bool) -> bool:
    work, met = [x], {x}
    while work:
        node = work.pop()
        for user in node.users:
            if user.op == "output" or (not whole and reads_storage(user.target)):
                return True
            if user not in met and _is_same_memory(user, x, whole):
                met.add(user)
                work.append(user)
    return False


def _is_same_memory(view: Any, x: Any, whole: bool) -> bool:
    """Whether a call gives a view of `x`, and, if that is asked, one with all of its elements."""
    a, b = value(view), value(x)
    if isinstance(a, (list, tuple)):
        return not whole and any(_is_same_memory(part, x, whole) for part in a if isinstance(part, torch.Tensor))
    if not isinstance(a, torch.Tensor) or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    if not whole:
        return True
    return not any(isinstance(n, torch.SymInt) for n in (*a.shape, *b.shape)) and a.numel() == b.numel()


def short_of_vectors(x: Any, dim: int) -> int:
    """How many elements dimension `dim` lacks to whole vectors of 16 bytes; none if its size is a symbol."""
    n, each = size(x, dim), value(x).element_size()
    return -n % (16 // each) if isinstance(n, int) and each < 16 else 0


def users(x: Any) -> int:
    return len(x.users)


def only_result_used(x: Any) -> bool:
    """Whether nothing reads the other results of the call that `x` is a result of."""
    return all(user is x or not user.users for user in x.args[0].users)


def result(x: Any, k: int) -> Any:
    """The fake value of the k-th result of the call that `x` is a result of."""
    return x.args[0].meta["val"][k]


def opmath(x: Any) -> torch.dtype:
    """What values of its dtype are computed in."""
    return torch.float32 if is_half(x) else dtype(x)


def reads_result(x: Any, k: int) -> bool:
    """Whether anything reads the k-th result of the call `x`."""
    return any(user.args[1] == k and user.users for user in x.users)


def over_channels(x: Any, n: int) -> list[Any]:
    """The shape in which a vector broadcasts along dimension 1 of n."""
    return [size(x, 0), *[1] * (n - 2)]


def all_but_channels(x: Any) -> list[int]:
    """Its dimensions but dimension 1."""
    return [d for d in range(rank(x)) if d != 1]


def exact_widening(narrow: Any, wide: Any) -> bool:
    """Whether every value of dtype(narrow) is a value of dtype(wide)."""
    return torch.promote_types(dtype(narrow), dtype(wide)) == dtype(wide)


def composed(outer: Sequence[int], inner: Sequence[int], n: int) -> list[int]:
    """The permutation that does `inner` first, then `outer`."""
    return [inner[d % n] % n for d in outer]


def is_identity(dims: Sequence[int], n: int) -> bool:
    return [d % n for d in dims] == list(range(n))


def same_pair(a: int, b: int, c: int, d: int, n: int) -> bool:
    """Whether {a, b} and {c, d} name the same two of n dimensions."""
    return {a % n, b % n} == {c % n, d % n}


def is_power_of_two(x: Any) -> bool:
    """A number whose reciprocal is exact in every floating dtype we compile (2 to the -8 … 8)."""
    return is_number(x) and abs(float(x)) in [2.0**k for k in range(-8, 9)]


def fake_mode_of(node: torch.fx.Node) -> Any:
    """The fake mode that the node's value, or the first of its values, belongs to, as a context; one without effect where there is none."""
    val = node.meta.get("val")
    values = val if isinstance(val, (list, tuple)) else (val,)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), contextlib.nullcontext())


NAMES = (
    "all_but_channels", "are_known", "composed", "dtype", "dtype_of_positions", "exact_widening", "has_backward", "has_elements", "is_bool",
    "is_few", "is_float", "is_half", "is_identity", "is_int", "is_number", "is_power_of_two", "is_returned", "is_seen", "is_small",
    "is_tensor", "made_of_smaller", "only_result_used", "opmath", "over_channels", "rank", "reads_result", "same_dtype", "same_pair",
    "same_shape", "same_sizes", "same_type", "shape", "short_of_vectors", "size", "users",
)  # fmt: skip
