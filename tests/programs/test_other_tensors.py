"""Float8, sparse, quantized, nested, named and mkldnn tensors in compiled programs: right or left to eager (issue "Breadth", 5; MISSION C9, C18)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.mkldnn
from torch import Tensor, nn

import opforge
from opforge.errors import ExportError, InputError, OpforgeWarning, UnsupportedError
from opforge.runtime.torch_compat import minor_version
from tests.support.other_tensors import FLOAT8, Program, differences, observe

INF, NAN = float("inf"), float("nan")
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
SCALED = torch.tensor(0.5)


def numbers(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def edged(dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of all sizes, among them those that overflow, vanish and are ties in eight bits."""
    ties = [
        1.0625,
        1.1875,
        1.125,
        1.375,
        0.0009765625,
        0.0029296875,
        448.0,
        464.0,
        465.0,
        57344.0,
        61440.0,
        240.0,
        248.0,
    ]
    odd = [0.0, -0.0, INF, -INF, NAN, 1e-8, -1e-8, 1e30, -1e30, 2.0**-127, 2.0**-128, 2.0**127]
    spread = [s * 1.3**k for k in range(-40, 40) for s in (1, -1)]
    return torch.tensor([*ties, *odd, *spread], dtype=torch.float64).to(dtype)


def eight(*shape: int, dtype: torch.dtype = E4, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed).to(dtype)


# --- float8


class Dequantized(nn.Module):
    """A linear layer whose weight is held in eight bits, with a factor for each row."""

    def __init__(self) -> None:
        super().__init__()
        weight = numbers(6, 8)
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 448)
        self.register_buffer("weight", (weight / self.scale).to(E4))
        self.bias = nn.Parameter(numbers(6, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias).relu()


class Eights(nn.Module):
    """Parameters that are themselves of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(eight(6, 8), requires_grad=False)
        self.trained = nn.Parameter(eight(6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype).t() + self.trained.to(x.dtype)


class Cached(nn.Module):
    """A buffer in eight bits that each call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(5, 4).to(E4))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        self.cache[1:3].copy_(x * 2)
        self.cache[k] = (x + 1).to(E4)
        return self.cache.float().sum(0) + 1


def written(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y * 2)
    x[1:, ::2].copy_(y[1:, ::2] + 1)
    return x.to(torch.float32) * 2


def amax_scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).clamp(-448, 448).to(E4), scale


def scaled_mm(x: Tensor, w: Tensor) -> Tensor:
    one = torch.tensor(1.0)
    return torch._scaled_mm(x.to(E4), w.to(E4).t(), one, one * 0.5, out_dtype=torch.bfloat16).float() + 1


CONSTANT = eight(3, 4, seed=5)

