"""Whole graphs to loop programs: values by the reference interpreter, eager kernels where nothing else works, sizes as symbols."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import opforge
from opforge.errors import UnsupportedError
from opforge.generated.languages import CPP_LANGUAGE
from opforge.runtime.ir.index import Expr
from opforge.runtime.ir.nodes import Extern, Nest
from opforge.runtime.ir.text import dump
from opforge.runtime.ir.verify import verify
from opforge.runtime.lower.graph import Lowered, lower
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.observe import counters
from tests.support.ir_interpreter import interpret
from tests.support.ir_text import parse

aten = torch.ops.aten


def lowered(f: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> Lowered:
    counters.reset()
    gm = make_fx(f, tracing_mode=mode, _allow_non_fake_inputs=True)(*args)
    result = lower(gm)
    verify(result.program)
    return result


def externs(result: Lowered) -> list[str]:
    return [i.target for i in result.program.items if isinstance(i, Extern)]


def same(f: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> Lowered:
    """Lower, interpret, and compare with eager."""
    result = lowered(f, *args, mode=mode)
    got = interpret(
        result.program, [*(a for a in args if isinstance(a, torch.Tensor)), *(t for _, t in result.constants)]
    )
    want = f(*args)
    for g, w in zip(got, want if isinstance(want, (tuple, list)) else (want,), strict=True):
        torch.testing.assert_close(g, w)
    return result


def test_a_chain_becomes_nests_named_after_the_graph() -> None:
    result = same(lambda x, y: torch.relu(x + y) * 2, torch.randn(3, 4), torch.randn(4))
    assert [i.name for i in result.program.items] == ["add", "relu", "mul"]  # type: ignore[union-attr]
    assert all(isinstance(i, Nest) for i in result.program.items)


def test_an_operator_without_lowering_is_an_eager_call_with_a_reason() -> None:
    # Small products: the exponential of a large one shows each rounding of it.
    result = same(lambda x: torch.mm(x, x.t()).exp(), torch.rand(3, 4))
    assert externs(result) == ["aten.mm.default"]
    assert counters.snapshot()["reasons"] == {"aten.mm.default: a BLAS call is faster than loops": 1}


def test_results_of_an_eager_call_with_several() -> None:
    result = same(lambda x: (torch.sort(x, 1)[1] + 1, torch.sort(x, 1)[0] * 2), torch.randn(3, 5))
    assert externs(result) == ["aten.sort.default"] * 2


def test_complex_values_pass_through_eager_calls() -> None:
    result = same(lambda x: torch.view_as_real(torch.fft.rfft(x)).abs(), torch.randn(8))
    assert any(name.startswith("aten._fft") for name in externs(result))


def test_a_view_without_lowering_of_its_own_reads_by_its_strides() -> None:
    result = same(lambda x: torch.as_strided(x, (3, 2), (1, 4), 1) * 2, torch.randn(3, 4))
    assert externs(result) == []


def test_a_view_of_a_transposed_tensor_reads_its_storage_order() -> None:
    result = same(lambda x: torch.as_strided(x.t(), (3, 2), (1, 4), 1) * 2, torch.randn(3, 4))
    assert externs(result) == []


def test_a_view_of_storage_beyond_its_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="reads the storage"):
        lowered(lambda x: torch.as_strided(x[:, :2], (3, 2), (1, 4), 1) * 2, torch.randn(3, 4))


def test_a_view_as_another_dtype_is_copied() -> None:
    result = same(lambda x: x.view(torch.int32) + 1, torch.randn(3, 4))
    assert externs(result) == ["aten.view_copy.dtype"]


def test_zero_dim_constants_are_in_the_program_and_others_are_inputs() -> None:
    table = torch.randn(4)
    result = same(lambda x: x * torch.tensor(2.5) + table, torch.randn(3, 4))
    assert [t.shape for _, t in result.constants] == [table.shape]


def test_sizes_stay_symbols() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[0]
        return x.reshape(-1, 2).softmax(1), x[: n // 2] * n, torch.arange(n) + 1, torch.cat([x, x], 1)

    result = same(f, torch.randn(6, 4), mode="symbolic")
    assert externs(result) == []
    assert result.program.symbols
    assert isinstance(result.program.inputs[0].shape[0], Expr)


def test_indirect_reads_of_unknown_sizes() -> None:
    result = same(lambda t, k: t[k], torch.randn(6, 4), torch.tensor([1, -1, 3]), mode="symbolic")
    assert externs(result) == []


def test_a_size_made_from_data_is_told_by_the_call_that_makes_it() -> None:
    program = lowered(lambda x: torch.nonzero(x) + 1, torch.ones(2), mode="symbolic").program
    call, nest = program.items
    assert isinstance(call, Extern)
    assert isinstance(nest, Nest)
    assert [(s.symbol, s.buffer, s.dim) for s in call.learns] == [(str(nest.shape[0]), call.outs[0].name, 0)]


def test_a_size_made_from_data_that_no_call_tells_is_unsupported() -> None:
    gm = make_fx(lambda x: torch.nonzero(x) + 1, tracing_mode="symbolic")(torch.ones(2))
    call = next(n for n in gm.graph.nodes if n.op == "call_function")
    call.meta["val"] = call.meta["val"][:, 0]  # no size of a result is the symbol alone
    call.meta["val"] = torch.cat([call.meta["val"]] * 2)
    with pytest.raises(UnsupportedError, match="made from data"):
        lower(gm)


def test_what_differs_from_the_trace_runs_eagerly() -> None:
    gm = make_fx(lambda x: torch.exp(x), tracing_mode="fake")(torch.randn(3))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["val"] = node.meta["val"].double()
    counters.reset()
    assert [type(i) for i in lower(gm).program.items] == [Extern]
    (reason,) = counters.snapshot()["reasons"]
    assert "lowered to exp: float32[3] where float64[3] was traced" in reason


def test_what_differs_from_the_trace_is_said_of_operators_that_give_a_reason_too() -> None:
    """An entry's `why` is about its conditions, which hold here."""
    gm = make_fx(lambda x: torch.ops.aten.mode(x), tracing_mode="fake")(torch.randn(3, 4))
    call = next(n for n in gm.graph.nodes if str(n.target) == "aten.mode.default")
    values, places = call.meta["val"]
    call.meta["val"] = values.double(), places
    counters.reset()
    lower(gm, products=100)
    assert ["where float64[3] was traced" in reason for reason in counters.snapshot()["reasons"]] == [True]


