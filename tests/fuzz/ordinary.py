"""What steps of ordinary programs may be, in the language of `catalog.py`; besides, {N} is a number made of sizes or of the program's state,
and {z} a size of an argument.
"""

from __future__ import annotations

NUMBERS_OF_SIZES = """
{z}
{z}
{z} * 0.5
{z} // 2
{z} % 2
{z} / 3
{z} ** -0.5
{z} ** 0.5
{z} - 2
1 / {z}
1.0 / {z} ** 2
math.sqrt({z})
1 / math.sqrt({z})
math.log({z})
math.log2({z} + 1)
math.exp(-{z})
math.floor({z} / 3)
math.ceil({z} / 4)
math.trunc({z} / 2.5)
math.cos({z})
math.sin({z} / 5)
math.tanh({z} / 10)
math.atan({z})
math.pow({z}, 0.25)
round({z} * 0.5, 2)
round({z} / 3)
int({z} * 0.7)
float({z})
abs({z} - 7)
min({z}, 4)
max({z}, 6)
min(1.0, {z} / 10)
{z} > 5
{z} <= {z}
({z} > 5) * 2
({z} == {z}) + 1
{z} * {z}
{z} + {z}
{z} / {z}
{z} // {z}
(3 if {z} > 5 else 0.5)
{N} + {N}
{N} * {N}
{N} - {N}
{N} * 0.5
({N}) / 4
-({N})
max({N}, {N})
min({N}, {N})
abs({N})
float({N})
math.sqrt(abs({N}))
math.tanh({N})
round({N}, 1)
({N}) > ({N})
"""

NUMBERS_OF_STEPS = """
state.step
state.step + 1
state.step * 0.1
state.step / 5
state.step // 2
state.step % 2
state.step % 3 == 0
state.step > 2
0.9 ** state.step
1 - 0.9 ** (state.step + 1)
1 / (state.step + 1)
math.sqrt(state.step + 1)
math.cos(math.pi * state.step / 100)
0.5 * (1 + math.cos(math.pi * state.step / 20))
min(1.0, (state.step + 1) / 4)
max(0.1, 1 - state.step / 10)
math.exp(-state.step / 3)
math.log(state.step + 1)
math.log1p(state.step)
math.sin(state.step)
math.tanh(state.step * 0.3)
round(state.step * 0.37, 2)
abs(state.step - 2)
int(state.step * 0.6)
float(state.step)
(0.1 if state.step > 1 else 0.5)
state.rate
state.rate * 2
state.rate / (1 + state.step)
1 - state.rate
state.rate ** 2
math.sqrt(state.rate)
min(state.rate, 0.25)
state.step * state.rate
{N} + {N}
{N} * {N}
{N} * 0.5
({N}) / 4
-({N})
max({N}, {N})
min({N}, {N})
math.sqrt(abs({N}))
math.exp(-abs({N}))
"""

