"""Random backwards with hooks: captured by compiled autograd, and compared with eager event by event.

    python -m tests.fuzz.backwards --programs 10000            the captured graph as it is
    python -m tests.fuzz.backwards --programs 100 --compiled   compiled by opforge, and a part of the forward too

A program is a graph of operators over a few leaves, with hooks at random places, whose backward runs once or more, for all leaves or some tensors.
Some hooks raise, take gradients away, or return what does not fit. Compiled parts of the forward have graph breaks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from opforge import compiled_autograd

Tensor = torch.Tensor
SIZE = 4
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin, torch.tanh, torch.sigmoid, lambda t: t * 2, lambda t: t.t(), lambda t: t.softmax(-1), lambda t: t.flip(0), lambda t: t.cumsum(1),
    lambda t: t[:, :2].repeat(1, 2), lambda t: t.sum(0, keepdim=True).expand(SIZE, SIZE), lambda t: t.contiguous().view(-1).view(SIZE, SIZE),
    lambda t: torch.nn.functional.layer_norm(t, (SIZE,)), lambda t: t.double().float(),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.mul, torch.matmul, torch.maximum, lambda a, b: torch.where(a > 0, a, b), lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: torch.stack([a, b]).mean(0), lambda a, b: torch.addmm(a, a, b),
]  # fmt: skip


class Twice(torch.autograd.Function):
    """An autograd function with two results. Often only one of them is used."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return first * b + second, first * a + second