FLOAT8_PROGRAMS: dict[str, Program] = {
    "arithmetic, cast, arithmetic": Program(
        lambda x: ((x * 2).to(E4).float() + 1).relu(), lambda: [numbers(5, 7)], kernels=1
    ),
    "an input": Program(lambda x: F.gelu(x.float() * 3), lambda: [eight(5, 7)], kernels=1),
    "an input, symbolic sizes": Program(
        lambda x: (x.float() * 3, x.t(), (x.float() + 1).to(E5)),
        lambda: [eight(5, 7)],
        kernels=1,
        options=(("dynamic", True),),
    ),
    "copies": Program(
        lambda x: (x.clone(), x.contiguous(), x.t().contiguous(), x.detach(), x.to(E5), x.to(E4, copy=True)),
        lambda: [eight(4, 6)],
    ),
    "copies beside arithmetic": Program(
        lambda x, y, z: (x.clone(), x.t().clone(), x[:, ::2].clone(), y.copy_(x), z.exp() * 2),
        lambda: [eight(4, 6), eight(4, 6, seed=1), numbers(9)],
        kernels=1,
    ),
    "copies, symbolic sizes": Program(
        lambda x, y, z: (x.clone(), x.t().clone(), y.copy_(x), z.exp() * 2, z.shape[0]),
        lambda: [eight(4, 6), eight(4, 6, seed=1), numbers(9)],
        kernels=1,
        options=(("dynamic", True),),
    ),
    "views": Program(
        lambda x: (
            x.t(),
            x[1:, ::2],
            x.view(torch.uint8),
            x.reshape(6, 4),
            x.unsqueeze(1).expand(4, 3, 6),
            x.unbind(0)[2],
            x.diagonal(),
        ),
        lambda: [eight(4, 6)],
    ),
    "chains of casts": Program(
        lambda x: (
            x.to(torch.bfloat16).to(E4).float(),
            x.to(torch.float64).to(torch.float16).to(E5),
            x.to(E5).to(E4).float(),
            x.to(E4).half().to(E5).float() * 2,
            x.nan_to_num(0, 99, -99).clamp(-99, 99).to(torch.int32).to(E4).float() + 1,
        ),
        lambda: [edged()],
        kernels=1,
    ),
    "views of results": Program(
        lambda x: [
            (y := (x * 2).to(E4)),
            y.t(),
            y[1:],
            y.view(torch.int8),
            y.split(2),
            y.view(-1)[3:9].view(2, 3).float() * 2,
        ],
        lambda: [numbers(4, 6)],
    ),
    "bits": Program(
        lambda x: ((x.view(torch.uint8) & 127).view(E4), (x.view(torch.uint8) ^ 128).view(E4).float()),
        lambda: [eight(4, 6)],
    ),
    "joined": Program(
        lambda x, y: (torch.cat([x, y]), torch.stack([x, y], 1), torch.cat([x.float(), y.float()]) * 2),
        lambda: [eight(4, 6), eight(4, 6, seed=1)],
    ),
    "joined from results": Program(
        lambda x: torch.cat([(x + 1).to(E4), (x - 1).to(E4).t().contiguous().t()], 1), lambda: [numbers(4, 6)]
    ),
    "moved": Program(
        lambda x, k: (x[k], x.index_select(1, k), x.flip(0), x.roll(1, 0), x.repeat(2, 1)),
        lambda: [eight(4, 6), torch.tensor([2, 0, 3])],
    ),
    "chosen": Program(lambda x: torch.where(x.float() > 0, x, x.flip(0)), lambda: [eight(4, 6)]),
    "gathered": Program(lambda x, k: x.gather(0, k[:2, None]), lambda: [eight(4, 6), torch.tensor([2, 0, 3])]),
    "put": Program(
        lambda x, k, y: (x.index_put_((k,), y), None)[1],
        lambda: [eight(4, 6), torch.tensor([2, 0, 3]), eight(3, 6, seed=1)],
    ),
    "made": Program(
        lambda x: (
            torch.zeros_like(x),
            x.new_zeros(3),
            torch.full((2, 3), 1.5, dtype=E4),
            torch.ones(3, dtype=E5),
            torch.zeros(2, 2, dtype=E4),
        ),
        lambda: [eight(4, 6)],
    ),
    "a constant": Program(lambda x: (x * CONSTANT.float() + 1, CONSTANT.t()), lambda: [numbers(3, 4)], kernels=1),
    "written": Program(written, lambda: [eight(4, 6), numbers(4, 6)]),
    "written, of a caller": Program(
        lambda x, y: (x.zero_(), x.t().copy_(y.t()), None)[2], lambda: [eight(4, 6), numbers(4, 6)]
    ),
    "a buffer": Program(
        lambda m, x, k: (m(x, k), m(x + 1, k)), lambda: [Cached(), numbers(2, 4), torch.tensor([4, 0])], kernels=1
    ),
    "filled": Program(lambda x: (x.fill_(1.5), x[1].fill_(2), None)[2], lambda: [eight(4, 6)]),
    "filled by a mask": Program(lambda x: x.masked_fill(x.float() > 1.6, 0.5), lambda: [eight(4, 6)]),
    "copied by position": Program(
        lambda x, k, y: x.index_copy(0, k, y), lambda: [eight(4, 6), torch.tensor([2, 0, 3]), eight(3, 6, seed=1)]
    ),
    "dequantized weights": Program(
        lambda m, x: m(x), lambda: [Dequantized(), numbers(3, 8, grad=True)], grad=True, kernels=1
    ),
    "parameters": Program(lambda m, x: m(x), lambda: [Eights(), numbers(3, 8, grad=True)], grad=True),
    "a gradient through a cast": Program(
        lambda x: (x * 2).to(E4).float() * 3, lambda: [numbers(5, 7, grad=True)], grad=True, kernels=1
    ),
    "a gradient of eight bits": Program(
        lambda x: (x.float() * 3).sum(), lambda: [eight(5, 7).requires_grad_()], grad=True
    ),
    "a result of eight bits with a gradient": Program(
        lambda x: ((x * 2).to(E5), x.exp()), lambda: [numbers(5, 7, grad=True)], grad=True
    ),
    "scaled by rows": Program(amax_scaled, lambda: [numbers(5, 16)], kernels=1),
    "scaled product": Program(scaled_mm, lambda: [numbers(16, 32), numbers(48, 32, seed=1)]),
    "scaled product, dynamic": Program(
        scaled_mm, lambda: [numbers(16, 32), numbers(48, 32, seed=1)], options=(("dynamic", True),)
    ),
    "a scale of eight bits": Program(
        lambda x: (x.abs().to(torch.float8_e8m0fnu).float() * x, x.abs().to(torch.float8_e8m0fnu)), lambda: [edged()]
    ),
    "a product": Program(lambda x: x @ x.t(), lambda: [eight(4, 6)]),
    "a sum": Program(lambda x: x + x, lambda: [eight(4, 6)]),
    "a sum with a number": Program(lambda x: x + 1, lambda: [eight(4, 6)]),
    "a sum with another type": Program(lambda x, y: x + y, lambda: [eight(4, 6), numbers(4, 6)]),
    "a sum of all": Program(lambda x: x.sum(), lambda: [eight(4, 6)]),
    "softmax": Program(lambda x: (x.float() * 2).to(E4).softmax(-1), lambda: [eight(4, 6)]),
    "an error after a write": Program(lambda x, y: (x.add_(1), y.exp())[1], lambda: [numbers(3), eight(3)]),
    "comparisons": Program(lambda x, y: (x == y, x != x.flip(0)), lambda: [eight(4, 6), eight(4, 6, seed=1)]),
    "an order": Program(lambda x, y: x < y, lambda: [eight(4, 6), eight(4, 6, seed=1)]),
    "isnan": Program(lambda x: (x.isnan(), x.float().isnan()), lambda: [edged().to(E5)]),
    "an absolute value": Program(lambda x: x.abs(), lambda: [eight(4, 6)]),
    "clamp": Program(lambda x: x.clamp(-1, 1), lambda: [eight(4, 6)]),
    "dropout": Program(lambda x: F.dropout(x, 0.5, training=False), lambda: [eight(4, 6)]),
    "padding": Program(lambda x: F.pad(x, (1, 2)), lambda: [eight(4, 6)]),
    "an item": Program(lambda x: x[0, 0].item() + 1, lambda: [eight(4, 6)]),
}

for _dtype in FLOAT8:
    FLOAT8_PROGRAMS[f"to {_dtype} and back".replace("torch.", "")] = Program(
        lambda *given, d=_dtype: [(y := x.to(d), y.to(x.dtype), y.float(), y.to(torch.bfloat16)) for x in given],
        lambda: [edged(d) for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)],
    )


# --- other dtypes that loops do not know

RARE_PROGRAMS: dict[str, Program] = {
    "uint16": Program(
        lambda x: (x.to(torch.int32) + 1, x.clone(), x[1:], x.view(torch.int16)),
        lambda: [torch.arange(24).to(torch.uint16).view(4, 6)],
        kernels=1,
    ),
    "uint16 arithmetic": Program(lambda x: (x + x, x * 2), lambda: [torch.arange(24).to(torch.uint16)]),
    "uint32": Program(
        lambda x: (x.to(torch.int64) + 1, x.to(torch.float32) * 2, torch.cat([x, x])),
        lambda: [torch.tensor([0, 1, 2**31, 2**32 - 1]).to(torch.uint32)],
    ),
    "uint64": Program(
        lambda x, y: ((y * 2).to(torch.uint64), x.to(torch.float64) * 2),
        lambda: [torch.arange(5).to(torch.uint64), torch.arange(5)],
    ),
    "complex halves": Program(
        lambda x: (x * 2, x.real + 1, torch.view_as_real(x) * 2), lambda: [torch.randn(4, 6, dtype=torch.complex32)]
    ),
    "pairs of four bits": Program(
        lambda x: (x.view(torch.uint8) + 1, x.clone()),
        lambda: [torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)],
    ),
}