USES = """
{t} * ({N})
{f} * ({N})
{f} + ({N})
({N}) - {t}
{f} / (abs({N}) + 1)
({N}) / ({f}.abs() + 1)
{f}.mul({N}).add({N})
{f}.sum() * ({N})
{f}.mean({d}) + ({N})
{f}.softmax(-1) * ({N})
({f} * ({N})).softmax({d})
torch.add({f}, {h}, alpha={N})
torch.lerp({f}, {h}, 1 / (1 + abs({N})))
torch.addcmul({f}, {h}, {h'}, value={N})
torch.where({f} > 0, {f}, {N})
{f} > ({N})
{f}.clamp(max=abs({N}))
{f}.clamp(-abs({N}), abs({N}))
{f}.masked_fill({f} > 1, {N})
torch.full({t}.shape, {N})
torch.full(({z},), {N})
torch.full_like({f}, {N})
torch.zeros({z}, {z}) + ({N})
{t}.new_full(({z},), {N})
torch.arange({z}) * ({N})
torch.arange({z}, dtype=torch.float32) / (abs({N}) + 1)
torch.linspace(0, 1, {z}) * ({N})
F.leaky_relu({f}, abs({N}) + 0.1)
F.elu({f}, abs({N}) + 0.1)
F.layer_norm({f}, {f}.shape[-1:], eps=abs({N}) + 0.1)
F.softplus({f}, beta=abs({N}) + 1)
F.hardtanh({f}, -1 - abs({N}), 1)
F.scaled_dot_product_attention({f}[None], {f}[None], {f}[None], scale=1 / (1 + abs({N})))
{f} @ {f}.mT * ({N})
({f} @ {f}.mT / math.sqrt({f}.size(-1))).softmax(-1)
{f}.pow(2).sum({d}).sqrt() * ({N})
{f}.abs().add(1).pow({N})
{i} * ({N})
{i} + ({N})
torch.tensor({N}) + {f}
{f}.sub_({N}) if not {f}.requires_grad else {f} - ({N})
"""

NUMBERS = """
({N})
({N})
max({N}, 1)
({N}) * 2
"""

PLAIN = """
{f}.sin()
{f}.tanh()
{f}.sigmoid()
F.gelu({f})
F.silu({f})
{f}.relu()
{f}.square()
{f}.abs()
{f} + {h}
{f} * {h}
{f} - {h}
{f} / ({h}.abs() + 1)
torch.maximum({f}, {h})
torch.where({f} > 0, {f}, {h})
{f}.sum({d})
{f}.mean({d}, keepdim=True)
{f}.mean()
{f}.amax({d}, keepdim=True)
{f}.softmax(-1)
{f}.log_softmax({d})
F.layer_norm({f}, {f}.shape[-1:])
{f}.t()
{f}.transpose({d}, {e})
{f}[1:]
{f}[..., :-1]
{f}.reshape(-1)
{f} @ {f}.mT
torch.cat([{f}, {f}], {d})
{f}.cumsum({d})
F.mse_loss({f}, {h})
"""

UPDATES = """
{f}.detach().mul_({N})
{f}.detach().add_({h}.detach(), alpha={N})
{f}.detach().lerp_({h}.detach(), 1 / (1 + abs({N})))
{f}.detach().mul_(0.9).add_({h}.detach() * ({N}))
{f}.detach().addcmul_({h}.detach(), {h'}.detach(), value={N})
{f}.detach().addcdiv_({h}.detach(), {h'}.detach().square().sqrt().add_(1), value=-({N}))
"""

ATTRIBUTES = """
{f} * state.scale
{f} + state.offset
({f} if state.flag else {f}.neg())
({f}.sin() if state.mode == "sin" else {f}.tanh() if state.mode == "tanh" else {f}.relu())
{f} * state.count
{f} / (1 + state.count)
{f} * state.table
{f} @ state.matrix
F.dropout({f}, 0.5, training=state.training)
{f}[: state.length]
{f}[..., state.length - 1]
{f}.sum(state.dim)
{f}.softmax(state.dim)
{f} * sum(state.weights)
{f} + len(state.weights)
{f} * state.weights[-1]
sum({f} * w for w in state.weights)
{f} * state.options["gain"]
({f} + state.options["shift"] if "shift" in state.options else {f})
{f}.to(state.dtype) * 2
F.layer_norm({f}, {f}.shape[-1:], eps=state.eps)
F.gelu({f}, approximate=state.approximate)
torch.full_like({f}, state.scale) * {f}
({f} if state.nothing is None else {f} + state.nothing)
torch.stack(state.history).sum(0) + {f}
"""

SET_ATTRIBUTES = """
state.__setattr__("count", state.count + 1)
state.__setattr__("scale", state.scale * 0.5)
state.__setattr__("table", state.table * 0.5 + 1)
state.__setattr__("last", {f}.detach().sum())
state.history.append(state.table * 0.5)
state.table.mul_(0.5)
state.table.add_(state.count)
state.options.update(gain=2.0)
state.weights.append(state.scale)
"""

