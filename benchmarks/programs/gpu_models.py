"""Whole models and training steps of the size that a GPU is bought for, and small programs that its launches bound: each with a tiny size too.

Transformers run with weights in bfloat16; training keeps them in float32 and runs under autocast to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Built
from .models import Logits, LSTMLoop
from .training import ClassLoss, MeanSquare, TokenLoss, UNet

BF16 = torch.bfloat16


@dataclass(frozen=True)
class GpuProgram:
    """One program.

    kind   what a step is: a call without gradients, forward and backward of a loss under autocast to bfloat16 (no optimizer), or a call of
           an optimizer, whose parameters have gradients.
    make   the callable (module, function or optimizer) and its inputs, for a device and a size, tiny or not; under a fixed seed.
    launch whether launches bound it: its time is the wall clock's, not the device's.
    """

    name: str
    shape: str
    kind: Literal["inference", "train", "optimizer"]
    make: Callable[[torch.device, bool], Built]
    launch: bool = False


PROGRAMS: dict[str, GpuProgram] = {}
Make = Callable[[torch.device, bool], Built]


def program(name: str, shape: str, kind: Any = "inference", launch: bool = False) -> Callable[[Make], Make]:
    """Register the decorated maker."""

    def register(make: Make) -> Make:
        PROGRAMS[name] = GpuProgram(name, shape, kind, make, launch)
        return make

    return register


def ids(device: torch.device, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, device=device)


def gpt2(device: torch.device, tiny: bool) -> tuple[nn.Module, int]:
    """GPT-2 124M with random weights and without dropout, and the size of its vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = (
        {"vocab_size": 200, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2} if tiny else {}
    )
    config = GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with device:
        return Logits(GPT2LMHeadModel(config)), config.vocab_size


@program("gpt2", "124M, 12 layers, 8 x 512 tokens, bf16")
def make_gpt2(device: torch.device, tiny: bool) -> Built:
    model, words = gpt2(device, tiny)
    return model.to(BF16), (ids(device, words, *((2, 16) if tiny else (8, 512))),)


@program("gpt2_train", "124M, 12 layers, 4 x 512 tokens, autocast", "train")
def make_gpt2_train(device: torch.device, tiny: bool) -> Built:
    model, words = gpt2(device, tiny)
    shape = (2, 16) if tiny else (4, 512)
    return TokenLoss(model), (ids(device, words, *shape), ids(device, words, *shape))


