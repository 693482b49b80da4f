"""Arguments for calls of an operator: made from its schema, or written in a spec's `tests`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .parameters import PLAIN, numbers_of, other_parameters, put_numbers

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *HALVES)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTS, torch.bool)


class Made(NamedTuple):
    """A call: label, positional and keyword arguments. `drawn`: values of parameters were drawn, which fake tensors may refuse."""

    label: str
    args: list[Any]
    kwargs: dict[str, Any]
    drawn: bool = False


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype in INTS:
        return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype) * 2 if dtype.is_complex else (torch.randn(shape) * 2).to(dtype)


def by_default(schema: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[Made]:
    """Arguments made from the schema: shapes and layouts in the first dtype, every dtype, two mixed, other parameters, these beside integers."""
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type) and not a.has_default_value()]
    # Eager takes a mask of numbers, but means yes and no by it.
    masks = {k for k, name in enumerate(tensors) if name == "mask" or name.endswith("_mask")}

    def made(layout: Callable[[int, torch.dtype], torch.Tensor], label: str, *dtype_of: torch.dtype) -> Made:
        """`dtype_of` are the dtypes of the first, second, … tensor; the last stands for the others too."""
        dtypes_ = [torch.bool if k in masks else dtype_of[min(k, len(dtype_of) - 1)] for k in range(len(tensors))]
        tensors_ = [layout(k, d) for k, d in enumerate(dtypes_)]
        put_numbers(tensors_, numbers_of(schema))
        return filled(schema, label, tensors_)

    layouts: dict[str, Callable[[int, torch.dtype], torch.Tensor]] = {
        "(3, 5)": lambda k, d: random_tensor((3, 5), d),
        "broadcast, transposed": lambda k, d: (
            random_tensor((5, 3), d).t() if k == 0 else random_tensor((5,) if k == 1 else (3, 1), d)
        ),
        "0-dim": lambda k, d: random_tensor((), d),
        "empty": lambda k, d: random_tensor((0, 5), d),
    }
    for label, layout in layouts.items():
        yield made(layout, f"{label} {dtypes[0]}", dtypes[0])
    for d in dtypes[1:]:
        yield made(layouts["(3, 5)"], f"(3, 5) {d}", d)
    if len(tensors) > 1 and len(dtypes) > 1:
        yield made(layouts["(3, 5)"], "float and int32", dtypes[0], torch.int32)
        yield made(
            lambda k, d: random_tensor(() if k else (3, 5), d), "int32 and a 0-dim float", torch.int32, torch.float64
        )
    narrow = next((d for d in dtypes if d.is_complex), None)
    if len(tensors) > 1 and narrow is not None and torch.int64 in dtypes:
        yield made(layouts["(3, 5)"], f"int64 and {narrow}", torch.int64, narrow)
    others = list(other_parameters(schema))
    for given in others:
        call = made(layouts["(3, 5)"], f"(3, 5) {dtypes[0]} {given}", dtypes[0])
        put_numbers(call.args, given.values())
        yield _with_given(schema, call, given)
    fractions = [given for given in others if not any(isinstance(v, bool) for v in given.values())]
    if fractions and torch.int64 in dtypes:
        for given in (fractions[-1], {name: 3 - k for k, name in enumerate(fractions[-1])}):
            mixed = [] if narrow is None else [(narrow, torch.int64), (torch.int64, narrow)]
            for pair in ((torch.int64, torch.int64), *mixed[: len(tensors)]):
                call = made(layouts["(3, 5)"], f"(3, 5) {' and '.join(map(str, dict.fromkeys(pair)))} {given}", *pair)
                yield _with_given(schema, call, given)


def _with_given(schema: Any, call: Made, given: dict[str, Any]) -> Made:
    """The call with other values for some parameters; those without a default stand among the positional arguments."""
    required = [a.name for a in schema.arguments if not a.has_default_value() and not a.kwarg_only]
    args = [given.get(name, value) for name, value in zip(required, call.args, strict=True)]
    others = {name: value for name, value in given.items() if name not in required}
    return Made(call.label, args, call.kwargs | others, drawn=True)


def filled(schema: Any, label: str, tensors: list[torch.Tensor]) -> Made:
    """The tensors with plain values for the other arguments that have no default."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest = iter(tensors)
    for a in schema.arguments:
        if a.has_default_value():
            continue
        kind = str(a.type)
        value: Any = next(rest) if "Tensor" in kind else plain(kind)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return Made(label, args, kwargs)