BEFORE_ATTRIBUTES = (
    "state.scale = 0.5 * (call + 1)",
    "state.offset = [0.25, 1, 1.5, 2, 0.5][call % 5]",
    "state.flag = call % 2 == 1",
    'state.mode = ("sin", "tanh", "relu")[call % 3]',
    "state.count = call",
    "state.training = False",
    "state.length = 2 + call % 2",
    "state.dim = -1 if call % 2 else 0",
    "state.weights = [0.5, 1.5, 2.0][: 1 + call % 3]",
    'state.options = {"gain": 1.5 + call} if call % 2 else {"gain": 0.5, "shift": 1.0}',
    "state.dtype = torch.float64 if call == 2 else torch.float32",
    "state.eps = 0.1 * (1 + call)",
    'state.approximate = "tanh" if call == 1 else "none"',
    "state.nothing = None if call % 2 else 0.5",
    'state.table = grid((6,), "float32", 5 + call)',
    'state.matrix = grid((6, 6), "float32", 9 + call % 2) / 4',
    'state.history = [grid((6,), "float32", 20 + k) for k in range(1 + call % 2)]',
)

CUT = """
{f}[:, :8]
{f}[..., :8]
{f}[:, 4:12]
{f}[..., 3:]
{f}[..., :-5]
{f}[..., 8:24]
{f}[1:]
{f}[:-1]
{f}[2:10, 1:-1]
{f}[..., ::2]
{f}[::2]
{f}.narrow(-1, 1, 7)
{f}.narrow(0, 1, 3)
{f}.chunk(2, -1)[0]
{f}.chunk(2, -1)[1]
{f}.chunk(3, 0)[1]
{f}.split(8, -1)[0]
{f}.tensor_split(3, -1)[1]
{f}.select(-1, 3)
F.pad({f}, (1, 2))
F.pad({f}, (0, 5))
F.pad({f}, (3, 0, 1, 1))
F.pad({f}, (0, 0, 2, 1), value=0.5)
F.pad({f}, (-2, 3))
F.pad({f}, (8, -8))
F.pad({f}, (0, 3), value=-1e4)
torch.cat([{f}[..., :4], {f}[..., 4:]], -1)
torch.cat([{f}[..., 8:], {f}[..., :8]], -1)
torch.cat([{f}, {f}[:3]])
torch.stack([{f}[..., 0::2], {f}[..., 1::2]], -1).flatten(-2)
torch.cat([-{f}[..., {f}.shape[-1] // 2 :], {f}[..., : {f}.shape[-1] // 2]], -1)
{f}.roll(3, -1)
{f}.unflatten(-1, (-1, 4))
{f}.flatten()
{f}.transpose(0, 1)
{f}.t()
{f}.flip(-1)
"""

NORMS = """
{f}.softmax(-1)
{f}.softmax({d})
{f}.log_softmax(-1)
{f}.log_softmax({d})
F.softmin({f}, {d})
{f}.logsumexp({d})
{f}.logsumexp(-1, keepdim=True)
F.layer_norm({f}, {f}.shape[-1:])
F.layer_norm({f}, {f}.shape[-1:], eps=0.1)
F.layer_norm({f}, {f}.shape)
F.rms_norm({f}, {f}.shape[-1:], eps=0.1)
F.group_norm({f}[None], 1, eps=0.1)
F.batch_norm({f}, None, None, training=True, eps=0.1)
F.normalize({f}, dim={d}, eps=0.1)
F.normalize({f}, p=1, dim=-1, eps=0.1)
{f} - {f}.mean(-1, keepdim=True)
({f} - {f}.mean({d}, keepdim=True)) * ({f}.var({d}, keepdim=True) + 0.1).rsqrt()
{f} / ({f}.norm(dim=-1, keepdim=True) + 1)
{f} / ({f}.abs().sum({d}, keepdim=True) + 1)
{f} - {f}.amax(-1, keepdim=True)
{f}.std(-1)
{f}.var({d})
{f}.norm(dim={d})
F.cosine_similarity({f}, {f}.flip(0), -1, eps=0.1)
F.glu({f}, -1) if {f}.shape[-1] % 2 == 0 else {f}
F.cross_entropy({f}, torch.zeros({f}.shape[0], dtype=torch.int64))
({f}.softmax(-1) * {f}.log_softmax(-1)).sum(-1)
F.softmax({f}.masked_fill(torch.ones_like({f}, dtype=torch.bool).triu(1), -1e4), -1)
"""

