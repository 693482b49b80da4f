"""A float64 program evaluated in more than float64: what both eager and compiled code are judged by.

Beside every float64 storage a shadow of long doubles is kept (64 bits of mantissa on x86: 2048 times finer), computed operator by operator,
forward and backward, below autograd: by numpy, by torch's decompositions into what numpy has here, or, where values are only moved, by the
operator itself on their high and low halves. Tensors hold their shadows rounded. What another operator touches is doubtful from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .exact_convolution import convolution, convolution_backward
from .observe import Sight

Array = Any
WIDER = bool(np.finfo(np.longdouble).eps < 2.0**-60)
"""Whether long doubles are more exact than float64 on this machine."""


class Exact(TorchDispatchMode):
    """Keeps the shadows; `low(t)` is what a tensor's elements are short of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._shadows: dict[int, tuple[Any, Array]] = {}
        self._doubtful: set[int] = set()

    def low(self, t: torch.Tensor) -> torch.Tensor | None:
        """Shadow minus value, or None where the shadow is no better than the value."""
        if _key(t) in self._doubtful or not WIDER:
            return None
        if t.dtype != torch.float64:
            return torch.zeros(t.shape, dtype=torch.float64)
        array = self._array(t)
        return torch.from_numpy(np.array(array - array.astype(np.float64), np.float64))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # elsewhere autograd takes them apart; their results may be views
                return func.decompose(*args, **kwargs)
        given = [t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
        # A layout changed in place (`unsqueeze_`) leaves every element: to write them back is refused where they overlap (`expand`).
        if func.is_view or torch.Tag.inplace_view in func.tags or not given:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        function = func
        if func._schema.is_mutable and name.endswith("_") and name != "copy_":
            name = name[:-1]
            function = getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)
        doubtful = any(_key(t) in self._doubtful for t in given)
        # A value that is not known better may be the rounded one of its operand (the greatest of a list): only as rounded are they equal.
        rounded = doubtful and name in _COMPARES
        with np.errstate(all="ignore"):
            values = None if rounded else self._values(name, function, args, kwargs)
        out = func(*args, **kwargs)
        leaves = tree_leaves(out)
        results = [t for t in leaves if isinstance(t, torch.Tensor)]
        if values is not None and len(values) == len(
            leaves
        ):  # gradients that nobody asked for have no place among the results
            values = [v for v, t in zip(values, leaves, strict=True) if isinstance(t, torch.Tensor)]
        if name in _SELECTS and len(results) == 2:
            values = [self._selected(args, kwargs, results[1]), results[1].numpy()]
        doubt = values is None or doubtful
        if values is None and func._schema.is_mutable:  # nor what an operator of the program's has written
            results += [t for t in _written(func, args, kwargs) if t.is_floating_point()]
        for k, t in enumerate(results):
            if values is not None and np.ndim(values[k]) > t.ndim:
                self._doubtful.add(
                    _key(t)
                )  # torch's decomposition gives something else: all weights for the sums of their exponentials
            elif values is not None and values[k] is not None:
                self._store(t, values[k])
            elif t.dtype == torch.float64:
                self._shadows.pop(_key(t), None)
            if doubt and (t.is_floating_point() or values is not None or rounded):
                self._doubtful.add(_key(t))
        return out

    def _values(self, name: str, function: Any, args: Any, kwargs: Any) -> list[Array] | None:
        """The results of an operator as arrays, or None where nobody knows them better than its kernel."""
        if name in _SELECTS:
            whole = name in _OF_ALL and len(args) == 1 and not kwargs and args[0].numel() > 0
            return [_OF_ALL[name](self._array(args[0]))] if whole else None
        if name == "copy_":
            return [np.broadcast_to(self._array(args[1]), args[0].shape)]
        if name == "_to_copy":
            return [self._array(args[0])]
        if name in _MOVES and function is not None:
            values = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            if name in _OF_VALUES and any(t.dtype != torch.float64 for t in values):
                return None
            high = self._halves(function, args, kwargs, False)
            if name == "ones_like":  # exact, and of its operand's halves it would be two
                return high
            low = self._halves(function, args, kwargs, True)
            return [h + l for h, l in zip(high, low, strict=True)] if high[0].dtype == np.longdouble else high
        if name in _KNOWN:
            try:
                found = _KNOWN[name](*tree_map(self._array, args), **tree_map(self._array, kwargs))
            except (TypeError, ValueError, IndexError):
                return None
            return list(found) if isinstance(found, tuple) else [found]
        decomposition = decomposition_table.get(function)
        if decomposition is None and function is not None and function._can_decompose():
            decomposition = function.decompose
        if decomposition is None:
            return None
        with self:
            made = decomposition(*args, **kwargs)
        parts = tree_leaves(made)
        if any(isinstance(t, torch.Tensor) and _key(t) in self._doubtful for t in parts):
            return None
        return [np.array(self._array(t)) if isinstance(t, torch.Tensor) else None for t in parts]

    def _halves(self, function: Any, args: Any, kwargs: Any, low: bool) -> list[Array]:
        def half(a: Any) -> Any:
            if isinstance(a, torch.Tensor) and a.dtype == torch.float64:
                array = self._array(a)
                rounded = array.astype(np.float64)
                return torch.from_numpy(np.array(array - rounded if low else rounded, np.float64))
            return a

        out = function(*tree_map(half, _without_numbers(function, args) if low else args), **tree_map(half, kwargs))
        wide = [t.numpy() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return [a.astype(np.longdouble) if a.dtype == np.float64 else a for a in wide]

    def _selected(self, args: Any, kwargs: Any, at: torch.Tensor) -> Array:
        """What `sort`, `max` and the like have chosen, by the positions that they return."""
        source = self._array(args[0])
        named = kwargs.get("dim", next((a for a in args[1:] if type(a) is int), -1))
        if source.ndim == 0:
            return source
        places = at.numpy()
        squeezed = places.ndim < source.ndim
        chosen = np.take_along_axis(source, np.expand_dims(places, named) if squeezed else places, named)
        return chosen.squeeze(named) if squeezed else chosen

    def _array(self, a: Any) -> Any:
        """The shadow of a tensor as an array that shares its memory; other values as they are."""
        if not isinstance(a, torch.Tensor):
            return a
        if a.dtype != torch.float64:
            return a.detach().numpy()
        key = _key(a)
        if key not in self._shadows:
            whole = torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())
            self._shadows[key] = (a.untyped_storage(), whole.numpy().astype(np.longdouble))
        whole = self._shadows[key][1][a.storage_offset() :]
        return np.lib.stride_tricks.as_strided(whole, a.shape, [s * whole.itemsize for s in a.stride()])

    def _store(self, t: torch.Tensor, value: Array) -> None:
        if t.dtype == torch.float64:
            self._array(t)[...] = value
            with torch.no_grad():
                t.copy_(torch.from_numpy(np.array(np.broadcast_to(value, t.shape), np.float64)))
        elif not t.is_floating_point():
            value = np.broadcast_to(np.asarray(value), t.shape)
            whole = value if value.dtype == bool or t.dtype == torch.bool else value.astype(np.int64)
            t.copy_(torch.from_numpy(whole.astype(t.numpy().dtype)))