SORTS: dict[str, tuple[Callable[..., Any], str]] = {
    "sort": (torch.sort, "only short sorts are kernels of ours"),
    "topk": (lambda x: torch.topk(x, 3), "only selections in order, of a known number, are kernels of ours"),
    "median": (lambda x: torch.median(x, -1), "only a selection on a processor, from few elements"),
    "nanmedian of all": (torch.nanmedian, "only a selection on a processor, from few elements"),
    "mode": (torch.mode, "only a selection on a processor, from few elements"),
    "kthvalue": (lambda x: torch.kthvalue(x, 2), "kernels of ours that sort are those of aten.sort, aten.topk"),
}


@pytest.mark.parametrize("name", SORTS)
def test_sorts_of_many_elements_say_which_are_kernels(name: str) -> None:
    f, says = SORTS[name]
    counters.reset()
    lowered(f, torch.randn(70, 90))
    (reason,) = counters.snapshot()["reasons"]
    assert f": {says}" in reason


def test_other_sizes_than_traced_leave_the_graph_to_eager() -> None:
    """Torch 2.11 says so of a norm over a dimension of size 1 that is counted from the end."""
    gm = make_fx(lambda x: torch.exp(x), tracing_mode="fake")(torch.randn(3))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["val"] = node.meta["val"].unsqueeze(1)
    with pytest.raises(UnsupportedError, match=r"lowered to exp: float32\[3\] where float32\[3, 1\] was traced"):
        lower(gm)


def test_another_rank_than_traced_leaves_a_graph_of_symbolic_sizes_to_eager() -> None:
    gm = make_fx(lambda x: torch.exp(x), tracing_mode="symbolic")(torch.randn(3))
    node = next(n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == "aten.exp.default")
    node.meta["val"] = node.meta["val"].unsqueeze(1)
    with pytest.raises(UnsupportedError, match=r"lowered to exp: .* was traced"):
        lower(gm)


