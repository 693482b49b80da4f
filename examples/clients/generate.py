"""transformers: `generate` of a small Llama with a static cache and `CompileConfig(backend="opforge")`."""

import torch
from client import need, run
from torch import Tensor

transformers = need("transformers")


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """24 tokens after prompts of 8 and of 11 tokens, with the logits of each."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    options = {}
    if backend is not None:
        options["compile_config"] = transformers.CompileConfig(backend=backend)
        options["compile_config"]._compile_all_devices = True  # else transformers compiles on accelerators only
    results = {}
    for length in (8, 11):
        prompt = torch.randint(3, 128, (2, length))
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        results |= {f"tokens {length}": out.sequences, f"logits {length}": torch.stack(out.logits)}
    return results


if __name__ == "__main__":
    run("transformers", "generate, static cache", program)
