"""What a step may be. Braces are filled by `generate`:

{t} any tensor, {f} floating, {i} integer, {b} boolean, {g} one that broadcasts with the first operand, {h} a floating one that does,
{d} {e} dimensions of the first operand, {s} a subscript of slices, {c} a number, {k} a small count, {dt} a dtype,
{rows} positions in dimension {d} of the first operand, {q} a size of the first operand. A name with `'` is drawn anew.
A group has a weight; its entries are equally likely. Steps that eager refuses are mostly drawn again, so entries need not always fit.
"""

from __future__ import annotations

VIEWS = """
{t}.t()
{t}.mT
{t}.transpose({d}, {e})
{t}.movedim({d}, {e})
{t}[{s}]
{t}[{s}]
{t}[{s}]
{t}.unsqueeze({d})
{t}.squeeze({d})
{t}.squeeze()
{t}.view(-1)
{t}.reshape(-1)
{t}.flatten()
{t}.flatten().view({t}.shape)
{t}.view({t}.shape)
{t}.expand(2, *{t}.shape)
{t}.unsqueeze(0).expand(3, *{t}.shape)
{t}.select({d}, 0)
{t}.select({d}, -1)
{t}.narrow({d}, 1, 1)
{t}.narrow({d}, 0, 2)
{t}.diagonal()
{t}.diagonal(1)
{t}.unfold({d}, 2, 1)
{t}.unfold({d}, 2, 2)
{t}.detach()
{t}.view_as({t})
{t}.broadcast_to(2, *{t}.shape)
{t}.unflatten({d}, (1, -1))
{t}.permute(*range({t}.dim() - 1, -1, -1))
{t}.chunk(2, {d})[0]
{t}.unbind({d})[0]
{t}.split(1, {d})[-1]
{t}.contiguous()
{t}.expand_as({g})
{t}.as_strided((2, 2), (1, 2))
{t}.as_strided((2,), (1,), 1)
{t}.swapaxes({d}, {e})
torch.atleast_2d({t})
"""

VIEW_PAIRS = """
{t}.chunk(2, {d})
{t}.split((1, {q} - 1), {d})
{t}.tensor_split(2, {d})
"""

UNARY = """
{f}.sin()
torch.cos({f})
{f}.tanh()
{f}.sigmoid()
torch.exp(-{f}.abs())
{f}.relu()
F.gelu({f})
F.gelu({f}, approximate="tanh")
F.silu({f})
{t}.abs()
-{t}
{f}.abs().add(1).sqrt()
{f}.square().add(0.5).rsqrt()
{f}.abs().log1p()
{f}.square()
torch.erf({f})
F.softplus({f})
F.leaky_relu({f}, 0.1)
{f}.floor()
{f}.ceil()
{f}.round()
{f}.trunc()
{t}.sign()
{f}.frac()
1 / ({f}.abs() + 1)
{t}.clamp({c}, 2)
F.hardtanh({f})
F.elu({f})
F.logsigmoid({f})
{f}.expm1().clamp(max=3)
F.hardswish({f})
F.mish({f})
{f}.atan()
{f}.nan_to_num()
{b}.logical_not()
~{b}
~{i}
{t} + {c}
{t} * {c}
{c} - {t}
{f} / {c}
{t} ** 2
{i} // 2
{i} % 3
{f} // 2
{t}.clone()
{t}.to({dt})
{t}.to({dt})
{t}.double().to({dt})
{f}.sum().to({dt}) * 2
{t} * {q}
{f}.sum() / {t}.numel()
{t} > {c}
{t} == {c}
{f}.isfinite()
F.threshold({f}, 0.5, -1.0)
{f}.clamp_min(0)
{f}.xlogy({f}.abs() + 1)
"""

