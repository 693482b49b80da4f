"""The programs that are replayed: pointwise and reduction kernels, training, attention, logits, changing sizes, complex numbers and control flow.

Where nothing reads data the inputs are fake, so that programs of gigabytes cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from opforge.tests.snapshots.programs import GALLERY
from opforge.tests.support import control_programs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import attention

from programs import dynamic, gpu_models, memory_bound, training

Compiler = Callable[..., Callable[..., Any]]
Program = Callable[[Compiler], None]
CPU = torch.device("cpu")
attention.DEVICE = "cpu"

BOUND = tuple(
    n for n in memory_bound.BOUND if n not in ("gelu_chain", "where_clamp", "huber", "dequantize", "kl_divergence")
)
TRAINED = ("bert", "resnet18", "lstm", "unet", "gpt2_bf16")
MODELS = ("llama", "llama_train", "vit", "gpt2_train", "adamw", "linear_gelu", "linear_residual", "int8_linear", "bmm_softmax")  # fmt: skip
ATTENTION = ("composed", "composed, bias of heads", "composed, padding mask", "composed, odd steps")
DYNAMIC = ("mlp", "transformer block", "key-value cache", "training", "numbers", "nonzero")
CONTROL = {"branches": True, "scan of rows": True, "loop": False, "branch in loop": False}


def _gallery(name: str) -> Program:
    def program(compiler: Compiler) -> None:
        one = GALLERY[name]
        with torch.no_grad():
            compiler(one.run, dynamic=one.dynamic)(*one.inputs())

    return program


def _bound(name: str) -> Program:
    def program(compiler: Compiler) -> None:
        one = memory_bound.BOUND[name]
        with torch.no_grad(), FakeTensorMode():
            compiler(one.fn)(*[make(CPU) for make in one.inputs])

    return program


def _trained(name: str) -> Program:
    def program(compiler: Compiler) -> None:
        one = training.TRAINING[name]
        model = one.make()
        compiler(model)(*one.batch(torch.Generator().manual_seed(0))).backward()

    return program


def _model(name: str) -> Program:
    def program(compiler: Compiler) -> None:
        one = gpu_models.PROGRAMS[name]
        fn, inputs = one.make(CPU, True)
        if one.kind == "optimizer":
            compiler(fn.step)()
        elif one.kind == "train":
            compiler(fn)(*inputs).backward()
        else:
            with torch.no_grad():
                compiler(fn)(*inputs)

    return program


def _attention(name: str) -> Program:
    def program(compiler: Compiler) -> None:
        (one,) = [p for p in attention.PROGRAMS if p.name == name]
        with torch.no_grad(), FakeTensorMode():
            compiler(one.fn)(*one.inputs())

    return program


def _dynamic(name: str) -> Program:
    def program(compiler: Compiler) -> None:
        one = dynamic.PROGRAMS[name]
        fn, calls = one.make()
        compiled = compiler(fn, dynamic=one.dynamic)
        for arguments in calls[:3]:
            compiled(*arguments)

    return program


def _control(name: str, differentiable: bool) -> Program:
    def program(compiler: Compiler) -> None:
        table = control_programs.DIFFERENTIABLE if differentiable else control_programs.LOOPS
        x, y = (torch.full((6, 6), 0.5, requires_grad=differentiable) for _ in range(2))
        found = compiler(table[name])(x, y)
        if differentiable:
            torch.stack([t.sum() for t in torch.utils._pytree.tree_leaves(found)]).sum().backward()

    return program


def _logits(fn: Callable[..., Tensor], *sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Program:
    """The loss of a product that is as wide as a vocabulary, and its gradients."""

    def program(compiler: Compiler) -> None:
        with FakeTensorMode():
            inputs = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
            target = torch.zeros(sizes[0][0], dtype=torch.int64)
            compiler(fn)(*inputs, target).backward()

    return program


def _loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x @ w.t()).float(), target)


def _capped(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(30 * torch.tanh((x @ w.t()).float() / 30), target, label_smoothing=0.1)


def _product(fn: Callable[..., Tensor], *inputs: tuple[tuple[int, ...], torch.dtype]) -> Program:
    """A product of matrices that is a kernel of its own on a GPU."""

    def program(compiler: Compiler) -> None:
        with torch.no_grad(), FakeTensorMode():
            compiler(fn)(*[torch.empty(size, dtype=dtype) for size, dtype in inputs])

    return program


def _rows_of(x: Tensor, w: Tensor) -> Tensor:
    return (x.float()[:, None] * w.float()).sum(-1).to(x.dtype)


def _whole_weight(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, q.to(scale.dtype) * scale[:, None]))


def _complex(fn: Callable[..., Any]) -> Program:
    def program(compiler: Compiler) -> None:
        with FakeTensorMode():
            x, y = (torch.randn(64, 96, dtype=torch.complex64, requires_grad=True) for _ in range(2))
            found = compiler(fn)(x, y)
            (torch.view_as_real(found) if found.is_complex() else found).sum().backward()

    return program


def _all() -> Iterator[tuple[str, Program]]:
    yield from ((f"gallery/{n}", _gallery(n)) for n in GALLERY)
    yield from ((f"bound/{n}", _bound(n)) for n in BOUND)
    yield from ((f"training/{n}", _trained(n)) for n in TRAINED)
    yield from ((f"model/{n}", _model(n)) for n in MODELS)
    yield from ((f"attention/{n}", _attention(n)) for n in ATTENTION)
    yield "logits/loss", _logits(_loss, (4096, 768), (50257, 768))
    yield "logits/capped", _logits(_capped, (512, 256), (32000, 256))
    half = torch.bfloat16
    yield "product/rows that take turns", _product(_rows_of, ((1024, 40), half), ((1025, 40), half))
    yield (
        "product/weights of bytes",
        _product(_whole_weight, ((12, 96), half), ((200, 96), torch.int8), ((200,), half)),
    )
    yield from ((f"dynamic/{n}", _dynamic(n)) for n in DYNAMIC)
    yield "complex/product", _complex(lambda x, y: x * y + x.conj())
    yield "complex/spectrum", _complex(lambda x, y: torch.fft.fft(x * torch.polar(y.abs(), y.angle())).abs())
    yield from ((f"control/{n}", _control(n, d)) for n, d in CONTROL.items())


PROGRAMS: dict[str, Program] = dict(_all())
