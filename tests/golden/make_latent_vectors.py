"""Makes latent_*.npz: one attention layer of DeepSeek-V2 and of DeepSeek-V3, with random weights.

    python tests/golden/make_latent_vectors.py        (needs torch and transformers: pip install dflash_jax[parity])

Each file holds `config` (the config.json as text), `w.NAME` (weights under their Hugging Face names, float16),
`x` [T, D] and `out` [T, D] of one causal call over all T tokens. All computed in float32 with eager attention.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

NUM_TOKENS = 20
SIZES = {
    "vocab_size": 8,
    "hidden_size": 24,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,  # not that of the two inner norms
}
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 16}
LAYERS = {
    # Queries projected directly, plain rotary embedding.
    "deepseek_v2": (
        {"model_type": "deepseek_v2", "q_lora_rank": None, "rope_theta": 10000.0},
        DeepseekV2Config, DeepseekV2Attention, DeepseekV2RotaryEmbedding,
    ),
    # Queries with a latent of their own; YaRN scales the scores, and cos and sin besides (its two weights differ).
    "deepseek_v3": (
        {
            "model_type": "deepseek_v3",
            "q_lora_rank": 9,
            "rope_theta": 10000.0,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
        },
        DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding,
    ),
}  # fmt: skip


def make(fields: dict, config_class: type, layer_class: type, rope_class: type, seed: int) -> dict[str, np.ndarray]:
    """Runs one random layer."""
    generator = torch.Generator().manual_seed(seed)
    fields = {**SIZES, **fields}
    config = config_class(**json.loads(json.dumps(fields)))
    config._attn_implementation = "eager"
    layer = layer_class(config, 0).float().eval()
    with torch.no_grad():
        for key, weight in layer.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            value = 1 + 0.3 * noise if "layernorm" in key else 2 * noise * weight.shape[-1] ** -0.5
            weight.copy_(value.half().float())  # exact in float16, so that half the bytes are enough
        x = torch.randn((1, NUM_TOKENS, config.hidden_size), generator=generator)
        position = torch.arange(NUM_TOKENS)[None]
        mask = torch.full((NUM_TOKENS, NUM_TOKENS), float("-inf")).triu(1)[None, None]
        out, weights = layer(x, position_embeddings=rope_class(config)(x, position), attention_mask=mask)
        assert 0.1 < weights[..., 10:, :].max(-1).values.mean() < 0.9  # neither uniform nor all on one key
    return {
        "config": np.array(json.dumps(fields)),
        **{f"w.{key}": value.numpy().astype(np.float16) for key, value in layer.state_dict().items()},
        "x": x[0].numpy(),
        "out": out[0].numpy(),
    }


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    here = pathlib.Path(__file__).parent
    for seed, (name, case) in enumerate(LAYERS.items()):
        arrays = make(*case, seed)
        path = here / f"latent_{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {path.stat().st_size} bytes, outputs over a range of {np.ptp(arrays['out']):.2f}")


if __name__ == "__main__":
    main()