LOSSES = """
{f}.square().sum()
{f}.square().mean()
{f}.sin().sum({d})
{f} * {h}
{f} + {h}
F.gelu({f})
{f}.tanh()
"""

MODULES = """
nn.Linear({last}, 8)
nn.Linear({last}, 5, bias=False)
nn.Linear({last}, {last})
nn.Sequential(nn.Linear({last}, 16), nn.GELU(), nn.Linear(16, {last}))
nn.Sequential(nn.Linear({last}, 12), nn.ReLU(), nn.LayerNorm(12))
nn.Sequential(nn.LayerNorm({last}, eps=0.1), nn.Linear({last}, 8), nn.SiLU(), nn.Dropout(0.0))
nn.LayerNorm({last}, eps=0.1)
nn.RMSNorm({last}, eps=0.1)
nn.PReLU()
nn.Tanh()
nn.Softmax(-1)
nn.LogSoftmax(-1)
nn.Dropout(0.5).eval()
nn.Flatten()
nn.Conv1d({channels}, 4, 3, padding=1)
nn.Conv2d({channels}, 4, 3, padding=1)
nn.Conv2d({channels}, {channels}, 3, padding=1, groups={channels})
nn.ConvTranspose2d({channels}, 2, 2, stride=2)
nn.BatchNorm1d({channels}, eps=0.1)
nn.BatchNorm2d({channels}, eps=0.1)
nn.BatchNorm2d({channels}, eps=0.1).eval()
nn.GroupNorm(1, {channels}, eps=0.1)
nn.InstanceNorm2d({channels}, eps=0.1, affine=True)
nn.MaxPool2d(2)
nn.AvgPool2d(2)
nn.AdaptiveAvgPool2d(1)
nn.Upsample(scale_factor=2)
nn.PixelUnshuffle(2)
nn.TransformerEncoderLayer({last}, 2, 8, dropout=0.0, batch_first=True)
nn.TransformerEncoderLayer({last}, 2, 8, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
nn.Sequential(nn.Conv2d({channels}, 4, 3, padding=1), nn.BatchNorm2d(4, eps=0.1), nn.ReLU())
nn.Sequential(nn.Linear({last}, 8), nn.Unflatten(-1, (2, 4)), nn.Flatten(-2))
"""

MODULES_WITH_CALLS = (
    ("nn.MultiheadAttention({last}, 2, batch_first=True)", "{w}({t}, {t}, {t}, need_weights=False)[0]"),
    ("nn.MultiheadAttention({last}, 1, batch_first=True)", "{w}({t}, {t}, {t})[1]"),
    ("nn.GRUCell({last}, 6)", "{w}({t})"),
    ("nn.RNNCell({last}, 6)", "{w}({t})"),
    ("nn.LSTMCell({last}, 6)", "{w}({t})[0]"),
    ("nn.Bilinear({last}, {last}, 4)", "{w}({t}, {t})"),
    ("nn.Embedding(9, {last})", "{w}({t}.abs().round().long().clamp(max=8).sum(-1).remainder(9))"),
    ("nn.EmbeddingBag(9, 6)", "{w}({t}.detach().abs().round().long().clamp(max=8).flatten(1))"),
)