BINARY = """
{t} + {g}
{t} - {g}
{t} * {g}
{f} / ({h}.abs() + 1)
torch.maximum({t}, {g})
torch.minimum({t}, {g})
torch.add({t}, {g}, alpha=2)
torch.atan2({f}, {h}.abs() + 1)
torch.fmod({f}, {h}.abs() + 1)
torch.remainder({f}, {h}.abs() + 1)
{t} > {g}
{t} <= {g}
{t} == {g}
torch.where({t} > {c}, {t}, {g})
torch.where({b}, {g}, {g'})
torch.where({b}, {g}, 0)
torch.lerp({f}, {h}, 0.25)
torch.addcmul({f}, {h}, {h'}, value=0.5)
torch.addcdiv({f}, {h}, {h'}.square() + 1)
{i} & {g}
{i} | {g}
{b} ^ {g}
torch.logical_and({t}, {g})
torch.hypot({f}, {h})
torch.copysign({f}, {h})
torch.clamp({t}, min={g})
torch.floor_divide({f}, {h}.abs() + 1)
torch.isclose({f}, {h})
torch.rsub({t}, {g})
F.mse_loss({f}, {h})
F.smooth_l1_loss({f}, {h}, reduction="none")
F.binary_cross_entropy_with_logits({f}, {h}.sigmoid())
F.prelu({f}, {h})
{f}.dist({h})
"""

REDUCTIONS = """
{t}.sum()
{t}.sum({d})
{t}.sum({d}, keepdim=True)
{t}.sum((0, 1))
{f}.mean()
{f}.mean({d})
{f}.mean({d}, keepdim=True)
{t}.amax({d})
{t}.amin({d}, keepdim=True)
{t}.max()
{t}.min({d}).values
{t}.max({d}).indices
{t}.argmax({d})
{t}.argmin()
{f}.prod({d})
{t}.any({d})
{t}.all()
{f}.var({d})
{f}.std()
{f}.norm()
{f}.norm(dim={d})
{f}.logsumexp({d})
{t}.cumsum({d})
{f}.cumprod({d})
{t}.cummax({d}).values
{t}.count_nonzero({d})
{t}.sum({d}, dtype=torch.float64)
{f}.softmax({d})
{f}.softmax(-1)
{f}.log_softmax({d})
F.layer_norm({f}, {f}.shape[-1:])
F.layer_norm({f}, {f}.shape[-1:], eps=0.1) * {h}
F.batch_norm({f}, None, None, training=True, eps=0.1)
F.group_norm({f}, 1, eps=0.1)
F.rms_norm({f}, {f}.shape[-1:], eps=0.1)
F.normalize({f}, dim={d}, eps=0.1)
{t}.sort({d}, stable=True).values
{t}.argsort({d}, stable=True)
{f}.aminmax(dim={d}).max
{t}.flatten().median()
F.log_softmax({f}, -1).mean(0)
{f}.sub({f}.mean({d}, keepdim=True)).square().sum({d})
{t}.diff(dim={d})
{t}.trace()
{f}.logcumsumexp({d})
"""

INDEX = """
{t}.index_select({d}, {rows})
{t}[{rows0}]
{t}[{rows0}, 0]
{t}[:, {rows1}]
{t}[..., None, 0]
{t}.gather({d}, {t}.argsort({d}, stable=True))
{t}.take_along_dim({t}.argmax({d}, keepdim=True), {d})
F.embedding({rows0}, {f})
torch.cat([{t}, {t'}], {d})
torch.cat([{t}, {t}], {d})
torch.cat([{t}[1:], {t}[:1]])
torch.stack([{t}, {t}], {d})
torch.stack([{t}, {g}])
{t}.masked_fill({t} > {c}, {c})
{t}.masked_fill({b}, {c})
{t}.tril()
{t}.triu(1)
{t}.roll(1, {d})
{t}.flip({d})
{t}.repeat(2, *[1] * {t}.dim())
{t}.repeat_interleave(2, {d})
F.pad({t}, (1, 2))
F.pad({t}, (-1, 1))
F.pad({f}, (1, 1), mode="replicate")
torch.zeros_like({t})
torch.full_like({t}, {c})
torch.ones({t}.shape, dtype={dt})
{t}.new_zeros({t}.shape)
torch.arange({q})
torch.arange({q}, dtype={dt}) * 0.5
{t}.index_fill({d}, {rows}, {c})
{t}.scatter({d}, {t}.argsort({d}, stable=True), {t})
{f}.scatter_add({d}, {t}.argmax({d}, keepdim=True), {f})
{t}.scatter_reduce({d}, {t}.argmax({d}, keepdim=True), {t}, "amax")
{t}.index_add({d}, {rows}, {t}.index_select({d}, {rows}))
{t}.index_put(({rows0},), {t}[{rows0}], accumulate=True)
{t}.slice_scatter({t}[:1] + 1, 0, 1, 2)
{t}.select_scatter({t}.select({d}, 0) * 2, {d}, -1)
{t}.diagonal_scatter({t}.diagonal() * 2)
torch.eye({q})
F.one_hot({rows0}, {q})
torch.tril_indices({q}, {q})
torch.bucketize({f}, torch.arange(-1.0, 2.0))
torch.block_diag({t}, {t})
torch.meshgrid({rows0}, {rows0}, indexing="ij")[0]
"""

