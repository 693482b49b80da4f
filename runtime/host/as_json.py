"""Host programs as JSON, and back: reading what was printed gives the same program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...errors import HostProgramError
from ..ir.index import Atom, Expr, Quotient, Sym
from . import program as forms
from .program import HostProgram
from .verify import verify

__all__ = ["from_json", "to_json"]

FORMS: Mapping[str, type] = {
    name: form for name, form in vars(forms).items() if isinstance(form, type) and is_dataclass(form)
}
VERSION = 1


def to_json(program: HostProgram) -> str:
    """One line for each instruction, so that two programs can be compared."""
    data = _encoded(program)
    instructions = ",\n  ".join(json.dumps(x) for x in data.pop("instructions"))
    head = json.dumps({"version": VERSION, **data}, indent=1)
    return f'{head[:-2]},\n "instructions": [\n  {instructions}\n ]\n}}\n'


def from_json(text: str) -> HostProgram:
    """Raises `HostProgramError` for what is no host program, or none that can run."""
    try:
        return _read(text)
    except (RecursionError, MemoryError):  # the latter is what Python's parser raises for a formula
        raise HostProgramError("it is nested too deeply to be read") from None


def _read(text: str) -> HostProgram:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise HostProgramError(f"no JSON: {error}") from None
    if not isinstance(data, dict) or (version := data.pop("version", None)) != VERSION:
        told = f"version {version}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise HostProgramError(f"a host program of version {VERSION} was expected, this is {told}")
    program = _decoded(data, "host program")
    if not isinstance(program, HostProgram):
        raise HostProgramError(f"a {type(program).__name__} is no host program")
    verify(program)
    return program


def _encoded(x: Any) -> Any:
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return {"float": repr(x)}
    if isinstance(x, complex):
        return {"complex": [repr(x.real), repr(x.imag)]}
    if isinstance(x, Expr):
        return {"size": _terms(x)}
    if isinstance(x, tuple):
        return [_encoded(y) for y in x]
    if isinstance(x, Mapping):
        return {"map": {k: _encoded(v) for k, v in x.items()}}
    # What has its default is left out.
    told = {f.name: _encoded(getattr(x, f.name)) for f in fields(x) if getattr(x, f.name) != _default(f)}
    return {"is": type(x).__name__, **told}


def _default(f: Any) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _terms(e: Expr) -> list[list[Any]]:
    """A sum of products: each a coefficient and factors."""
    return [[c, *(_factor(a) for a in monomial)] for monomial, c in e.terms]


def _factor(a: Atom) -> Any:
    if isinstance(a, Quotient):
        return [a.kind, _terms(a.num), _terms(a.den)]
    assert isinstance(a, Sym), a
    return a.name


def _decoded(x: Any, where: str) -> Any:
    if isinstance(x, list):
        return tuple(_decoded(y, f"{where}[{k}]") for k, y in enumerate(x))
    if not isinstance(x, dict):
        return x
    try:
        match x:
            case {"float": str(text)}:
                return float(text)
            case {"complex": [str(real), str(imag)]}:
                return complex(float(real), float(imag))
            case {"size": list(terms)}:
                return _size(terms)
            case {"map": dict(items)}:
                return {k: _decoded(v, f"{where}.{k}") for k, v in items.items()}
            case {"is": str(name), **given}:
                return _formed(name, given, where)
    except (TypeError, ValueError) as error:
        raise HostProgramError(f"{where}: {error}") from None
    raise HostProgramError(f"{where}: {json.dumps(x)[:100]} is no value")


def _formed(name: str, given: Mapping[str, Any], where: str) -> Any:
    form = FORMS.get(name)
    if form is None:
        raise HostProgramError(f"{where}: there is no {name!r}")
    known = {f.name for f in fields(form)}
    needed = {f.name for f in fields(form) if _default(f) is MISSING}
    for key in (*given, *needed):
        if key not in known:
            raise HostProgramError(f"{where}: {name} has no {key!r}; it has {', '.join(sorted(known)) or 'nothing'}")
        if key not in given:
            raise HostProgramError(f"{where}: {name} lacks {key!r}")
    inside = f"{where}.{name}" if name != "HostProgram" else name
    values = {k: _decoded(v, f"{inside}.{k}") for k, v in given.items()}
    for key, hint in get_type_hints(form, vars(forms)).items():
        if key in values and not _fits(values[key], hint):
            raise HostProgramError(f"{inside}.{key}: {str(values[key])[:100]} does not belong here")
    return form(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type as the forms' fields name them. What an operator takes may be a tuple at any depth."""
    if hint == forms.Value and isinstance(value, tuple):
        return all(_fits(v, hint) for v in value)
    kind, inside = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, h) for h in inside)
    if kind is Literal:
        return value in inside
    if kind is tuple:
        hints = inside[:1] * len(value) if inside[1:] == (...,) and isinstance(value, tuple) else inside
        return isinstance(value, tuple) and len(value) == len(hints) and all(map(_fits, value, hints))
    if kind is Mapping:
        return isinstance(value, dict) and all(_fits(v, inside[1]) for v in value.values())
    if kind is not None:
        raise TypeError(f"fields of the type {hint} cannot be read back")
    return isinstance(value, hint) and (hint is not int or not isinstance(value, bool))


def _size(terms: list[Any]) -> Expr:
    for c, *_ in terms:
        if type(c) is not int:
            raise ValueError(f"{c!r} is no coefficient of a size")
    return Expr(tuple((tuple(_atom(f) for f in factors), c) for c, *factors in terms))


def _atom(factor: Any) -> Atom:
    match factor:
        case str(name):
            return Sym(name)
        case [("//" | "%") as kind, list(num), list(den)]:
            return Quotient(kind, _size(num), _size(den))
    raise ValueError(f"{factor!r} is no factor of a size")