class RMSNorm(nn.Module):
    """Scaled by the root of the mean square, computed in float32 at least."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) for [B, H, T, D]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, then SwiGLU (Touvron et al. 2023)."""

    def __init__(self, wide: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, wide // heads
        self.norm1, self.norm2 = RMSNorm(wide), RMSNorm(wide)
        self.q = nn.Linear(wide, wide, bias=False)
        self.kv = nn.Linear(wide, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(wide, wide, bias=False)
        self.gate, self.up = nn.Linear(wide, hidden, bias=False), nn.Linear(wide, hidden, bias=False)
        self.down = nn.Linear(hidden, wide, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.heads != self.groups
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token ids [B, T] to logits [B, T, V]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, wide: int, heads: int, groups: int, hidden: int, words: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, wide)
        self.blocks = nn.ModuleList(LlamaBlock(wide, heads, groups, hidden) for _ in range(layers))
        self.norm, self.head = RMSNorm(wide), nn.Linear(wide, words, bias=False)
        size = wide // heads
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def llama(device: torch.device, tiny: bool) -> tuple[nn.Module, int]:
    words = 128 if tiny else 32000
    with device:
        return (Llama(2, 32, 4, 2, 64, words, 16) if tiny else Llama(4, 2048, 16, 4, 5632, words, 1024)), words


@program("llama", "4 blocks of 2048, 16 heads of 4 groups, 4 x 1024 tokens, bf16")
def make_llama(device: torch.device, tiny: bool) -> Built:
    model, words = llama(device, tiny)
    return model.to(BF16), (ids(device, words, *((2, 16) if tiny else (4, 1024))),)


@program("llama_train", "4 blocks of 2048, 16 heads of 4 groups, 2 x 1024 tokens, autocast", "train")
def make_llama_train(device: torch.device, tiny: bool) -> Built:
    model, words = llama(device, tiny)
    shape = (2, 16) if tiny else (2, 1024)
    return TokenLoss(model), (ids(device, words, *shape), ids(device, words, *shape))


class LastHidden(nn.Module):
    """Token ids [B, T] and mask [B, T], or none, to the encoder's [B, T, H]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state


@program("bert", "BERT-base, 32 x 256 tokens, bf16")
def make_bert(device: torch.device, tiny: bool) -> Built:
    from transformers import BertConfig, BertModel

    size: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64} if tiny else {}
    with device:
        model = LastHidden(BertModel(BertConfig(num_hidden_layers=2 if tiny else 12, **size)))
    batch, length = (2, 16) if tiny else (32, 256)
    lengths = torch.linspace(length // 2, length, batch, device=device).long()
    mask = (torch.arange(length, device=device)[None, :] < lengths[:, None]).long()
    return model.to(BF16), (ids(device, 30000, batch, length), mask)


@program("bert_whole", "BERT-base, 32 x 256 tokens, no padding, bf16")
def make_bert_whole(device: torch.device, tiny: bool) -> Built:
    """The library makes a mask that is all true where it is compiled, and none where it runs eagerly."""
    model, (tokens, _) = make_bert(device, tiny)
    return model, (tokens, None)


@program("vit_b16", "transformers' ViT-B/16, 12 layers of 768, 32 x 3 x 224 x 224, bf16")
def make_vit_b16(device: torch.device, tiny: bool) -> Built:
    from transformers import ViTConfig, ViTModel

    size: dict[str, Any] = (
        {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
        if tiny
        else {}
    )
    with device:
        model = FirstResult(ViTModel(ViTConfig(num_hidden_layers=2 if tiny else 12, **size), add_pooling_layer=False))
    images = torch.randn(*((2, 3, 32, 32) if tiny else (32, 3, 224, 224)), device=device, dtype=BF16)
    return model.to(BF16).eval(), (images,)


@program("wav2vec2", "transformers' wav2vec 2.0 base, 12 layers of 768, 8 x 10 s, bf16")
def make_wav2vec2(device: torch.device, tiny: bool) -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    size: dict[str, Any] = (
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "conv_dim": (32,) * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        }
        if tiny
        else {}
    )
    with device:
        model = FirstResult(Wav2Vec2Model(Wav2Vec2Config(num_hidden_layers=2 if tiny else 12, **size)))
    sounds = torch.randn(*((2, 4000) if tiny else (8, 160000)), device=device, dtype=BF16)
    return model.to(BF16).eval(), (sounds,)


class FirstResult(nn.Module):
    """An encoder's last hidden state."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).last_hidden_state


class ViT(nn.Module):
    """Images [B, 3, H, W] to 1000 logits through patches and pre-norm encoder layers (Dosovitskiy et al. 2020)."""

    def __init__(self, layers: int, wide: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, wide, patch, patch)
        self.first = nn.Parameter(torch.randn(1, 1, wide))
        self.places = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, wide))
        self.blocks = nn.ModuleList(ViTBlock(wide, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ViTBlock(nn.Module):
    """Attention and a GELU layer, each behind a layer norm."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.qkv, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@program("vit", "6 layers of 768, 64 x 3 x 224 x 224, patches of 16, bf16")
def make_vit(device: torch.device, tiny: bool) -> Built:
    with device:
        model = ViT(2, 32, 2, 32, 8) if tiny else ViT(6, 768, 12, 224, 16)
    return model.to(BF16), (torch.randn(*((2, 3, 32, 32) if tiny else (64, 3, 224, 224)), device=device, dtype=BF16),)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm and a shortcut (He et al. 2015, figure 5 right)."""

    def __init__(self, wide_in: int, wide: int, stride: int) -> None:
        super().__init__()
        out = 4 * wide
        self.conv1, self.norm1 = nn.Conv2d(wide_in, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.norm2 = nn.Conv2d(wide, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv3, self.norm3 = nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or wide_in != out:
            self.shortcut = nn.Sequential(nn.Conv2d(wide_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [B, 3, H, W] to 1000 logits; ResNet-50 with 3, 4, 6 and 3 blocks from 64 channels."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), first: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        wide_in, blocks = first, []
        for level, depth in enumerate(depths):
            wide = first << level
            for k in range(depth):
                blocks.append(Bottleneck(wide_in, wide, 2 if level and not k else 1))
                wide_in = 4 * wide
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(wide_in, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet(device: torch.device, tiny: bool, batch: int) -> tuple[nn.Module, Tensor]:
    """The model and its images, both channels-last."""
    with device:
        model = ResNet((1, 1), 8) if tiny else ResNet()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    images = torch.randn(*((2, 3, 32, 32) if tiny else (batch, 3, 224, 224)), device=device)
    last = torch.channels_last
    return model.to(memory_format=last), images.contiguous(memory_format=last)  # type: ignore[call-overload]


@program("resnet50", "64 x 3 x 224 x 224, channels-last, bf16")
def make_resnet(device: torch.device, tiny: bool) -> Built:
    model, images = resnet(device, tiny, 64)
    return model.to(BF16), (images.to(BF16),)


@program("resnet50_train", "32 x 3 x 224 x 224, channels-last, batch norm in training, autocast", "train")
def make_resnet_train(device: torch.device, tiny: bool) -> Built:
    model, images = resnet(device, tiny, 32)
    return ClassLoss(model), (images, ids(device, 1000, images.shape[0]))


@program("unet_train", "two levels from 64 channels, 16 x 3 x 128 x 128, autocast", "train")
def make_unet(device: torch.device, tiny: bool) -> Built:
    shape = (2, 3, 16, 16) if tiny else (16, 3, 128, 128)
    with device:
        model = MeanSquare(UNet(8 if tiny else 64))
    return model, (torch.randn(*shape, device=device), torch.randn(*shape, device=device))


@program("adamw", "200 tensors of 1024 to 4 M elements, 215 M in all, float32, foreach", "optimizer")
def make_adamw(device: torch.device, tiny: bool) -> Built:
    wide = 8 if tiny else 1024
    shapes = [(wide, wide), (wide,), (wide,), (2 * wide, wide), (wide, wide, 1, 1)] * (2 if tiny else 40)
    if not tiny:
        shapes[::25] = [(4 * wide, wide)] * len(shapes[::25])
    parameters = [nn.Parameter(torch.randn(s, device=device)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer: Any = torch.optim.AdamW(parameters, 1e-3, foreach=True, capturable=device.type == "cuda")
    return optimizer, ()


@program("small_mlp", "4 layers of 64, 16 rows, float32", launch=True)
def make_mlp(device: torch.device, tiny: bool) -> Built:
    with device:
        layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(*layers), (torch.randn(16, 64, device=device),)


def chain(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(8):
        x = torch.tanh(x * y + 1.0) - y.sigmoid()
    return x


@program("chain_8", "32 operators on 8 elements, float32", launch=True)
def make_chain(device: torch.device, tiny: bool) -> Built:
    return chain, (torch.randn(8, device=device), torch.randn(8, device=device))


@program("lstm_loop", "24 steps, 16 x 64 to 128, float32", launch=True)
def make_lstm(device: torch.device, tiny: bool) -> Built:
    with device:
        model = LSTMLoop(8, 16) if tiny else LSTMLoop()
    return model, (torch.randn(*((3, 2, 8) if tiny else (24, 16, 64)), device=device),)


@program("lstm_train", "24 steps, 16 x 64 to 128, autocast", "train", launch=True)
def make_lstm_train(device: torch.device, tiny: bool) -> Built:
    with device:
        model = LSTMLoop(8, 16) if tiny else LSTMLoop()
    given, wanted = ((3, 2, 8), (3, 2, 16)) if tiny else ((24, 16, 64), (24, 16, 128))
    return MeanSquare(model), (torch.randn(*given, device=device), torch.randn(*wanted, device=device))


def matrix(device: torch.device, *shape: int) -> Tensor:
    """Of bfloat16, scaled so that products of it stay near 1."""
    return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(BF16)


@program("linear_gelu", "8192 x 4096 to 16384, bf16")
def make_linear_gelu(device: torch.device, tiny: bool) -> Built:
    rows, wide = (8, 16) if tiny else (8192, 4096)
    x, w, b = (matrix(device, *s) for s in ((rows, wide), (4 * wide, wide), (4 * wide,)))
    return lambda x, w, b: F.gelu(F.linear(32.0 * x, w, b)), (x, w, b)


@program("linear_residual", "32768 x 4096 to 4096, bias, residual, result in float32, bf16")
def make_linear_residual(device: torch.device, tiny: bool) -> Built:
    rows, wide = (8, 16) if tiny else (32768, 4096)
    x, w, b, r = (matrix(device, *s) for s in ((rows, wide), (wide, wide), (wide,), (rows, wide)))
    return residual, (x, w, b, r)


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = F.linear(x, w, b) + r
    return y.to(torch.promote_types(y.dtype, torch.float32))


def dequantized(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return x @ (w.to(x.dtype) * scale).t()


@program("int8_linear", "4096 x 4096 to 16384, weight in int8 with a scale a row, bf16")
def make_int8(device: torch.device, tiny: bool) -> Built:
    rows, wide = (8, 16) if tiny else (4096, 4096)
    w = torch.randint(-127, 128, (4 * wide, wide), device=device, dtype=torch.int8)
    return dequantized, (matrix(device, rows, wide), w, matrix(device, 4 * wide, 1) / 64)


@program("int8_few_rows", "16 x 4096 to 16384, weight in int8 with a scale a row, GELU, bf16")
def make_int8_few_rows(device: torch.device, tiny: bool) -> Built:
    rows, wide = (4, 32) if tiny else (16, 4096)
    w = torch.randint(-127, 128, (4 * wide, wide), device=device, dtype=torch.int8)
    return activated, (matrix(device, rows, wide), w, matrix(device, 4 * wide, 1) / 64)


def activated(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.gelu(dequantized(x, w, scale))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.125, -1)


@program("bmm_softmax", "256 products of 1024 x 64 x 1024, scale, softmax, bf16")
def make_bmm(device: torch.device, tiny: bool) -> Built:
    shape = (2, 16, 8) if tiny else (256, 1024, 64)
    return scores, (torch.randn(*shape, device=device).to(BF16), torch.randn(*shape, device=device).to(BF16))
