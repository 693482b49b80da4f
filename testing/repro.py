"""`opforge repro FOLDER`: one recorded graph by eager kernels and by opforge, judged by a float64 run."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import opforge

from ..errors import OpforgeError, first_line
from ..generated.config import FIELDS
from ..report.units import count_text
from ..runtime.torch_compat import numbers_of_data_followed
from .judge import as_right, equal, shown
from .noise import MANY_RUNS, NOISY_RUNS, Noise
from .recorded import Recorded, read_folder, result_of

__all__ = ["Sight", "Verdict", "check", "main"]


@dataclass
class Sight:
    """What is seen of one run: the exception, and by name what each result, gradient and input is afterwards."""

    raised: Exception | None = None
    facts: dict[str, str] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """kind  same, differs or raises; what  what differs, of a fixed set of words, by which a smaller graph is found to fail alike."""

    kind: str
    what: str = ""
    text: str = ""

    @property
    def failed(self) -> bool:
        """Whether opforge did something else than eager."""
        return self.kind != "same"

    def __str__(self) -> str:
        return f"{self.kind.upper()}{': ' if self.text else ''}{self.text}"


def main(folder: Path, seed: int = 0, device: str = "") -> int:
    """Run the folder's graph and print the verdict. Returns the exit code: 0 same, 1 differs or raises, 2 for a bad folder."""
    try:
        recorded = read_folder(folder, device)
        print(described(recorded, folder))
        verdict = check(recorded, seed, device)
    except OpforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(verdict)
    return int(verdict.failed)


def described(recorded: Recorded, folder: Path) -> str:
    """Two lines about the graph, with the versions that it was recorded with."""
    then = recorded.about["versions"]
    calls = sum(n.op.startswith("call") for n in recorded.graph.graph.nodes)
    told = recorded.about["inputs"]
    random = sum(t["kind"] == "tensor" and t["name"] not in recorded.tensors and t["extent"] > 0 for t in told)
    sizes = ", symbolic sizes" if recorded.symbolic else ""
    settings = recorded.about["settings"]
    inputs = (
        f"{count_text(len(told), 'input')}, {random} with random values" if random else count_text(len(told), "input")
    )
    line = f"{folder}: {count_text(calls, 'call')}, {inputs}{sizes}"
    now = f"opforge {opforge.__version__}, torch {torch.__version__}"
    was = f"opforge {then['opforge']}, torch {then['torch']}"
    return f"{line}\nrecorded with {was}{'' if was == now else f', run with {now}'}{f'; settings {settings}' if settings else ''}"


def check(recorded: Recorded, seed: int = 0, device: str = "") -> Verdict:
    """Compare one run of opforge with eager's."""
    eager = observe(recorded, _interpreted(recorded.graph), seed, device)
    random = _is_random(recorded, eager, seed, device)
    counted = opforge.stats()["fallbacks"]
    ours = observe(recorded, _compiled(recorded, random), seed, device)
    now = opforge.stats()["fallbacks"]
    fallbacks = [why for why, n in now.items() if n > counted.get(why, 0)]
    broken = [why for why in fallbacks if why.startswith(("internal error", "BuildError"))]
    if broken:
        return Verdict("raises", broken[0].split(":")[0] + _type_in(broken[0]), f"opforge: {broken[0]}")
    if type(eager.raised) is not type(ours.raised):
        if ours.raised is not None:
            text = f"opforge: {type(ours.raised).__name__}: {first_line(ours.raised)}; eager {_raises(eager.raised)}"
            return Verdict("raises", f"exception {type(ours.raised).__name__}", text)
        return Verdict("differs", "no exception", f"opforge raises nothing; eager {_raises(eager.raised)}")
    if eager.raised is not None:
        return Verdict("same", text=f"both raise {type(eager.raised).__name__}: {first_line(eager.raised)}")
    found = _differences(recorded, eager, ours, random, seed, device)
    if found:
        (what, first), more = found[0], len(found) - 1
        return Verdict("differs", what, first + (f" (and {more} more)" if more else ""))
    text = f"{len(eager.values)} tensors are as right as eager's"
    return Verdict("same", text=text + (f"; opforge ran it by eager kernels: {fallbacks[0]}" if fallbacks else ""))