def _key(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _written(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    given = {**kwargs, **{a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}}
    written = [
        given.get(a.name) for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return [t for t in tree_leaves(written) if isinstance(t, torch.Tensor)]


def _without_numbers(function: Any, args: Any) -> Any:
    """Arguments for the low halves: a number that is put into a tensor has none."""
    names = [a.name for a in function._schema.arguments]
    return [
        0 if names[k] in ("value", "fill_value") and not isinstance(a, torch.Tensor) else a for k, a in enumerate(args)
    ]


def _names(text: str) -> list[str]:
    return text.split()


# Operators that bring values from one place to another, and nothing else; and those of them whose operands are all values.
_MOVES = frozenset(
    _names("""
    clone detach cat stack index index_select gather scatter slice_scatter select_scatter diagonal_scatter as_strided_scatter fill zeros_like
    ones_like full_like neg masked_fill flip roll repeat index_fill index_copy constant_pad_nd tril triu new_zeros _unsafe_view diag
    diagonal_backward select_backward slice_backward embedding take diag_embed replication_pad1d lift_fresh
    """)
)
_OF_VALUES = frozenset(["cat", "stack", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"])
_COMPARES = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
# Operators that choose values and say their positions.
_SELECTS = frozenset(["sort", "max", "min", "topk", "cummax", "cummin", "median", "kthvalue", "mode"])
# Those of them that without a dimension choose one value of all, and do not say its position.
_OF_ALL: dict[str, Callable[[Array], Array]] = {
    "max": np.max,
    "min": np.min,
    "median": lambda x: np.sort(x, axis=None)[(x.size - 1) // 2] if not np.isnan(x).any() else np.longdouble("nan"),
}


def _axes(dim: Any) -> Any:
    return (
        None
        if dim is None or (isinstance(dim, (list, tuple)) and not dim)
        else tuple(dim)
        if isinstance(dim, (list, tuple))
        else dim
    )


def _reduction(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, dim=None, keepdim=False, dtype=None: f(x, axis=_axes(dim), keepdims=keepdim)


def _var(x: Array, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Array:
    apart = x - x.mean(axis=_axes(dim), keepdims=True)
    total = (apart * apart).sum(axis=_axes(dim), keepdims=keepdim)
    count = x.size // max(total.size, 1)
    return total / np.longdouble(max(count - (1 if correction is None else correction), 0))


def _divided(a: Array, b: Array, rounding_mode: str | None = None) -> Array:
    q = np.true_divide(np.asarray(a, np.longdouble), b)
    return q if rounding_mode is None else np.floor_divide(a, b) if rounding_mode == "floor" else np.trunc(q)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _erf(x: Array) -> Array:
    with mpmath.workprec(80):
        pairs = [(float(v), float(v - np.longdouble(float(v)))) for v in x.ravel()]
        flat = [mpmath.erf(mpmath.mpf(h) + mpmath.mpf(rest)) if np.isfinite(h) else np.sign(h) for h, rest in pairs]
        high = [float(v) for v in flat]
        low = [float(v - h) for v, h in zip(flat, high, strict=True)]
    return (np.array(high, np.longdouble) + np.array(low, np.longdouble)).reshape(x.shape)


def _gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / _PI) * (x + np.longdouble("0.044715") * x**3)))
    return x / 2 * (1 + _erf(x / np.sqrt(np.longdouble(2))))


def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    return np.where(x * beta > threshold, x, np.log1p(np.exp(x * beta)) / beta)


def _logsumexp(x: Array, dim: Any, keepdim: bool = False) -> Array:
    top = x.max(axis=_axes(dim), keepdims=True)
    total = top + np.log(np.exp(x - top).sum(axis=_axes(dim), keepdims=True))
    return total if keepdim else total.squeeze(_axes(dim))


def _norm(x: Array, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    if ord != 2:
        raise ValueError(ord)
    return np.sqrt((x * x).sum(axis=_axes(dim), keepdims=keepdim))


def _index_add(x: Array, dim: int, index: Array, source: Array, alpha: Any = 1) -> Array:
    out = np.array(x)
    np.add.at(out, (slice(None),) * (dim % max(x.ndim, 1)) + (index,), alpha * source)
    return out


def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    out = np.array(x)
    at = list(np.indices(index.shape))
    at[dim] = index
    np.add.at(out, tuple(at), source[tuple(slice(n) for n in index.shape)])
    return out


def _index_put(x: Array, indices: Any, values: Array, accumulate: bool = False, unsafe: bool = False) -> Array:
    out = np.array(x)
    at = tuple(slice(None) if i is None else i for i in indices)
    if accumulate:
        np.add.at(out, at, values)
    else:
        out[at] = values
    return out


_PI = np.longdouble("3.14159265358979323846264338327950288")
_KNOWN: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, alpha=1: a + alpha * b,
    "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a,
    "mul": lambda a, b: a * b,
    "div": _divided,
    "pow": lambda a, b: np.power(np.asarray(a, np.longdouble), b),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "round": np.rint,
    "abs": np.abs,
    "sgn": np.sign,
    "frac": lambda x: x - np.trunc(x),
    "sigmoid": _sigmoid,
    "erf": _erf,
    "gelu": _gelu,
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "softplus": _softplus,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "fmod": np.fmod,
    "remainder": np.mod,
    "floor_divide": np.floor_divide,
    "clamp": lambda x, low=None, high=None: np.minimum(
        np.maximum(x, -np.inf if low is None else low), np.inf if high is None else high
    ),
    "clamp_min": np.maximum,
    "clamp_max": np.minimum,
    "where": np.where,
    "relu": lambda x: np.maximum(x, 0),
    "threshold_backward": lambda g, x, at: np.where(x <= at, np.longdouble(0), g),
    "lerp": lambda a, b, w: a + w * (b - a),
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "threshold": lambda x, at, value: np.where(x <= at, np.longdouble(value), x),
    "xlogy": lambda x, y: np.where(x == 0, 0 * y, x * np.log(y)),
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "sum": _reduction(np.sum),
    "mean": _reduction(np.mean),
    "prod": _reduction(np.prod),
    "amax": _reduction(np.max),
    "amin": _reduction(np.min),
    "any": _reduction(np.any),
    "all": _reduction(np.all),
    "argmax": _reduction(np.argmax),
    "argmin": _reduction(np.argmin),
    "var": _var,
    "std": lambda x, dim=None, correction=None, keepdim=False: np.sqrt(_var(x, dim, correction, keepdim)),
    "var_mean": lambda x, dim=None, correction=None, keepdim=False: (
        _var(x, dim, correction, keepdim),
        x.mean(axis=_axes(dim), keepdims=keepdim),
    ),
    "linalg_vector_norm": _norm,
    "logsumexp": _logsumexp,
    "cumsum": lambda x, dim, dtype=None: np.cumsum(x, dim if x.ndim else None).reshape(x.shape),
    "cumprod": lambda x, dim, dtype=None: np.cumprod(x, dim if x.ndim else None).reshape(x.shape),
    "logcumsumexp": lambda x, dim: np.logaddexp.accumulate(x, dim) if x.ndim else x,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "mm": np.matmul,
    "bmm": np.matmul,
    "mv": np.matmul,
    "dot": np.matmul,
    "addmm": lambda c, a, b, beta=1, alpha=1: beta * c + alpha * (a @ b),
    "baddbmm": lambda c, a, b, beta=1, alpha=1: beta * c + alpha * (a @ b),
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    "_index_put_impl": _index_put,
}
for _same in _names("""
    sqrt exp expm1 log log1p log2 sin cos tan tanh square hypot copysign floor ceil trunc sign maximum minimum logical_and logical_or logical_xor
    logical_not isnan isinf isfinite
    """):
    _KNOWN[_same] = getattr(np, _same)


def exactly(see: Callable[[Callable[[], Exact]], Sight]) -> Sight:
    """What `see` finds when it enters the mode that it is given around a run in float64."""
    exact = Exact()
    sight = see(lambda: exact)
    # The values were copied inside of the run, and are what `exact` knows shadows of.
    sight.lows = {name: low for name, t in sight.values.items() if (low := exact.low(t)) is not None}
    return sight