def plain(kind: str) -> Any:
    """A value for a parameter of a type that has no default."""
    return None if kind.startswith("Optional") else PLAIN.get(kind, 2)


# -- cases written in the spec -----------------------------------------------------------------------------------------
def from_text(text: str, dtypes: tuple[torch.dtype, ...], contiguous: bool = False) -> Iterator[Made]:
    """The arguments of a spec's `tests` line, once per dtype of its `F`, `P` and `U` tensors; unless all are to be `contiguous`, with the first
    dtype also in another layout.
    """
    tree = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(tree, ast.Call)
    called = [
        n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n is not tree
    ]
    swept = dtypes if {"F", "D"} & set(called) else dtypes[:1]
    if {"P", "U"} & set(called) and not {"F", "D"} & set(called):
        others = () if "U" in called else INTS  # no integer lies between 0 and 1
        swept = tuple(d for d in dtypes if d in (*FLOATS, *others, *COMPLEX))
    for d in swept:
        yield Made(f"{text} {d}", *arguments_of(tree, d))
    if not contiguous and len(dtypes) > 1:
        args, kwargs = arguments_of(tree, dtypes[0])
        yield Made(f"{text} not contiguous", [strided(a) for a in args], kwargs)


def arguments_of(tree: ast.Call, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a spec's call; the numbers among them stand among the elements of its `F` tensors."""
    args = [value_of(a, dtype) for a in tree.args]
    kwargs = {str(k.arg): value_of(k.value, dtype) for k in tree.keywords}
    free = [v for node, v in zip(tree.args, args, strict=True) if isinstance(node, ast.Call) and maker_of(node) == "F"]
    put_numbers(free, [*args, *kwargs.values()])
    return args, kwargs


def maker_of(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def other_parameters_of_text(schema: Any, text: str, dtype: torch.dtype) -> Iterator[Made]:
    """The first call of a spec's `tests`, with other values for the parameters that it leaves at their defaults."""
    tree = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(tree, ast.Call)
    set_by_text = {a.name for a in schema.arguments[: len(tree.args)]} | {str(k.arg) for k in tree.keywords}
    for given in other_parameters(schema):
        if not set_by_text & given.keys():
            args, kwargs = arguments_of(tree, dtype)
            yield Made(f"{text} {dtype} {given}", args, kwargs | given, drawn=True)


def positive_definite(shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)


def strided(v: Any) -> Any:
    if isinstance(v, list):
        return [strided(x) for x in v]
    return v.mT.contiguous().mT if isinstance(v, torch.Tensor) and v.ndim > 1 else v


def value_of(node: ast.expr, dtype: torch.dtype) -> Any:
    """A literal, a list, a dtype name, or a tensor (`F`, `P`, `U`, `I`, `S`, `B`, `D`, `N`, `C`, `T`)."""
    if isinstance(node, ast.List):
        return [value_of(e, dtype) for e in node.elts]
    if isinstance(node, ast.Name):
        return getattr(torch, node.id)
    if isinstance(node, ast.UnaryOp):
        return -value_of(node.operand, dtype)
    if not isinstance(node, ast.Call):
        value = ast.literal_eval(node)
        return (
            getattr(torch, value)
            if isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
            else value
        )
    assert isinstance(node.func, ast.Name)
    if node.func.id == "T":
        return torch.tensor(
            ast.literal_eval(node.args[0]), **{str(k.arg): value_of(k.value, dtype) for k in node.keywords}
        )
    if node.func.id == "C":
        value, *shape = (value_of(a, dtype) for a in node.args)
        return torch.full(shape, value, **{str(k.arg): value_of(k.value, dtype) for k in node.keywords})
    sizes = [int(ast.literal_eval(a)) for a in node.args]
    if node.func.id in ("I", "S"):
        n, *shape = sizes
        return torch.randint(-n if node.func.id == "S" else 0, n, shape)
    shape_ = tuple(sizes)
    make = {
        "F": lambda: random_tensor(shape_, dtype),
        "P": lambda: (torch.rand(shape_) * 3 + (0.1 if dtype in FLOATS else 1)).to(dtype),
        "U": lambda: torch.rand(shape_).clamp(0.01, 0.99).to(dtype if dtype in FLOATS else torch.float32),
        "B": lambda: torch.rand(shape_) > 0.5,
        "D": lambda: positive_definite(shape_).to(dtype),
        "N": lambda: torch.arange(1, shape_[-1] + 1, dtype=torch.int32).expand(shape_).clone(),
    }
    return make[node.func.id]()