# --- sparse


def coo(*shape: int, grad: bool = False, twice: bool = False) -> Tensor:
    x = numbers(*shape)
    x = (x * (x > 0.3)).to_sparse()
    if twice:
        x = torch.sparse_coo_tensor(x.indices().repeat(1, 2), x.values().repeat(2), x.shape)
    return x.requires_grad_(grad)


def holed(*shape: int, grad: bool = False) -> Tensor:
    x = numbers(*shape)
    return (x * (x > 0.3)).requires_grad_(grad)


class Looked(nn.Module):
    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        self.table = (
            nn.EmbeddingBag(9, 4, sparse=True, mode="sum") if bag else nn.Embedding(9, 4, sparse=True, padding_idx=2)
        )
        self.table.weight.data.copy_(numbers(9, 4))
        self.out = nn.Linear(4, 32)  # many, so that their mean error says something
        with torch.no_grad():
            self.out.weight.copy_(numbers(32, 4, seed=2))
            self.out.bias.copy_(numbers(32, seed=3))

    def forward(self, k: Tensor) -> Tensor:
        return self.out(self.table(k) * 2).tanh()


class SparseWeight(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        w = holed(6, 8)
        self.weight = nn.Parameter(w.to_sparse() if layout == "coo" else w.to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return (torch.sparse.mm(self.weight, x * 2) + 1).relu()


def embedding_step(m: nn.Module, k: Tensor) -> list[Tensor]:
    """What comes out at two steps of training with a sparse gradient."""
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    results = []
    for _ in range(2):
        result = forward(m, k)
        result.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(result.detach())
    return results


def forward(m: nn.Module, k: Tensor) -> Tensor:
    return m(k)


@torch.compiler.disable
def looked_up(k: Tensor, table: Tensor) -> Tensor:
    return F.embedding(k, table, sparse=True)


@torch.compiler.disable
def to_coo(x: Tensor) -> Tensor:
    return x.to_sparse()


def sparse_adam(w: Tensor, k: Tensor) -> Tensor:
    """Two steps of an optimizer that wants sparse gradients."""
    optimizer = torch.optim.SparseAdam([w], lr=0.5)
    for _ in range(2):
        looked_up(k, w).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return w.detach() * 2


SPARSE_PROGRAMS: dict[str, Program] = {
    "COO to dense": Program(lambda s, x: s.to_dense() * 2 + x, lambda: [coo(4, 6), numbers(4, 6)]),
    "COO not coalesced": Program(lambda s: (s.to_dense() + 1, s.coalesce(), s * 2), lambda: [coo(4, 6, twice=True)]),
    "COO made and returned": Program(lambda x: ((x * 2).to_sparse(), x + 1), lambda: [holed(4, 6)]),
    "COO made, arithmetic on both sides": Program(
        lambda x, y: (torch.sparse.mm((x * 2).to_sparse(), y + 1) * 3).relu(),
        lambda: [holed(4, 6), numbers(6, 5)],
        kernels=1,
    ),
    "COO of indices and values": Program(
        lambda i, v: torch.sparse_coo_tensor(i, v * 2, (4, 6)).to_dense() + 1,
        lambda: [torch.tensor([[0, 1, 1], [2, 0, 0]]), numbers(3)],
    ),
    "COO product with gradients": Program(
        lambda s, x: torch.sparse.mm(s, x * 2).relu() + 1,
        lambda: [coo(4, 6, grad=True), numbers(6, 5, grad=True)],
        grad=True,
    ),
    "COO made, gradients": Program(
        lambda x, y: torch.sparse.mm((x * 2).to_sparse(), y).tanh(),
        lambda: [holed(4, 6, grad=True), numbers(6, 5, grad=True)],
        grad=True,
    ),
    "COO parts": Program(
        lambda s, x: (s.indices() + 1, s.values() * 2 + x, s.shape[0], s.is_sparse),
        lambda: [coo(4, 6).coalesce(), numbers(1)],
    ),
    "COO sums": Program(
        lambda s: (torch.sparse.sum(s), torch.sparse.sum(s, 0), torch.sparse.softmax(s, 1)), lambda: [coo(4, 6)]
    ),
    "COO arithmetic": Program(
        lambda s, t: (s + t, s * t, s - 2 * t, s.t(), -s, s.abs()), lambda: [coo(4, 6), coo(4, 6, twice=True)]
    ),
    "COO written": Program(lambda s, x: (s.mul_(2), s.add_(s), x.add_(s), None)[3], lambda: [coo(4, 6), numbers(4, 6)]),
    "COO in a result beside dense": Program(
        lambda s, x: {"sparse": s, "dense": x * 2 + 1}, lambda: [coo(4, 6), numbers(4, 6)]
    ),
    "COO a mask": Program(lambda s, x: x.sparse_mask(s) * 2, lambda: [coo(4, 6).coalesce(), numbers(4, 6)]),
    "COO an error": Program(lambda s: s @ s.t().unsqueeze(0), lambda: [coo(4, 6)]),
    "CSR": Program(lambda s, x: (s @ (x * 2)).relu() + 1, lambda: [holed(4, 6).to_sparse_csr(), numbers(6, 5)]),
    "CSR with gradients": Program(
        lambda s, x: (s @ (x * 2)).relu() + 1,
        lambda: [holed(4, 6).to_sparse_csr().requires_grad_(), numbers(6, 5, grad=True)],
        grad=True,
    ),
    "CSR made": Program(lambda x: ((x * 2).to_sparse_csr(), x + 1), lambda: [holed(4, 6)]),
    "CSR of parts": Program(
        lambda a, b, v: torch.sparse_csr_tensor(a, b, v * 2, (2, 3)).to_dense() + 1,
        lambda: [torch.tensor([0, 1, 2]), torch.tensor([2, 0]), numbers(2)],
    ),
    "CSC and BSR": Program(
        lambda x: ((x * 2).to_sparse_csc(), (x + 1).to_sparse_bsr((2, 3)), x.to_sparse_bsr((2, 2)).to_dense() * 2),
        lambda: [holed(4, 6)],
    ),
    "BSR product": Program(
        lambda s, x: (s @ (x * 2)).relu(), lambda: [holed(4, 6).to_sparse_bsr((2, 3)), numbers(6, 4)]
    ),
    "sampled product": Program(
        lambda s, x, y: torch.sparse.sampled_addmm(s, x * 2, y).values() + 1,
        lambda: [holed(4, 6).to_sparse_csr(), numbers(4, 5), numbers(5, 6)],
    ),
    "a parameter, COO": Program(
        lambda m, x: m(x) * 2, lambda: [SparseWeight("coo"), numbers(8, 3, grad=True)], grad=True
    ),
    "a parameter, CSR": Program(
        lambda m, x: m(x) * 2, lambda: [SparseWeight("csr"), numbers(8, 3, grad=True)], grad=True
    ),
    "an embedding": Program(forward, lambda: [Looked(), torch.tensor([[1, 2, 1], [8, 0, 1]])], grad=True, kernels=2),
    "an embedding, dynamic": Program(
        forward,
        lambda: [Looked(), torch.tensor([[1, 2, 1], [8, 0, 1]])],
        grad=True,
        options=(("dynamic", True),),
        kernels=2,
    ),
    "an embedding bag": Program(
        forward,
        lambda: [Looked(bag=True), torch.tensor([[1, 2, 1], [8, 0, 1]])],
        grad=True,
    ),
    "a dense gradient from a sparse one": Program(
        lambda w, k: F.embedding(k, w * 2, sparse=True) + 1,
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
        left="takes a sparse gradient",
    ),
    "an embedding twice": Program(
        lambda w, k: F.embedding(k, w, sparse=True) * F.embedding(k + 1, w, sparse=True),
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
    ),
    "an embedding, sparse and dense": Program(
        lambda w, k: F.embedding(k, w, sparse=True) * w.sum(0),
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
    ),
    "a sparse gradient arrives": Program(
        lambda w, k: looked_up(k, w * 2) + 1,
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
        kernels=2,
        left="a gradient arrives that is no strided tensor",
    ),
    "a sparse gradient arrives at one of two": Program(
        lambda w, k: ((y := w * 2), (z := w.sin()), looked_up(k, y) + z[:3])[1:],
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
        left="a gradient arrives that is no strided tensor",
    ),
    "a sparse gradient arrives alone": Program(
        lambda w, k: ((y := w * 2), (z := w.sin()), looked_up(k, y) + z.detach()[:3])[2],
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
        left="a gradient arrives that is no strided tensor",
    ),
    "a sparse gradient arrives, symbolic sizes": Program(
        lambda w, k: ((y := w * 2), (z := w.sin()), looked_up(k, y) + z.detach()[:3])[2],
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
        left="a gradient arrives that is no strided tensor",
        options=(("dynamic", True),),
    ),
    "a sparse gradient that its formula refuses": Program(
        lambda w, k: looked_up(k, w.exp().softmax(0)) + 1,
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
        left="a gradient arrives that is no strided tensor",
    ),
    "a sparse gradient times a dense tensor": Program(
        lambda w, v, k: looked_up(k, w * v),
        lambda: [numbers(9, 4, grad=True), numbers(9, 4, seed=1, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
        left="a gradient arrives that is no strided tensor",
    ),
    "a sparse gradient arrives at an input": Program(
        lambda w, k: looked_up(k, w) * w.sum(0), lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])], grad=True
    ),
    "a sparse gradient arrives at a view": Program(
        lambda w, k: looked_up(k, w.view(18, 2)) * 2,
        lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])],
        grad=True,
    ),
    "a sparse gradient of a sparse result": Program(
        lambda x: to_coo(x * 2), lambda: [holed(4, 6, grad=True)], grad=True
    ),
    "an optimizer for sparse gradients": Program(
        sparse_adam, lambda: [numbers(9, 4, grad=True), torch.tensor([1, 2, 1])], grad=True
    ),
    "a gather with a sparse gradient": Program(
        lambda x, k: torch.gather(x, 1, k, sparse_grad=True) * 2,
        lambda: [numbers(3, 4, grad=True), torch.tensor([[0, 1], [2, 0], [1, 1]])],
        grad=True,
    ),
    "training of an embedding": Program(
        embedding_step, lambda: [Looked(), torch.tensor([[1, 2, 1], [8, 0, 1]])], grad=True, kernels=2
    ),
}


