"""What a rule's `when` and `replace` may ask about the things it matched. Names here are the vocabulary of `specs/rewrites.yaml`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.effects import must_run
from ..torch_compat import size_hint


def value(x: Any) -> Any:
    """The fake value of a node, or the plain argument itself."""
    return x.meta["val"] if isinstance(x, torch.fx.Node) else x


def is_tensor(x: Any) -> bool:
    return isinstance(value(x), torch.Tensor)


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def rank(x: Any) -> int:
    return int(value(x).dim())


def shape(x: Any) -> list[Any]:
    return list(value(x).shape)


def size(x: Any, dim: int) -> Any:
    return value(x).shape[dim]


def dtype(x: Any) -> torch.dtype:
    return value(x).dtype  # type: ignore[no-any-return]


def is_float(x: Any) -> bool:
    return bool(dtype(x).is_floating_point)


def is_int(x: Any) -> bool:
    return not dtype(x).is_floating_point and not dtype(x).is_complex and dtype(x) != torch.bool


def is_bool(x: Any) -> bool:
    return dtype(x) == torch.bool


def same_dtype(x: Any, y: Any) -> bool:
    return dtype(x) == dtype(y)


def same_shape(x: Any, y: Any) -> bool:
    return shape(x) == shape(y)


def same_type(x: Any, y: Any) -> bool:
    """Shape, dtype, device and strides agree: one can stand for the other."""
    a, b = value(x), value(y)
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and same_layout(a, b)


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal strides where a dimension has more than one element."""
    return a.layout == b.layout and all(
        n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def has_elements(x: Any, n: int) -> bool:
    """Whether it has at least `n` elements, as far as that is known: of symbolic sizes nothing is asked, which would be a guard; they count
    as large, but for those that are 0 in the example inputs.
    """
    known = [k if isinstance(k, int) else size_hint(k, n) for k in shape(x)]
    sizes = [k for k in shape(x) if isinstance(k, int)]
    return math.prod(sizes) >= n if len(sizes) == len(known) else n <= 0 or 0 not in known


def is_half(x: Any) -> bool:
    return dtype(x) in (torch.float16, torch.bfloat16)


def is_single(x: Any) -> bool:
    return dtype(x) == torch.float32


def stride(x: Any, dim: int) -> Any:
    return value(x).stride(dim)


def is_row_major(x: Any) -> bool:
    return is_known(x) and bool(value(x).is_contiguous())


def is_known(x: Any) -> bool:
    """Whether no size is a symbol."""
    return all(isinstance(n, int) for n in value(x).shape)


def is_last(dim: int, n: int) -> bool:
    """Whether a dimension is the last of n."""
    return dim in (-1, n - 1)


def last(items: Sequence[Any]) -> Any:
    return items[-1]


def all_but_last(items: Sequence[Any]) -> list[Any]:
    return list(items[:-1])


def row_major() -> torch.memory_format:
    """The memory format in which a copy has its last dimension side by side, the one before it outside of that, and so on."""
    return torch.contiguous_format


def padded_shape(x: Any, n: int) -> list[Any]:
    """Its shape as n dimensions: ones are put in front."""
    return [1] * (n - rank(x)) + shape(x)


def is_batch_of(x: Any, rows: Any, columns: Any) -> bool:
    """Whether `x` is a batch of matrices with one or two batch dimensions, and each has so many rows and columns."""
    return rank(x) in (3, 4) and shape(x)[-2:] == [rows, columns]


def batched(x: Any, those: Sequence[Any]) -> list[Any]:
    """The shape of matrices `x` as four dimensions, in the batch of the first of `those` that has two batch dimensions."""
    lead = next((shape(y)[:2] for y in those if rank(y) == 4), [1, size(x, 0)])
    return lead + shape(x)[-2:]


def is_row_of(x: Any, product: Any) -> bool:
    """Whether `x` is a vector for the rows of a matrix, side by side in memory, of the same dtype."""
    return (
        rank(x) == 1
        and is_known(x)
        and is_known(product)
        and shape(x) == shape(product)[-1:]
        and stride(x, 0) == 1
        and same_dtype(x, product)
    )


def is_attention(out: Any, s: Any, q: Any, k: Any, v: Any) -> bool:
    """Whether torch's kernels of attention take queries, keys (transposed) and values as they lie, for scores `s`."""
    known = [value(x) for x in (s, q, k, v, out)]
    if not all(isinstance(n, int) for x in known for n in x.shape) or not (is_single(q) or is_half(q)):
        return False
    (rows, width), columns, count = shape(q)[-2:], size(k, -1), size(out, 0)
    batches = [shape(x)[:2] for x in (s, q, k, v) if rank(x) == 4]
    return (
        min(rows, width, columns, count) > 0
        and size(out, 1) == rows
        and all(same_dtype(x, q) for x in (k, v, out))
        and is_batch_of(q, rows, width)
        and is_batch_of(s, rows, columns)
        and is_batch_of(k, width, columns)
        and is_batch_of(v, columns, width)
        and all(b == batches[0] and math.prod(b) == count for b in batches)
        and all(size(x, 0) == count for x in (s, q, k, v) if rank(x) == 3)
        and stride(q, -1) == stride(v, -1) == stride(k, -2) == 1
        and 0 not in value(q).stride()  # the result is laid out as it is
    )


def is_mask_of(x: Any, s: Any, those: Sequence[Any]) -> bool:
    """Whether `x` may be read as a mask of the scores `s` in four dimensions, in the batch that is `batched` for `those`."""
    return 1 <= rank(x) <= rank(s) and is_known(x) and (rank(s) == 4 or rank(x) < 3 or all(rank(y) == 3 for y in those))


def leads_only_to(x: Any, sources: Sequence[Any]) -> bool:
    """Whether nothing but `sources` and `x` reads what is computed on the way from the ones to the other."""
    on_the_way, work = {x}, [x]
    ends = [s for s in sources if isinstance(s, torch.fx.Node)]
    while work:
        for node in work.pop().all_input_nodes:
            if node not in ends and node not in on_the_way:
                on_the_way.add(node)
                work.append(node)
    lost = [n for n in on_the_way if n is not x and n.all_input_nodes]  # not constants, which cost nothing
    return all(user in on_the_way or user in ends or _is_dead(user) for node in lost for user in node.users)


def _is_dead(node: torch.fx.Node, depth: int = 4) -> bool:
    """Whether only calls that rewrites have left without users read it: these are erased at the end. False where that takes long to tell."""
    if node.op != "call_function" or must_run(node.target) or depth == 0:
        return False
    return all(_is_dead(user, depth - 1) for user in node.users)


def is_hiding(fill: Any, x: Any) -> bool:
    """Whether a score of `fill` in `x` gets no weight beside an ordinary one: minus infinity, or far below all that is computed (a number that
    overflows in the dtype of `x` is neither).
    """
    return is_number(fill) and (fill == -math.inf or torch.finfo(dtype(x)).min <= fill <= -1e9)


def hiding(fill: float) -> float:
    """What to add to a score so that it is -inf, or as good as `fill` and absorbs the score (of float32)."""
    return fill if math.isinf(fill) else -3e38


def is_few(n: Any, most: int) -> bool:
    """Whether a size is known, not none and at most `most`."""
    return isinstance(n, int) and 1 <= n <= most


def made_of_smaller(x: Any, calls: int = 8) -> bool:
    """Whether a tensor is made by a few calls, element by element, of one that has as many elements of fewer bytes (a quantized weight)."""
    count, each = value(x).numel(), value(x).element_size()
    if not isinstance(count, int):
        return False
    work, met = [x], 0
    while work and met < calls:
        node = work.pop()
        met += 1
        for source in node.all_input_nodes:
            t = value(source)
            if isinstance(t, torch.Tensor) and t.numel() == count:
                if t.element_size() < each:
                    return True
                work.append(source)
    return False


def has_backward(x: Any) -> bool:
    """Whether the graph computes gradients too: what its backward saves or computes again is then still to be chosen."""
    return any(n.meta.get("backward") for n in x.graph.nodes)


def is_returned(x: Any) -> bool:
    """Whether the graph returns a tensor, or all of it in another shape."""
    return any(user.op == "output" or (_is_same_memory(user, x) and is_returned(user)) for user in x.users)


def _is_same_memory(view: Any, x: Any) -> bool:
    """Whether a call gives a view of `x` with all of its elements."""
    a, b = value(view), value(x)
    if not isinstance(a, torch.Tensor) or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
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
    """The fake mode that the node's value belongs to, as a context."""
    val = node.meta.get("val")
    mode = getattr(val, "fake_mode", None)
    return mode if mode is not None else contextlib.nullcontext()


NAMES = (
    "all_but_channels", "all_but_last", "batched", "composed", "dtype", "exact_widening", "has_backward", "has_elements", "hiding",
    "is_attention", "is_batch_of", "is_bool", "is_few", "is_float", "is_half", "is_hiding", "is_identity", "is_int", "is_known", "is_last",
    "is_mask_of", "is_number", "is_power_of_two", "is_returned", "is_row_major", "is_row_of", "is_single", "is_tensor", "last",
    "leads_only_to", "made_of_smaller", "only_result_used", "opmath", "over_channels", "padded_shape", "rank", "reads_result", "row_major",
    "same_dtype", "same_pair", "same_shape", "same_type", "shape", "short_of_vectors", "size", "stride", "users",
)  # fmt: skip