def test_an_operator_of_very_many_tensors_runs_eagerly() -> None:
    result = lowered(lambda *ts: torch.stack(ts) + 1, *(torch.ones(2) for _ in range(CPP_LANGUAGE.operands + 1)))
    assert externs(result) == ["aten.stack.default"]


def test_a_kernel_of_more_arguments_than_can_be_passed_leaves_the_graph_to_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opforge.runtime.host.from_plan.CPP_LANGUAGE", replace(CPP_LANGUAGE, arguments=3))
    opforge.reset_stats()
    ts = [torch.ones(2) for _ in range(3)]
    gm = make_fx(lambda a, b, c: a + b + c)(*ts)
    assert torch.equal(opforge.compile_fx(gm, ts, options={"cache": False})(*ts), torch.full((2,), 3.0))
    (reason,) = opforge.stats()["fallbacks"]
    assert "takes 4 arguments, more than 3" in reason


def test_an_effect_without_results_stays() -> None:
    gm = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.ones(3))
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_before(first):
        gm.graph.call_function(aten._assert_async.msg, (first.args[0], "negative")).meta["val"] = None
    calls = [i for i in lower(gm).program.items if isinstance(i, Extern)]
    assert [(c.target, c.outs, c.effect) for c in calls] == [("aten._assert_async.msg", (), True)]


def test_strides_of_inputs_outputs_and_eager_arguments() -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    result = lowered(lambda x, w: torch.conv2d(torch.relu(x), w).transpose(0, 1), x, torch.randn(5, 3, 1, 1))
    relu, conv = result.program.items[0], next(i for i in result.program.items if isinstance(i, Extern))
    assert result.program.inputs[0].stride == x.stride()
    assert isinstance(relu, Nest)
    assert relu.stride == x.stride() == conv.args[0].stride
    assert result.program.outputs[0].stride == torch.conv2d(x, torch.randn(5, 3, 1, 1)).transpose(0, 1).stride()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), ()])
def test_empty_and_zero_dim_tensors(shape: tuple[int, ...]) -> None:
    same(lambda x: ((x + 1).sum(), x.flatten() * 2, x.cumsum(-1) if x.ndim else x), torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_transformer_block(dtype: torch.dtype) -> None:
    w = torch.randn(8, dtype=dtype)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.layer_norm(x, (8,), w, w)
        q = y.view(2, 5, 2, 4).transpose(1, 2)
        a = (q * 0.5).softmax(-1)
        return torch.nn.functional.gelu(a.transpose(1, 2).reshape(2, 5, 8)) + x

    same(f, torch.randn(2, 5, 8, dtype=dtype))


def test_lowering_is_fast_and_linear() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = torch.nn.functional.layer_norm(torch.relu(x.reshape(4, 8)), (8,)).reshape(32) + x
        return x

    gm = make_fx(f, tracing_mode="fake")(torch.randn(32))
    lower(gm)
    start = time.process_time()
    items = len(lower(gm).program.items)
    assert items > 1000
    assert time.process_time() - start < 1.5  # about 0.2 s alone on a machine


def test_an_operator_on_a_tensor_without_dimensions_is_an_eager_call_where_its_lowering_needs_one() -> None:
    result = same(lambda x: x.unfold(0, 1, 1) + 1, torch.tensor(3.0))
    assert [n.name for n in result.program.items if isinstance(n, Nest)][-1] == "add"


def test_a_complex_number_is_passed_to_an_eager_kernel() -> None:
    result = same(lambda y: torch.pow(y, 2j) + y, torch.randn(3, dtype=torch.complex64))
    assert externs(result) == ["aten.pow.Tensor_Scalar"]
    text = dump(result.program)
    assert dump(parse(text)) == text
    assert "complex(0.0, 2.0)" in text
    assert "input y_1: float32[3, 2] stride [2, 1] paired" in text


def test_a_complex_input_that_is_also_an_output_is_copied() -> None:
    result = lowered(lambda y: y.resolve_conj(), torch.randn(3, dtype=torch.complex64))
    assert [o.paired for o in separate_outputs(result.program).outputs] == [True]