LAYERS = """
{f} + {h}
{f} * {h}
F.gelu({f})
{f}.relu()
F.silu({f}) * {h}
{f}.mean(1)
{f}.flatten(1)
{f}.transpose(1, 2)
{f}.softmax(-1)
F.normalize({f}, dim=-1, eps=0.1)
{f} @ {f}.mT
torch.cat([{f}, {f}], -1)
{f}[:, -1]
F.scaled_dot_product_attention({f}, {f}, {f})
"""

OBJECTIVES = (
    "F.mse_loss({f}, torch.zeros_like({f}))",
    "F.smooth_l1_loss({f}, {f}.detach() * 0.5)",
    "F.cross_entropy({f}.flatten(0, -2), torch.zeros({f}.flatten(0, -2).shape[0], dtype=torch.int64))",
    "F.binary_cross_entropy_with_logits({f}, torch.ones_like({f}))",
    "F.kl_div({f}.log_softmax(-1), {f}.detach().softmax(-1), reduction='batchmean')",
    "F.nll_loss({f}.flatten(0, -2).log_softmax(-1), torch.ones({f}.flatten(0, -2).shape[0], dtype=torch.int64))",
    "F.huber_loss({f}, torch.ones_like({f}))",
    "{f}.square().mean()",
    "{f}.logsumexp(-1).sum()",
    "{f}",
)

LAYOUTS = """
{f}.contiguous()
{f}.t().contiguous()
{f}.mT.contiguous()
{f}.clone()
{f}.clone(memory_format=torch.contiguous_format)
{f}.t()
{f}.mT
{f}.transpose({d}, {e})
{f}[:, :2]
{f}[:, :2].contiguous()
{f}[..., 1:]
{f}[::2]
{f}.flatten()
{f}.reshape(-1)
{f}.expand(2, *{f}.shape)
{f}.unsqueeze(0)
{f}.permute(*range({f}.dim() - 1, -1, -1))
{f}.permute(*range({f}.dim() - 1, -1, -1)).contiguous()
{f}[None, None].contiguous(memory_format=torch.channels_last)
torch.empty_like({f}).copy_({f})
torch.cat([{f}, {f}], {d}).t()
{f}.split(2, -1)[0].clone()
{f}.unbind(0)[0]
"""

RAW = """
torch.ops.fuzz_raw.in_order({f})
torch.ops.fuzz_raw.in_order({f}.contiguous())
torch.ops.fuzz_raw.in_order({f}.t().contiguous())
torch.ops.fuzz_raw.in_order({f} * 2)
torch.ops.fuzz_raw.layout({f})
torch.ops.fuzz_raw.layout({f}.contiguous())
torch.ops.fuzz_raw.layout({f}.clone(memory_format=torch.contiguous_format))
torch.ops.fuzz_raw.layout({f}.mT + 1)
torch.ops.fuzz_raw.running({f}.detach(), {c})
torch.ops.fuzz_raw.weighted({f}, {f'})
torch.ops.fuzz_raw.weighted({f}.contiguous(), {f}.contiguous())
torch.ops.fuzz_raw.transposed({f})
torch.ops.fuzz_raw.halves({f}.detach())[0]
torch.ops.fuzz_raw.halves({f}.detach().contiguous())[1]
torch.ops.fuzz_raw.joined([{f}.detach(), {f}.detach().t()])
"""

RAW_WRITES = """
torch.ops.fuzz_raw.scale_({f}.detach(), {c})
torch.ops.fuzz_raw.scale_({f}.detach()[:, :1], 2.0)
torch.ops.fuzz_raw.scale_({f}.detach()[0], 0.5)
torch.ops.fuzz_raw.scale_({f}.detach().t(), 0.5)
torch.ops.fuzz_raw.add_out({f}.detach(), {f'}.detach())
"""
