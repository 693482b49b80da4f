"""A folder of `debug.folders` read back: the graph, built node by node from its text, and inputs as it was given."""

from __future__ import annotations

import ast
import json
import operator
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..errors import OpforgeError
from ..runtime.observe.folder import FORMAT, STATES

__all__ = ["FolderError", "Recorded", "read_folder", "result_of"]


class FolderError(OpforgeError):
    """A folder holds no graph that can be run; the message says what it lacks."""


#: What a damaged file raises where it is read.
_UNREADABLE = (
    *(OSError, RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, EOFError),
    pickle.UnpicklingError,
)


@dataclass
class Recorded:
    """A graph, what graph.json says of it, and the saved values of tensors by name."""

    graph: fx.GraphModule
    about: dict[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def symbolic(self) -> bool:
        """Whether sizes were unknown when the graph was compiled."""
        return bool(self.about.get("symbolic"))

    def inputs(self, seed: int = 0, device: str = "") -> list[Any]:
        """New inputs, the same for the same seed: saved values, else random ones in the range that was seen.

        Raises `FolderError` where graph.json describes none.
        """
        try:
            generator = torch.Generator().manual_seed(seed)
            return _values([(told["name"], told) for told in self.about["inputs"]], self.tensors, generator, device)
        except _UNREADABLE as error:
            raise FolderError(f"inputs cannot be made as graph.json says: {type(error).__name__}: {error}") from None


def read_folder(folder: Path, device: str = "") -> Recorded:
    """Read a graph's folder; `device`: where its tensors shall be, instead of where they were.

    Raises `FolderError` where the folder, or something that the graph needs, is not there.
    """
    if not folder.is_dir():
        raise FolderError(f"there is no folder {folder}")
    try:
        about = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        below = sorted(p.parent for p in folder.glob("**/graph.json"))
        hint = f"; did you mean {below[0]}?" if below else "; TORCH_COMPILE_DEBUG=1 writes such folders"
        raise FolderError(f"{folder} is no graph's folder: it has no graph.json{hint}") from None
    except (OSError, ValueError) as error:
        raise FolderError(f"{folder}/graph.json cannot be read: {error}") from None
    if not isinstance(about, dict):
        raise FolderError(f"{folder}/graph.json holds no graph")
    if "unwritten" in about:
        raise FolderError(f"{folder}: this graph could not be written down: {about['unwritten']}")
    if about.get("format") != FORMAT:
        raise FolderError(f"{folder}: format {about.get('format')!r} of graph.json is not known (expected {FORMAT})")
    if (lacks := _lacks(about)) is not None:
        raise FolderError(f"{folder}/graph.json describes no graph: {lacks}")
    for one in _devices(folder, about, device):
        if one.type == "cuda" and (one.index or 0) >= torch.cuda.device_count():
            raise FolderError(
                f"{folder}: the graph's tensors are on {one}, which is not here; --device cpu runs it on the processor"
            )
    try:
        text = (folder / "program.py").read_text(encoding="utf-8")
        file = folder / "tensors.pt"
        tensors = torch.load(file, weights_only=True) if file.exists() else {}
        graph = _module(text, about, tensors, device)
    except FolderError as error:
        raise FolderError(f"{folder}: {error}") from None
    except _UNREADABLE as error:
        raise FolderError(f"{folder} cannot be read: {type(error).__name__}: {error}") from None
    if (count := sum(n.op == "placeholder" for n in graph.graph.nodes)) != len(about["inputs"]):
        raise FolderError(f"{folder}: program.py takes {count} inputs, graph.json describes {len(about['inputs'])}")
    return Recorded(graph, about, tensors)


def _lacks(about: Mapping[str, Any]) -> str | None:
    """What graph.json lacks of what is read by name, or None."""
    parts = {"versions": dict, "settings": dict, "torch": dict, "graphs": dict, "constants": dict, "inputs": list}
    for name, kind in parts.items():
        if not isinstance(about.get(name), kind):
            return f"{name} is no {kind.__name__}"
    names = [*about["versions"].values(), *about["graphs"].values()]
    if not {"opforge", "torch"} <= about["versions"].keys() or not all(isinstance(n, str) for n in names):
        return "its versions or graphs have no names"
    states = about["torch"]
    if not isinstance(states.get("autocast"), dict) or not states.keys() >= STATES.keys():
        return f"what torch was set to is not all there ({', '.join(STATES)}, autocast)"
    for told in [*about["inputs"], *about["constants"].values()]:
        if not isinstance(told, dict) or told.get("kind") not in ("tensor", "size", "number"):
            return "an input or constant has no kind"
        if told["kind"] == "tensor" and not isinstance(told.get("extent"), int):
            return "a tensor has no extent"
    if not all(isinstance(told.get("name"), str) for told in about["inputs"]):
        return "an input has no name"
    return None


def _devices(folder: Path, about: Mapping[str, Any], device: str) -> set[torch.device]:
    """Where the graph's tensors are to be."""
    try:
        torch.device(device or "cpu")
    except RuntimeError:
        raise FolderError(f"--device: torch knows no device {device!r}") from None
    try:
        return {torch.device(device or told["device"]) for told in _tensors(about)}
    except _UNREADABLE as error:
        raise FolderError(f"{folder}/graph.json describes no graph: {type(error).__name__}: {error}") from None


def _tensors(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [t for t in [*about["inputs"], *about["constants"].values()] if t["kind"] == "tensor"]


def _values(
    told: Sequence[tuple[str, Mapping[str, Any]]],
    saved: Mapping[str, torch.Tensor],
    generator: torch.Generator,
    device: str,
) -> list[Any]:
    """Values as described; tensors that shared a storage share one."""
    storages: dict[str, torch.Tensor] = {}
    extents: dict[str, int] = {}
    for _, t in told:
        if t["kind"] == "tensor":
            extents[t["storage"]] = max(extents.get(t["storage"], 0), t["extent"])
    made = []
    for name, t in told:
        if t["kind"] != "tensor":
            made.append(_number(t))
            continue
        dtype = getattr(torch, t["dtype"])
        if t["storage"] not in storages:
            values = _contents(extents[t["storage"]], dtype, t.get("range"), generator)
            storages[t["storage"]] = values.to(device or t["device"])
        base = storages[t["storage"]]
        if name in saved:
            base[: saved[name].numel()] = saved[name].to(base.device, base.dtype)
        value = torch.empty(0, dtype=dtype, device=base.device)
        value.set_(base.untyped_storage(), t["offset"], t["size"], t["stride"])
        if t["parameter"]:
            value = torch.nn.Parameter(value, t["requires_grad"])
        elif t["requires_grad"]:
            value.requires_grad_()
            value = value if t["leaf"] else result_of(value)
        made.append(value)
    return made


def result_of(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor that is another one's result, which a graph may write in place; `made_of` is the leaf, which has its gradient."""
    value = leaf.clone()
    value.made_of = leaf  # type: ignore[attr-defined]
    return value


def _number(told: Mapping[str, Any]) -> Any:
    value = told["value"]
    if told.get("symbolic"):
        raise FolderError("an input is a number that was unknown when the graph was compiled")
    return float(value) if told.get("type") == "float" else value


def _contents(count: int, dtype: torch.dtype, seen: Sequence[float] | None, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        low, high = seen or (0, 1)
        return torch.randint(int(low), int(high) + 1, (count,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(count, dtype=torch.complex128, generator=generator).to(dtype)
    values = torch.randn(count, dtype=torch.float64, generator=generator)
    if seen is not None and not (seen[0] < 0 < seen[1]):  # one sign, like variances and probabilities
        values = seen[0] + (seen[1] - seen[0]) * torch.rand(count, dtype=torch.float64, generator=generator)
    elif seen is not None and (size := max(-seen[0], seen[1])) > 0:
        values = values.clamp(-4, 4) / 4 * size
    return values.to(dtype)


def _module(text: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: str) -> fx.GraphModule:
    """The graphs of program.py, each built by its statements."""
    try:
        tree = ast.parse(text)
        names: dict[str, Any] = {"__name__": "program"}
        head: list[ast.stmt] = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom, ast.Assign))]
        exec(compile(ast.Module(head, []), "program.py", "exec"), names)
    except ImportError as error:
        raise FolderError(
            f"program.py needs {error.name or error}: {error}; --import MODULE imports what registers operators"
        ) from None
    except SyntaxError as error:
        raise FolderError(f"program.py:{error.lineno}: {error.msg}") from None
    functions = {
        c.name: f for c in tree.body if isinstance(c, ast.ClassDef) for f in c.body if isinstance(f, ast.FunctionDef)
    }
    constants = list(about["constants"].items())
    generator = torch.Generator().manual_seed(1)
    values = dict(zip(dict(constants), _values(constants, tensors, generator, device), strict=True))
    made: dict[str, fx.GraphModule] = {}
    for path in sorted(about["graphs"], key=lambda p: -len(p.split(".")) if p else 1):  # the innermost first
        if about["graphs"][path] not in functions:
            raise FolderError(f"program.py has no class {about['graphs'][path]}")
        root = torch.nn.Module()
        for name, value in [*values.items(), *made.items()]:
            if not path or name.startswith(f"{path}."):
                _set(root, name[len(path) + 1 :] if path else name, value)
        made[path] = fx.GraphModule(root, _Reader(functions[about["graphs"][path]], names, device).graph())
    return made[""]


def _set(root: torch.nn.Module, name: str, value: Any) -> None:
    *folders, last = name.split(".")
    for folder in folders:
        if not hasattr(root, folder):
            setattr(root, folder, torch.nn.Module())
        root = getattr(root, folder)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert, ast.Not: operator.not_}
_IN_PLACE = {
    ast.Add: operator.iadd, ast.Sub: operator.isub, ast.Mult: operator.imul, ast.Div: operator.itruediv, ast.FloorDiv: operator.ifloordiv,
    ast.Mod: operator.imod, ast.Pow: operator.ipow, ast.MatMult: operator.imatmul, ast.LShift: operator.ilshift,
    ast.RShift: operator.irshift, ast.BitAnd: operator.iand, ast.BitOr: operator.ior, ast.BitXor: operator.ixor,
}  # fmt: skip


class _Reader:
    """Builds a graph of the statements that FX writes: each calls one function, of values that have names."""

    def __init__(self, function: ast.FunctionDef, names: Mapping[str, Any], device: str) -> None:
        self.function = function
        self.names = dict(names)
        self.nodes: dict[str, Any] = {}
        self.made = fx.Graph()
        self.device = device

    def graph(self) -> fx.Graph:
        for argument in self.function.args.args[1:]:
            self.nodes[argument.arg] = self.made.placeholder(argument.arg)
        for statement in self.function.body:
            self._statement(statement)
        self.made.lint()
        return self.made

    def _statement(self, s: ast.stmt) -> None:
        if isinstance(s, ast.Return):
            self.made.output(self._plain(s.value) if s.value is not None else None)
        elif isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name):
            args = (self.nodes[s.target.id], self._plain(s.value))
            self.nodes[s.target.id] = self._call(_IN_PLACE[type(s.op)], args, s.target.id)
        elif isinstance(s, (ast.Assign, ast.AnnAssign)) and s.value is not None:
            targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            if isinstance(s.value, ast.Constant) and s.value.value is None and isinstance(targets[0], ast.Name):
                return  # FX lets go of values so
            if isinstance(targets[0], ast.Subscript):
                subscript = targets[0]
                where = (self._plain(subscript.value), self._plain(subscript.slice))
                self._call(operator.setitem, (*where, self._plain(s.value)), "setitem")
            elif isinstance(targets[0], ast.Name):
                self.nodes[targets[0].id] = self._value(s.value, targets[0].id)
            else:
                self._refuse(s)
        elif not isinstance(s, (ast.Pass, ast.Expr)):
            self._refuse(s)

    def _value(self, e: ast.expr, name: str) -> Any:
        if isinstance(e, ast.Name) and e.id in self.nodes:
            return self.nodes[e.id]
        if isinstance(e, ast.Call):
            args = tuple(self._plain(a) for a in e.args)
            kwargs = {k.arg: self._plain(k.value) for k in e.keywords if k.arg is not None}
            if isinstance(e.func, ast.Attribute):
                if (path := self._own(e.func)) is not None:
                    return self.made.create_node("call_module", path, args, kwargs, name)
                if isinstance(e.func.value, ast.Name) and e.func.value.id in self.nodes:
                    args = (self.nodes[e.func.value.id], *args)
                    return self.made.create_node("call_method", e.func.attr, args, kwargs, name)
            return self._call(self._plain(e.func), args, name, kwargs)
        if isinstance(e, ast.UnaryOp) and isinstance(e.operand, ast.BinOp):  # FX writes pow(-2, x) without brackets
            return self._call(
                _BINARY[type(e.operand.op)], (-self._plain(e.operand.left), self._plain(e.operand.right)), name
            )
        if isinstance(e, ast.BinOp):
            return self._call(_BINARY[type(e.op)], (self._plain(e.left), self._plain(e.right)), name)
        if isinstance(e, ast.Compare) and len(e.ops) == 1:
            return self._call(_BINARY[type(e.ops[0])], (self._plain(e.left), self._plain(e.comparators[0])), name)
        if isinstance(e, ast.UnaryOp):
            return self._call(_UNARY[type(e.op)], (self._plain(e.operand),), name)
        if isinstance(e, ast.Subscript):
            return self._call(operator.getitem, (self._plain(e.value), self._plain(e.slice)), name)
        if isinstance(e, ast.Attribute):
            if (path := self._own(e)) is not None:
                return self.made.create_node("get_attr", path, (), {}, name)
            return self._call(getattr, (self._plain(e.value), e.attr), name)
        self._refuse(e)
        return None

    def _call(self, target: Any, args: tuple[Any, ...], name: str, kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        return self.made.create_node("call_function", target, args, dict(kwargs or {}), name)

    def _own(self, e: ast.expr) -> str | None:
        """The path of an attribute of the module itself, which may hold indices (`getattr(self, "0")`)."""
        if isinstance(e, ast.Attribute):
            if isinstance(e.value, ast.Name) and e.value.id == "self":
                return e.attr
            below = self._own(e.value)
            return None if below is None else f"{below}.{e.attr}"
        if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id == "getattr" and len(e.args) == 2:
            base = "" if isinstance(e.args[0], ast.Name) and e.args[0].id == "self" else self._own(e.args[0])
            if base is not None and isinstance(e.args[1], ast.Constant):
                name = str(e.args[1].value)
                return f"{base}.{name}" if base else name
        return None

    def _plain(self, e: ast.expr) -> Any:
        """An argument: nodes, numbers, dtypes and what holds them."""
        try:
            value = eval(compile(ast.Expression(e), "program.py", "eval"), self.names, self.nodes)
        except Exception as error:  # noqa: BLE001 - the file may say anything
            raise FolderError(f"program.py:{e.lineno}: {type(error).__name__}: {error}") from None
        return torch.device(self.device) if self.device and isinstance(value, torch.device) else value

    def _refuse(self, what: ast.AST) -> None:
        raise FolderError(
            f"program.py:{getattr(what, 'lineno', 0)}: a statement that no graph has: {ast.unparse(what)}"
        )