# --- quantized


def by_tensor(*shape: int, dtype: torch.dtype = torch.quint8) -> Tensor:
    return torch.quantize_per_tensor(numbers(*shape), 0.05, 12 if dtype == torch.quint8 else 0, dtype)


def by_channel(*shape: int) -> Tensor:
    return torch.quantize_per_channel(
        numbers(*shape), torch.linspace(0.02, 0.08, shape[0]), torch.arange(shape[0]), 0, torch.quint8
    )


class Quantized(nn.Module):
    """A quantized linear layer between dense arithmetic."""

    def __init__(self, dynamic: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 6))
        self.dynamic = dynamic
        if dynamic:
            self.layer = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)
        else:
            self.layer = torch.ao.nn.quantized.Linear(8, 6)
            weight = torch.quantize_per_tensor(layer[0].weight.detach(), 0.01, 0, torch.qint8)
            self.layer.set_weight_bias(weight, layer[0].bias.detach())
            self.layer.scale, self.layer.zero_point = 0.05, 30

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 + 1
        if self.dynamic:
            return self.layer(x).relu()
        return self.layer(torch.quantize_per_tensor(x, 0.05, 30, torch.quint8)).dequantize().relu()


class Learned(nn.Module):
    """A step of quantization-aware training: weight and activation go through eight bits. The weight is then on a grid of 1/64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(6, 8))
        self.observer = torch.ao.quantization.FakeQuantize(
            observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_channel_affine(
            self.weight, torch.full((6,), 1 / 64), torch.zeros(6, dtype=torch.int32), 0, -128, 127
        )
        return self.observer(F.linear(x, weight)).relu()


FORETOLD = (
    "it makes a quantized tensor, where its fake kernel makes a plain one"
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::quantize_per_tensor", "Meta")
    else ""
)
"""Without a fake kernel (torch 2.11) Dynamo leaves the call to Python."""

QUANTIZED_PROGRAMS: dict[str, Program] = {
    "there and back": Program(
        lambda x: torch.quantize_per_tensor(x * 2, 0.05, 12, torch.quint8).dequantize() + 1,
        lambda: [numbers(4, 6)],
        left=FORETOLD,
    ),
    "there and back by channel": Program(
        lambda x, s, z: torch.quantize_per_channel(x * 2, s, z, 0, torch.qint8).dequantize() + 1,
        lambda: [numbers(3, 6), torch.tensor([0.02, 0.05, 0.1]), torch.tensor([0, 3, -5])],
    ),
    "returned": Program(
        lambda x: (torch.quantize_per_tensor(x * 2, 0.05, 12, torch.quint8), x + 1),
        lambda: [numbers(4, 6)],
        left=FORETOLD,
    ),
    "an input": Program(lambda q, x: q.dequantize() * 2 + x, lambda: [by_tensor(4, 6), numbers(4, 6)]),
    "an input by channel": Program(
        lambda q, x: (q.dequantize() * 2 + x, q.int_repr() + 1), lambda: [by_channel(4, 6), numbers(4, 6)]
    ),
    "an input returned": Program(lambda q, x: (q, q.t(), q.clone(), x * 2), lambda: [by_tensor(4, 6), numbers(4, 6)]),
    "what is held": Program(
        lambda q: (q.int_repr() * 2, q.q_scale(), q.q_zero_point(), q.shape),
        lambda: [by_tensor(4, 6, dtype=torch.qint8)],
    ),
    "written": Program(lambda q, x: (q.copy_(x * 2), None)[1], lambda: [by_tensor(4, 6), numbers(4, 6)]),
    "relu and pools": Program(lambda q: (q.relu(), F.max_pool2d(q, 2), q[:, :, 1:]), lambda: [by_tensor(1, 2, 4, 6)]),
    "fake by tensor": Program(
        lambda x: torch.fake_quantize_per_tensor_affine(x * 2, 0.05, 3, 0, 255) + 1,
        lambda: [numbers(4, 6, grad=True)],
        grad=True,
        kernels=1,
    ),
    "fake by tensor, edges": Program(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, 0, 255), lambda: [edged()]
    ),
    "fake with tensors": Program(
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x * 2, s, z, -128, 127) * 2,
        lambda: [numbers(4, 6, grad=True), torch.tensor(0.03), torch.tensor(0, dtype=torch.int32)],
        grad=True,
        kernels=1,
    ),
    "fake by channel": Program(
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x * 2, s, z, 1, -128, 127) * 2,
        lambda: [numbers(4, 3, grad=True), torch.tensor([0.02, 0.03, 0.05]), torch.zeros(3, dtype=torch.int32)],
        grad=True,
        kernels=1,
    ),
    "fake, learnt": Program(
        lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x * 2, s, z, -128, 127, 0.5) * 2,
        lambda: [
            numbers(4, 6, grad=True),
            torch.tensor([0.03], requires_grad=True),
            torch.tensor([0.0], requires_grad=True),
        ],
        grad=True,
    ),
    "quantization-aware training": Program(
        lambda m, x: m(x) * 2,
        # On a grid too, so that each of the library's kernels has the same products, and the observer the same steps.
        lambda: [Learned(), torch.round(numbers(5, 8) * 32).div(32).requires_grad_()],
        grad=True,
    ),
    "a linear layer": Program(
        lambda m, x: m(x) * 2,
        lambda: [Quantized(False), numbers(5, 8)],
        left=FORETOLD,
    ),
    "a linear layer, dynamically": Program(lambda m, x: m(x) * 2, lambda: [Quantized(True), numbers(5, 8)]),
    "an error": Program(lambda q: q + 1, lambda: [by_tensor(4, 6)]),
    "sums of quantized": Program(
        lambda q: torch.ops.quantized.add(q, q, 0.1, 5).dequantize() * 2, lambda: [by_tensor(4, 6)]
    ),
    "bytes": Program(
        lambda x, s: ((x / s).round().clamp(-128, 127).to(torch.int8).to(torch.float32) * s, x.abs().amax()),
        lambda: [numbers(4, 6), torch.tensor(0.05)],
        kernels=1,
    ),
}


# --- nested


def jagged(grad: bool = False) -> Tensor:
    rows = [numbers(n, 4, seed=n) for n in (2, 5, 3)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).requires_grad_(grad)


def heads() -> Tensor:
    rows = [numbers(n, 8, seed=n) for n in (2, 5, 3)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).unflatten(-1, (2, 4)).transpose(1, 2)


def strided(grad: bool = False) -> Tensor:
    return torch.nested.nested_tensor([numbers(n, 4, seed=n) for n in (2, 5, 3)]).requires_grad_(grad)


def of_values(v: Tensor, o: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(v * 2, o)


def attention(x: Tensor) -> Tensor:
    heads = (x * 2).unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)


NESTED_PROGRAMS: dict[str, Program] = {
    "jagged arithmetic": Program(lambda x: (x * 2 + 1).sin(), lambda: [jagged()], left="has the layout torch.jagged"),
    "jagged arithmetic, dynamic": Program(
        lambda x: (x * 2 + 1).sin(),
        lambda: [jagged()],
        options=(("dynamic", True),),
        left="has the layout torch.jagged",
    ),
    "jagged with gradients": Program(
        lambda x: (x * 2 + 1).sin(), lambda: [jagged(grad=True)], grad=True, left="has the layout torch.jagged"
    ),
    "jagged linear": Program(
        lambda m, x: m(x).relu() * 2,
        lambda: [nn.Linear(4, 3), jagged(grad=True)],
        grad=True,
        left="has the layout torch.jagged",
    ),
    "jagged softmax": Program(lambda x: (x * 2).softmax(-1), lambda: [jagged()], left="has the layout torch.jagged"),
    "jagged softmax of a ragged dimension": Program(
        lambda x: (x * 2).softmax(1), lambda: [jagged()], left="has the layout torch.jagged"
    ),
    "jagged norm": Program(
        lambda m, x: m(x) + 1,
        lambda: [nn.LayerNorm(4), jagged(grad=True)],
        grad=True,
        left="has the layout torch.jagged",
    ),
    "jagged sums": Program(
        lambda x: (x.sum(), x.sum(1), x.sum(-1), x.mean(-1)), lambda: [jagged()], left="has the layout torch.jagged"
    ),
    "jagged padded": Program(
        lambda x: torch.nested.to_padded_tensor(x * 2, -1.0) + 1, lambda: [jagged()], left="has the layout torch.jagged"
    ),
    "jagged of values": Program(of_values, lambda: [numbers(10, 4), torch.tensor([0, 2, 7, 10])], left="while tracing"),
    "jagged of values, with gradients": Program(
        of_values, lambda: [numbers(10, 4, grad=True), torch.tensor([0, 2, 7, 10])], grad=True, left="while tracing"
    ),
    "jagged values": Program(
        lambda x: (x.values() * 2, x.offsets() + 1, x), lambda: [jagged()], left="has the layout torch.jagged"
    ),
    "jagged attention": Program(attention, lambda: [jagged(grad=True)], grad=True, left="has the layout torch.jagged"),
    "jagged attention of views": Program(
        lambda x: F.scaled_dot_product_attention(x * 2, x, x),
        lambda: [heads()],
        left="has the layout torch.jagged",
        dynamo="it makes a guard on a symbol that it has no source for",
    ),
    "jagged written": Program(lambda x: (x.mul_(2), None)[1], lambda: [jagged()], left="has the layout torch.jagged"),
    "jagged, two": Program(
        lambda x, y: x * y + x, lambda: [x := jagged(), x.detach() * 3], left="has the layout torch.jagged"
    ),
    "jagged, two of other lengths": Program(
        lambda x, y: x * y,
        lambda: [
            jagged(),
            torch.nested.nested_tensor([numbers(2, 4), numbers(3, 4), numbers(5, 4)], layout=torch.jagged),
        ],
    ),
    "jagged and dense": Program(
        lambda x, y: x * y.unsqueeze(1) + y.sum(), lambda: [jagged(), numbers(3, 4)], left="has the layout torch.jagged"
    ),
    "jagged, cast": Program(
        lambda x: (x.to(torch.bfloat16), (x + 1).double()), lambda: [jagged()], left="has the layout torch.jagged"
    ),
    "strided arithmetic": Program(lambda x, y: (x * 2, y * 2 + 1), lambda: [strided(), numbers(3)]),
    "strided made": Program(
        lambda x, y: torch.nested.nested_tensor([x * 2, y + 1]), lambda: [numbers(2, 4), numbers(3, 4)]
    ),
    "strided from tensors, with gradients": Program(
        lambda x, y: torch.nested.as_nested_tensor([x * 2, y + 1]),
        lambda: [numbers(2, 4, grad=True), numbers(3, 4, grad=True)],
        grad=True,
    ),
    "strided padded": Program(lambda x: torch.nested.to_padded_tensor(x, 0.5) * 2 + 1, lambda: [strided()]),
    "strided padded, with gradients": Program(
        lambda x: torch.nested.to_padded_tensor(x, 0.5) * 2 + 1, lambda: [strided(grad=True)], grad=True
    ),
    "strided softmax and linear": Program(
        lambda m, x: m(x).softmax(-1), lambda: [nn.Linear(4, 3), strided(grad=True)], grad=True
    ),
    "strided unbound": Program(lambda x: [t * 2 + 1 for t in x.unbind()], lambda: [strided()]),
    "strided written": Program(lambda x: (x.mul_(2), None)[1], lambda: [strided()]),
}


# --- named


def named(*shape: int, names: tuple[str, ...] = ("N", "C"), grad: bool = False) -> Tensor:
    return numbers(*shape).refine_names(*names).requires_grad_(grad)


NAMED_PROGRAMS: dict[str, Program] = (
    {}
    if not hasattr(Tensor, "refine_names")
    else {
        "an input": Program(lambda x: x * 2 + 1, lambda: [named(4, 6)], left="has named dimensions"),
        "an input beside one without": Program(
            lambda x, y: (x + y, y * 2), lambda: [named(4, 6), numbers(4, 6)], left="has named dimensions"
        ),
        "an input with gradients": Program(
            lambda x: (x * 2 + 1).sin(), lambda: [named(4, 6, grad=True)], grad=True, left="has named dimensions"
        ),
        "given inside": Program(
            lambda x: (x * 2).refine_names("N", "C") + 1, lambda: [numbers(4, 6)], left="has named dimensions"
        ),
        "given inside and dropped": Program(
            lambda x: (x * 2).refine_names("N", "C").sum("C").rename(None) + 1,
            lambda: [numbers(4, 6)],
            dynamo="its fake tensors have no names",
        ),
        "summed by name": Program(
            lambda x: (x * 2).sum("C") + 1, lambda: [named(4, 6)], dynamo="its fake tensors have no names"
        ),
        "moved": Program(
            lambda x: (x.t(), x.transpose("N", "C"), x.align_to("C", "N") * 2),
            lambda: [named(4, 6)],
            dynamo="its fake tensors have no names",
        ),
        "aligned": Program(
            lambda x, y: x + y.align_as(x),
            lambda: [named(4, 6), named(6, names=("C",))],
            dynamo="its fake tensors have no names",
        ),
        "looked at": Program(
            lambda x: (x.names, x.has_names(), x.size("C"), x.rename("A", "B")), lambda: [named(4, 6)]
        ),
        "dropped": Program(lambda x: x.rename(None) * 2 + 1, lambda: [named(4, 6)], left="has named dimensions"),
        "written": Program(lambda x: (x.mul_(2), None)[1], lambda: [named(4, 6)], left="has named dimensions"),
        "given in place": Program(lambda x: (x.mul_(2), x.rename_("A", "B"), None)[2], lambda: [numbers(4, 6)]),
        "an error": Program(
            lambda x, y: x + y, lambda: [named(4, 4), named(4, 4, names=("C", "N"))], left="has named dimensions"
        ),
        "a product": Program(
            lambda x, y: x @ y * 2, lambda: [named(4, 6), named(6, 3, names=("C", "D"))], left="has named dimensions"
        ),
        "made": Program(
            lambda x: (torch.zeros(2, 3, names=("N", "C")) + 1, x * 2),
            lambda: [numbers(2)],
            left="has named dimensions",
        ),
        "flattened": Program(
            lambda x: (x.flatten(["N", "C"], "F"), (x * 2).unflatten("C", (("A", 2), ("B", 3)))),
            lambda: [named(4, 6)],
            dynamo="its fake tensors have no names",
        ),
        "returned": Program(lambda x, y: (x, y * 2), lambda: [named(4, 6), numbers(3)]),
        "viewed": Program(
            lambda x, y: (x[1:], x.select("N", 1), y * 2),
            lambda: [named(4, 6), numbers(3)],
            dynamo="its fake tensors have no names",
        ),
    }
)


# --- mkldnn


class Mkldnn(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer: nn.Module = nn.Linear(8, 6) if kind == "linear" else nn.Conv2d(3, 4, 3)
        self.layer = torch.utils.mkldnn.to_mkldnn(layer.eval())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x * 2).to_mkldnn()).to_dense().relu() + 1


MKLDNN_PROGRAMS: dict[str, Program] = {
    "there and back": Program(
        lambda x: (x * 2).to_mkldnn().to_dense() + 1, lambda: [numbers(4, 6)], left="has the layout torch._mkldnn"
    ),
    "there and back, with gradients": Program(
        lambda x: (x * 2).to_mkldnn().to_dense() + 1,
        lambda: [numbers(4, 6, grad=True)],
        grad=True,
        left="has the layout torch._mkldnn",
    ),
    "an input": Program(
        lambda x, y: x.to_dense() * 2 + y,
        lambda: [numbers(4, 6).to_mkldnn(), numbers(4, 6)],
        left="has the layout torch._mkldnn",
    ),
    "returned": Program(
        lambda x: ((x * 2).to_mkldnn(), x + 1),
        lambda: [numbers(4, 6)],
        # Traced as if it had strides since torch 2.14.
        left="" if minor_version() in ("2.11", "2.12", "2.13") else "has the layout torch._mkldnn",
    ),
    "an input returned": Program(
        lambda x, y: (x, x.relu(), y * 2),
        lambda: [numbers(4, 6).to_mkldnn(), numbers(3)],
        left="has the layout torch._mkldnn",
    ),
    "a linear layer": Program(
        lambda m, x: m(x), lambda: [Mkldnn("linear"), numbers(5, 8)], left="has the layout torch._mkldnn"
    ),
    "a convolution": Program(
        lambda m, x: m(x), lambda: [Mkldnn("convolution"), numbers(2, 3, 6, 6)], left="has the layout torch._mkldnn"
    ),
    "written": Program(
        lambda x: (x.relu_(), None)[1], lambda: [numbers(4, 6).to_mkldnn()], left="has the layout torch._mkldnn"
    ),
    "an error": Program(lambda x: x[1], lambda: [numbers(4, 6).to_mkldnn()], left="has the layout torch._mkldnn"),
}

PROGRAMS = {
    f"{family}: {name}": program
    for family, table in (
        ("float8", FLOAT8_PROGRAMS),
        ("rare", RARE_PROGRAMS),
        ("sparse", SPARSE_PROGRAMS),
        ("quantized", QUANTIZED_PROGRAMS),
        ("nested", NESTED_PROGRAMS),
        ("named", NAMED_PROGRAMS),
        ("mkldnn", MKLDNN_PROGRAMS),
    )
    for name, program in table.items()
}


def run_compiled(program: Program) -> tuple[Any, dict[str, Any]]:
    """What the compiled program shows, and what was counted."""
    torch._dynamo.reset()
    opforge.reset_stats()
    return observe(torch.compile(program.run, backend="opforge", **dict(program.options)), program), opforge.stats()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_programs_are_right_or_left_to_eager(name: str) -> None:
    program = PROGRAMS[name]
    eager = observe(program.run, program)
    if program.dynamo:
        torch._dynamo.reset()
        by_dynamo = observe(torch.compile(program.run, backend="eager", **dict(program.options)), program)
        assert differences(by_dynamo, eager, lambda: observe(program.run, program, double=True)), program.dynamo
        eager = by_dynamo
    found, stats = run_compiled(program)
    assert differences(found, eager, lambda: observe(program.run, program, double=True)) == []
    assert stats["kernels"] >= program.kernels
    if program.left:
        assert any(program.left in reason for reason in stats["fallbacks"]), stats["fallbacks"]
    else:
        assert stats["fallbacks"] == {}


DIRECT: dict[str, tuple[Callable[..., Any], Callable[[], Tensor], str]] = {
    "float8": (lambda x: (x.float() * 2).to(E5), lambda: eight(4, 6), ""),
    "COO": (lambda x: torch.sparse.mm(x, x.t()), lambda: coo(4, 6), "has the layout torch.sparse_coo"),
    "COO made": (lambda x: (x * 2).to_sparse(), lambda: holed(4, 6), "sparse"),
    "CSR": (lambda x: x * 2, lambda: holed(4, 6).to_sparse_csr(), "has the layout torch.sparse_csr"),
    "quantized": (lambda x: x.dequantize() * 2, lambda: by_tensor(4, 6), "holds quantized numbers (torch.quint8)"),
    "quantized inside": (
        lambda x: torch.quantize_per_tensor(x * 2, 0.05, 12, torch.quint8),
        lambda: numbers(4, 6),
        "it makes a quantized tensor",
    ),
    "jagged": (lambda x: x * 2, jagged, "has the layout torch.jagged"),
    "strided nested": (lambda x: x * 2, strided, "an input is nested"),
    "mkldnn": (lambda x: x.relu(), lambda: numbers(4, 6).to_mkldnn(), "has the layout torch._mkldnn"),
}


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("entry", ["compile_fx", "aot_function", "aot_function, dynamic"])
@pytest.mark.filterwarnings("ignore")
def test_without_dynamo(name: str, entry: str) -> None:
    """`compile_fx` raised UnsupportedFakeTensorException for quantized inputs and RuntimeError for nested ones; `aot_function` raised for CSR,
    quantized and nested ones.
    """
    run, make, left = DIRECT[name]
    program = Program(run, lambda: [make()])

    def call(x: Tensor) -> Any:
        if entry == "compile_fx":
            return opforge.compile_fx(torch.fx.symbolic_trace(run), [x])(x)
        dynamic = entry.endswith("dynamic")
        return opforge.aot_function(run, lambda graph, _: graph, lambda graph, _: graph, dynamic=dynamic)(x)

    opforge.reset_stats()
    assert differences(observe(call, program), observe(run, program), lambda: observe(run, program, double=True)) == []
    reasons = opforge.stats()["fallbacks"]
    assert any(left in reason for reason in reasons) if left else reasons == {}


@pytest.mark.parametrize("name", ["COO", "quantized", "strided nested", "mkldnn"])
@pytest.mark.filterwarnings("ignore")
def test_a_graph_for_one_kind_of_tensors_refuses_another(name: str) -> None:
    """A COO tensor has the sizes and strides that a graph of strided tensors asks for, and no memory there."""
    _, make, _ = DIRECT[name]
    graph = torch.fx.symbolic_trace(lambda x: x.relu())
    with torch.no_grad(), pytest.raises(InputError, match=r"input 0 (is|has|holds) .*the graph was compiled for"):
        opforge.compile_fx(graph, [numbers(4, 6)])(make())
    with torch.no_grad(), pytest.raises(InputError, match=r"input 0 .*the graph was compiled for"):
        opforge.compile_fx(graph, [make()])(numbers(4, 6))


def test_ahead_of_time_functions_tell_kinds_of_tensors_apart() -> None:
    """The graph that was made for a strided tensor was called with a COO one of its sizes."""
    made = []
    function = opforge.aot_function(lambda x: x * 2, lambda graph, _: made.append(graph) or graph)
    for x in (numbers(4, 6), coo(4, 6), numbers(4, 6).to_mkldnn().to_dense(), numbers(4, 6)):
        with torch.no_grad():
            found = function(x)
        assert found.layout == x.layout
        assert torch.equal(found.to_dense(), x.to_dense() * 2)
    assert len(made) == 1


@pytest.mark.parametrize("name", ["COO", "quantized", "strided nested", "mkldnn"])
def test_exports_refuse_them(name: str) -> None:
    _, make, _ = DIRECT[name]

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(ExportError, match=r"args\[0\] (is|has|holds) .*; only strided tensors can be exported"):
        opforge.aot_export_module(Doubled(), [make()], trace_joint=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sparse_gradient_arrives_at_an_ahead_of_time_function(dynamic: bool) -> None:
    k, doubled = torch.tensor([1, 2, 1]), opforge.aot_function(lambda w: w * 2, lambda graph, _: graph, dynamic=dynamic)
    found, expected = numbers(9, 4, grad=True), numbers(9, 4, grad=True)
    looked_up(k, doubled(found)).sum().backward()
    looked_up(k, expected * 2).sum().backward()
    assert found.grad.layout is expected.grad.layout is torch.sparse_coo
    assert torch.equal(found.grad.to_dense(), expected.grad.to_dense())


def test_a_sparse_gradient_arrives_twice_behind_dropout() -> None:
    """The backward draws the forward's numbers again."""
    w, k = torch.ones(9, 4, requires_grad=True), torch.tensor([1, 2, 1])
    y = torch.compile(lambda w: F.dropout(w, 0.5) * 3, backend="opforge")(w)
    loss = looked_up(k, y).sum()
    loss.backward(retain_graph=True)
    once = w.grad.to_dense()
    counts = torch.bincount(k, minlength=9)[:, None]
    assert torch.equal(once, y.detach() * counts)
    loss.backward()
    assert torch.equal(w.grad.to_dense(), 2 * once)