def _type_in(reason: str) -> str:
    parts = [p.strip() for p in reason.split(":")]
    return f" {parts[1]}" if len(parts) > 2 else ""


def _raises(error: Exception | None) -> str:
    return f"raises {type(error).__name__}: {first_line(error)}" if error is not None else "raises nothing"


def _interpreted(graph: fx.GraphModule) -> Callable[..., Any]:
    return lambda *args: fx.Interpreter(graph).run(*args)


def _compiled(recorded: Recorded, random: bool) -> Callable[..., Any]:
    """The graph by opforge, with the settings it was recorded with; compiled at the first call. Random numbers are eager's, to be comparable."""
    known: Mapping[str, Any] = recorded.about.get("settings", {})
    options = {name: value for name, value in known.items() if name in FIELDS} | {"lazy_backward": False}
    if random:
        options["random"] = "eager"
    graph = copy.deepcopy(recorded.graph)
    if recorded.symbolic:
        torch.compiler.reset()
        for node in (
            graph.graph.nodes
        ):  # FX prints a power of a negative number as the negative of a power, and Dynamo reads that
            if node.target is operator.pow and isinstance(node.args[0], (int, float)):
                node.target = torch.pow
        graph.recompile()
        compiled = torch.compile(graph, backend="opforge", dynamic=True, options=options)

        def whole(*args: Any) -> Any:
            with numbers_of_data_followed():
                return compiled(*args)

        return whole
    return lambda *args: opforge.compile_fx(graph, args, options=options)(*args)


@contextlib.contextmanager
def _state(about: Mapping[str, Any], wide: bool) -> Iterator[None]:
    """What torch was set to."""
    told = about["torch"]
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, before[0])
        stack.callback(torch.set_default_dtype, before[1])
        stack.callback(torch.set_float32_matmul_precision, before[2])
        torch.use_deterministic_algorithms(told["deterministic"])
        torch.set_default_dtype(torch.float64 if wide else getattr(torch, told["default_dtype"]))
        torch.set_float32_matmul_precision(told["float32_matmul_precision"])
        stack.enter_context(torch.inference_mode(told["inference"]))
        stack.enter_context(torch.set_grad_enabled(told["grad"]))
        for kind, dtype in {} if wide else told["autocast"].items():
            stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
        yield


def observe(
    recorded: Recorded,
    call: Callable[..., Any],
    seed: int,
    device: str,
    wide: bool = False,
    noise: int | None = None,
    stream: int = 0,
) -> Sight:
    """One run with new inputs, forward and backward. `wide`: floating inputs are float64; `noise`: roundings move by that seed; `stream`
    seeds torch's generator.
    """
    inputs = recorded.inputs(seed, device)
    if wide:
        inputs = [_wide(v) for v in inputs]
    names = [t["name"] for t in recorded.about["inputs"]]
    sight = Sight()
    moved = contextlib.nullcontext() if noise is None else Noise(noise)
    try:
        with _state(recorded.about, wide), moved:
            torch.manual_seed(stream)
            leaves = pytree.tree_leaves(call(*inputs))
            followed = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
            tensors = [(n, v) for n, v in zip(names, inputs, strict=True) if isinstance(v, torch.Tensor)]
            if followed:
                torch.autograd.backward(followed, [_cotangent(t, k) for k, t in enumerate(followed)])
            for k, leaf in enumerate(leaves):
                _see(sight, f"result {k}", leaf)
            for name, value in tensors:
                leaf = getattr(value, "made_of", value)
                if leaf.requires_grad and leaf.is_leaf:
                    _see(sight, f"gradient of {name}", leaf.grad)
                _see(sight, f"{name} afterwards", value)
    except Exception as error:  # noqa: BLE001 - compared with the other run's
        sight.raised = _inner(error)
    return sight