MATRIX = """
{f} @ {f'}
{f} @ {f}.mT
{f}.mT @ {f}
torch.matmul({f}, {f'})
torch.mm({f}.flatten(1), {f}.flatten(1).t())
torch.addmm({h}, {f}, {f'})
F.linear({f}, {f'})
F.linear({f}, {f'}, {h})
torch.einsum("ij,kj->ik", {f}, {f'})
torch.outer({f}.flatten(), {f'}.flatten())
torch.dot({f}.flatten(), {f}.flatten())
{f}.flatten() @ {f}.flatten().sin()
torch.baddbmm({h}, {f}, {f}.mT)
F.scaled_dot_product_attention({f}, {f}, {f})
{i} @ {i}.mT
"""

IN_PLACE = """
{t}.add_({c})
{t}.add_({g})
{t}.sub_({g}, alpha=2)
{t}.mul_({c})
{t}.mul_({g})
{f}.div_({c})
{t}.copy_({g})
{t}.fill_({c})
{t}.zero_()
{t}.neg_()
{t}.clamp_({c}, 2)
{f}.relu_()
{f}.tanh_()
{f}.sigmoid_()
{f}.sin_()
{f}.abs_()
{t}.masked_fill_({t} > {c}, {c})
{t}.masked_fill_({b}, {c})
{t}.index_add_({d}, {rows}, {t}.index_select({d}, {rows}))
{t}.index_fill_({d}, {rows}, {c})
{t}.index_copy_({d}, {rows}[:1], {t}.index_select({d}, {rows}[:1]) * 2)
{t}.scatter_({d}, {t}.argmax({d}, keepdim=True), {c})
{t}.index_put_(({rows0},), {t}[{rows0}] + 1)
{f}.addcmul_({h}, {h'}, value=0.5)
{f}.lerp_({h}, 0.25)
{t}[{s}] = {c}
{t}[{s}] = {t'}[{s'}]
{t}[{s}] += {c}
{t}[{s}] *= {t'}
{t}[{t} > {c}] = {c}
{t}[{rows0}] = {c}
{t}[0] = {t}[-1]
{t}[{s}].add_({c})
{t}.view(-1)[:2].mul_({c})
{t}.t().add_({g})
{t}.diagonal().zero_()
{t}.mul_({t})
{t}.add_({t}.sum().to({t}.dtype))
{t}.cumsum_({d})
{t}.fill_diagonal_({c})
{t}.select({d}, 0).copy_({t}.select({d}, -1))
{b}.logical_not_()
{i}.bitwise_and_(3)
{t}.clamp_(min={g})
F.relu({f}, inplace=True)
F.leaky_relu_({f}, 0.1)
{t}.tril_()
{f}.addmm_({h}, {h'})
{t}.detach().add_({c})
{t}.pow_(2)
"""

METADATA = """
{t}.t_()
{t}.transpose_({d}, {e})
{t}.unsqueeze_({d})
{t}.squeeze_({d})
"""

GROUPS = {
    "views": (VIEWS, 22, 1),
    "pairs of views": (VIEW_PAIRS, 3, 2),
    "unary": (UNARY, 18, 1),
    "binary": (BINARY, 14, 1),
    "reductions": (REDUCTIONS, 12, 1),
    "index": (INDEX, 10, 1),
    "matrix": (MATRIX, 4, 1),
    "in place": (IN_PLACE, 20, 0),
    "metadata": (METADATA, 1, 0),
}
"""Group → its templates, its weight, and how many names a step of it defines."""