def test_a_sparse_gradient_is_an_error_where_nothing_may_run_eagerly() -> None:
    w = numbers(9, 4, grad=True)
    y = torch.compile(lambda w: w * 2, backend="opforge", options={"strict": True})(w)
    with pytest.raises(UnsupportedError, match="a gradient arrives that is no strided tensor"):
        looked_up(torch.tensor([1, 2]), y).sum().backward()


def test_an_operator_that_returns_quantized_numbers_unforetold_leaves_the_graph_to_eager() -> None:
    """Its elements were to be copied into the tensor that tracing had seen: RuntimeError."""

    @torch.library.custom_op("opforge_test::in_bytes", mutates_args=())
    def in_bytes(x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x, 0.05, 12, torch.quint8)

    in_bytes.register_fake(torch.empty_like)
    with pytest.warns(OpforgeWarning, match="returned torch.quint8 where tracing says"):
        found = torch.compile(lambda x: in_bytes(x * 2), backend="opforge")(numbers(4, 6))
    assert torch.equal(found.int_repr(), in_bytes(numbers(4, 6) * 2).int_repr())


def test_what_has_no_text_is_no_device() -> None:
    """What generated source has no text for was written as `torch.device("<...>")`."""
    linear = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 6)), {nn.Linear}, torch.qint8)[0]
    packed = linear._packed_params._packed_params

    def program(x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x * 2, packed) + 1

    opforge.reset_stats()
    with torch.no_grad():
        x = numbers(5, 8)
        found = opforge.compile_fx(torch.fx.symbolic_trace(program), [x])(x)
        assert torch.equal(found, program(x))
    (reason,) = opforge.stats()["fallbacks"]
    assert "ScriptObject is an argument" in reason