class Nothing(torch.autograd.Function):
    """An autograd function that has no gradient for one of its arguments."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.cos(), None


def refuse(*given: Any) -> None:
    raise ValueError("this hook refuses")


# What a hook of a tensor, and of a node, may do that it seldom does.
ODD_HOOKS: list[Callable[[Tensor], Any]] = [refuse, lambda g: 1, lambda g: g.sum(), lambda g: g.double()]
ODD_NODE_HOOKS: list[Callable[[tuple[Tensor | None, ...]], Any]] = [
    refuse, lambda gs: gs[0], lambda gs: (*gs, None), lambda gs: (None,) * len(gs), lambda gs: (None, *gs[1:]),
]  # fmt: skip


@dataclass
class Seen:
    """What hooks saw, in order: their names with which leaves had gradients; the values; and how it ended."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    ended: str = ""

    def same(self, other: Seen) -> str:
        """How they differ, or ""."""
        if self.ended != other.ended:
            return f"ended with {other.ended!r}, in eager {self.ended!r}"
        if self.events != other.events:
            first = next((k for k, (a, b) in enumerate(zip(self.events, other.events, strict=False)) if a != b), -1)
            return f"event {first}: {other.events[first:][:1]}, in eager {self.events[first:][:1]}"
        for k, (a, b) in enumerate(zip(self.values, other.values, strict=True)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"value {k} differs by {float((a - b).abs().max()) if a.shape == b.shape else b.shape}"
        return ""


class Program:
    """The program of a seed, run with a compiler for its captured backwards, or by eager's engine for None."""

    def __init__(
        self, seed: int, compile: Callable[..., Any] | None, forward: Callable[[Any], Any] | None = None
    ) -> None:
        self.rng, self.compile, self.forward = random.Random(seed), compile, forward
        self.seen, self.kept, self.tensors = Seen(), list[Any](), list[Tensor]()
        torch.manual_seed(seed)
        self.leaves = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(3)]

    def run(self) -> Seen:
        saving = saved_tensors_hooks(lambda t: t.detach().clone(), self._unpack)
        # Dynamo reads what a function has saved while it compiles, which calls hooks once more.
        hooked = self.rng.random() < 0.15 and self.forward is None
        with saving if hooked else nullcontext():
            self._build()
        try:
            self._backwards()
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            self.seen.ended = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        self.seen.values += [t.grad for t in (*self.leaves, *self.kept) if isinstance(t, Tensor) and t.grad is not None]
        return self.seen

    def _note(self, name: str, *tensors: Tensor | None) -> None:
        self.seen.events.append(
            (name, *(leaf.grad is not None for leaf in self.leaves), *(t is not None for t in tensors))
        )
        self.seen.values.extend(t.detach().clone() for t in tensors if t is not None)

    def _unpack(self, t: Tensor) -> Tensor:
        self._note("unpack")
        return t

    def _build(self) -> None:
        rng, note = self.rng, self._note
        for k, leaf in enumerate(self.leaves):
            if rng.random() < 0.3:
                leaf.register_hook(lambda g, k=k: note(f"leaf {k}", g))
            if rng.random() < 0.3:
                leaf.register_post_accumulate_grad_hook(lambda t, k=k: note(f"accumulated {k}", t.grad))
            if rng.random() < 0.2:
                node = get_gradient_edge(leaf).node
                self.kept.append(node)
                node.register_prehook(lambda gradients, k=k: note(f"leaf before {k}", *gradients))
                node.register_hook(lambda _, given, k=k: note(f"leaf after {k}", *given))
        tensors = [leaf * 1.0 if rng.random() < 0.5 else leaf for leaf in self.leaves]
        for k in range(rng.randint(2, 9)):
            found = self._step(tensors)
            for j, t in enumerate(found):
                self._hooks(f"{k}.{j}", t)
            tensors += found
        self.tensors = [t for t in tensors if t.grad_fn is not None]

    def _step(self, tensors: list[Tensor]) -> list[Tensor]:
        rng = self.rng
        kind, a, b = rng.random(), rng.choice(tensors), rng.choice(tensors)
        if kind < 0.4:
            function: Any = rng.choice(UNARY)
            if rng.random() < 0.1:
                return [checkpoint(function, a, use_reentrant=False)]
            return [self._compiled(function)(a)]
        if kind < 0.75:
            return [self._compiled(self._broken() if rng.random() < 0.3 else rng.choice(BINARY))(a, b)]
        if kind < 0.83:
            return list(Twice.apply(a, b))
        if kind < 0.85:
            # Without any gradient a compiled backward gives zeros, unless it is captured.
            return [Nothing.apply(a, b) if self.forward is None else a - b]
        if kind < 0.95:
            copy = a.clone()
            copy[rng.randrange(SIZE)].mul_(b[0])
            return [copy]
        top, bottom = a.split(2)
        return [torch.cat([bottom, top]), torch.cat([top, top.sin()])]

    def _broken(self) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of which Dynamo makes three graphs."""
        first, last = self.rng.choice(UNARY), self.rng.choice(UNARY)
        middle = self.rng.choice(BINARY)

        def broken(a: Tensor, b: Tensor) -> Tensor:
            c = first(a)
            torch._dynamo.graph_break()
            c = middle(c, b)
            torch._dynamo.graph_break()
            return last(c) * a

        return broken

    def _compiled(self, function: Any) -> Any:
        chosen = self.rng.random() < 0.3
        return self.forward(function) if chosen and self.forward is not None else function

    def _hooks(self, name: str, t: Tensor) -> None:
        rng, note = self.rng, self._note
        if t.grad_fn is None:
            return
        if rng.random() < 0.25:
            t.register_hook(lambda g: note(f"tensor {name}", g))
        if rng.random() < 0.1:
            t.register_hook(lambda g: g * 0.5)
        if rng.random() < 0.1:
            t.retain_grad()
            self.kept.append(t)
        if rng.random() < 0.15:
            t.grad_fn.register_prehook(lambda gradients: note(f"before {name}", *gradients))
        if rng.random() < 0.15:
            t.grad_fn.register_hook(lambda made, _: note(f"after {name}", *made))
        if rng.random() < 0.05:
            t.register_hook(lambda g: engine().queue_callback(lambda: note(f"end {name}")))
        if rng.random() < 0.02:
            t.register_hook(rng.choice(ODD_HOOKS))
        if rng.random() < 0.04 and self.forward is None:
            odd = rng.choice(ODD_NODE_HOOKS)
            if rng.random() < 0.5:
                t.grad_fn.register_prehook(odd)
            else:
                t.grad_fn.register_hook(lambda made, _: odd(made))

    def _backwards(self) -> None:
        rng = self.rng
        roots = rng.sample(self.tensors, min(len(self.tensors), rng.choice([1, 1, 1, 2])))
        times = rng.choice([1, 1, 2, 3])
        # Of a single root from which no way leads to the inputs eager calls the hooks; a captured backward computes nothing.
        below, starts_at = _nodes_below(roots[0]), {t.grad_fn for t in roots}
        inner = [t for t in self.tensors if t.grad_fn in below and t.grad_fn not in starts_at]
        reached = [leaf for leaf in self.leaves if get_gradient_edge(leaf).node in below]
        for k in range(times):
            keep = k + 1 < times or rng.random() < 0.2
            mode = rng.choice(["all", "all", "inputs", "grad"])
            some = rng.sample(self.leaves, 2) if len(roots) > 1 else rng.sample(reached, min(2, len(reached)))
            if inner and rng.random() < 0.4:
                some.append(rng.choice(inner))
                self.kept.append(some[-1])
            # Anew each time: eager may make a view of one the gradient of a leaf, and add to it later.
            starts = [torch.full_like(t, 0.5) for t in roots]
            with compiled_autograd.enable(self.compile) if self.compile is not None else nullcontext():
                if mode == "grad":
                    found = torch.autograd.grad(roots, some, starts, retain_graph=keep, allow_unused=True)
                    self.seen.events.append(("grad", *(g is not None for g in found)))
                    self.seen.values += [g for g in found if g is not None]
                else:
                    torch.autograd.backward(roots, starts, retain_graph=keep, inputs=some if mode == "inputs" else None)
            if rng.random() < 0.2:
                self.leaves[0].grad = None


def engine() -> Any:
    """The engine, as a program finds it while a backward runs."""
    return torch.autograd.Variable._execution_engine


def _nodes_below(root: Tensor) -> set[Any]:
    found, work = set[Any](), [root.grad_fn]
    while work:
        node = work.pop()
        if node is not None and node not in found:
            found.add(node)
            work += [n for n, _ in node.next_functions]
    return found


def difference(seed: int, compiled: bool = False) -> str:
    """How the captured backward of a seed differs from eager's, or ""."""
    torch._dynamo.reset()
    compiled_autograd.reset()
    # A node of a compiled part has other arguments than the nodes in its place, which its hooks see: so the part is compiled in both runs.
    forward = torch.compile(backend="opforge") if compiled else None
    compiler: Callable[..., Any] = torch.compile(backend="opforge") if compiled else lambda graph: graph
    return Program(seed, None, forward).run().same(Program(seed, compiler, forward).run())


def main(
    programs: Annotated[int, typer.Option(help="how many")] = 1000,
    first: Annotated[int, typer.Option(help="the first seed")] = 0,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="compile backwards, and parts of the forwards, by opforge")
    ] = False,
) -> None:
    console, start, found = Console(), time.perf_counter(), dict[int, str]()
    for seed in track(range(first, first + programs), "backwards", console=console):
        if text := difference(seed, compiled):
            found[seed] = text
            console.print(f"seed {seed}: {text}", markup=False)
    console.print(f"{programs} backwards, {len(found)} differ ({time.perf_counter() - start:.0f} s)")
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