def _inner(error: Exception) -> Exception:
    """What a backend raised, which Dynamo wraps."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
        return value
    wide = torch.empty_strided(value.shape, value.stride(), dtype=torch.float64, device=value.device).copy_(
        value.detach()
    )
    wide.requires_grad_(value.requires_grad)
    return result_of(wide) if hasattr(value, "made_of") else wide


def _cotangent(t: torch.Tensor, k: int) -> torch.Tensor:
    """A gradient of the k-th result: the same numbers in each run, all of them exact in short dtypes too."""
    generator = torch.Generator().manual_seed(k)
    return (torch.randint(-8, 9, t.shape, generator=generator) / 8).to(t.device, t.dtype)


def _see(sight: Sight, name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        sight.facts[name] = f"{type(value).__name__} {value!r}"
        return
    grad = "" if name.startswith("gradient") else f", requires_grad {value.requires_grad}"
    strides = (
        [s for n, s in zip(value.shape, value.stride(), strict=True) if n > 1]
        if value.layout == torch.strided and value.numel()
        else []
    )
    sight.facts[name] = f"{value.dtype}, size {list(value.shape)}, strides {strides}, {value.device}{grad}"
    sight.values[name] = value.detach().to_dense().resolve_conj().resolve_neg().cpu().clone()


def _is_random(recorded: Recorded, eager: Sight, seed: int, device: str) -> bool:
    """Whether results depend on torch's generator."""
    other = observe(recorded, _interpreted(recorded.graph), seed, device, stream=1)
    return any(
        not equal(v, other.values[k])
        for k, v in eager.values.items()
        if k in other.values and v.shape == other.values[k].shape
    )


def _differences(
    recorded: Recorded, eager: Sight, ours: Sight, random: bool, seed: int, device: str
) -> list[tuple[str, str]]:
    """(what, text) of each."""
    found = [
        (
            _what(name, "metadata"),
            f"{name}: eager {eager.facts.get(name, 'has none')}, here {ours.facts.get(name, 'has none')}",
        )
        for name in {**eager.facts, **ours.facts}
        if eager.facts.get(name) != ours.facts.get(name)
    ]
    unequal = [
        k
        for k, t in eager.values.items()
        if k in ours.values and t.shape == ours.values[k].shape and not equal(t, ours.values[k])
    ]
    if not unequal:
        return found
    exact = Sight()
    if not random:
        exact = observe(recorded, _interpreted(widened(recorded.graph)), seed, device, wide=True)
    runs: list[Sight] = []
    for count in (NOISY_RUNS, MANY_RUNS):
        if unequal:
            runs += [
                observe(recorded, _interpreted(recorded.graph), seed, device, noise=k) for k in range(len(runs), count)
            ]
        unequal = [k for k in unequal if not as_right(*_parts(eager, ours, exact, runs, k))]
    return found + [
        (_what(k, "value"), f"{k}: {shown(_real(eager.values[k]), _real(ours.values[k]), _real(exact.values.get(k)))}")
        for k in unequal
    ]


def _parts(eager: Sight, ours: Sight, exact: Sight, runs: Sequence[Sight], k: str) -> tuple[Any, ...]:
    noisy = [_real(r.values[k]) for r in runs if k in r.values]
    return _real(eager.values[k]), _real(ours.values[k]), _real(exact.values.get(k)), noisy, 0.0


def _real(t: Any) -> Any:
    return torch.view_as_real(t) if isinstance(t, torch.Tensor) and t.is_complex() else t


def _what(name: str, kind: str) -> str:
    part = "gradient" if name.startswith("gradient") else "input" if name.endswith(" afterwards") else "result"
    return f"{kind} of a {part}"


_SHORTER = (torch.float32, torch.float16, torch.bfloat16)


def widened(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph in float64: what it asks to be of a shorter dtype is not."""
    wide = copy.deepcopy(graph)
    for _, module in wide.named_modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            name = getattr(node.target, "__name__", node.target)
            if name == "_enter_autocast":
                node.args = (node.args[0], None, False, None)
            elif name in ("float", "half", "bfloat16") and node.op == "call_method":
                node.target = "double"
            else:
                node.args, node.kwargs = pytree.tree_map(_wide_dtype, (node.args, node.kwargs))
        module.recompile()
    for tensors in (dict(wide.named_parameters()), dict(wide.named_buffers())):
        for t in tensors.values():
            if t.dtype in _SHORTER:
                t.data = t.data.double()
    return wide


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if value in _SHORTER and isinstance(value, torch.dtype) else value
