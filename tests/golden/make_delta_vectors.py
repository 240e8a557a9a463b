"""Makes delta_*.npz: one Gated DeltaNet layer of Qwen3-Next and of Qwen3.5, with random weights.

    python tests/golden/make_delta_vectors.py         (needs torch and transformers: pip install dflash_jax[parity])

Each file holds `config` (sizes as JSON), `w.NAME` (weights under their Hugging Face names, float16; A_log float32),
`x` [T, D], `out` [T, D] of one call over all T tokens, `out_decoded` [T - PREFILLED, D] of the last tokens one at a
time behind a prefill of the others, and the state at the end: `state` [N, P, H] of every value head and `conv`
[channels, W - 1], the last inputs of the convolution. All computed in float32. T lies beyond one chunk of 64.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from transformers import DynamicCache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

NUM_TOKENS, PREFILLED = 70, 67
SIZES = {
    "hidden_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-5,
}
REST = {
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
    "hidden_act": "silu",
}
LAYERS = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
}


def make(config_class: type, layer_class: type, seed: int) -> dict[str, np.ndarray]:
    """Runs one random layer whole, and prefilled and decoded."""
    generator = torch.Generator().manual_seed(seed)
    config = config_class(**SIZES, **REST)
    layer = layer_class(config, 0).float().eval()
    with torch.no_grad():
        for key, weight in layer.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if key == "A_log":
                weight.copy_(noise)
                continue
            if key == "norm.weight":
                value = 1 + 0.3 * noise
            elif key == "dt_bias":
                value = noise - 1  # decays from weak to strong
            else:
                value = noise * weight.shape[-1] ** -0.5
            weight.copy_(value.half().float())  # exact in float16, so that half the bytes are enough
    x = torch.randn((1, NUM_TOKENS, SIZES["hidden_size"]), generator=generator)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        out = layer(x)
        layer(x[:, :PREFILLED], cache_params=cache)
        decoded = [layer(x[:, t : t + 1], cache_params=cache) for t in range(PREFILLED, NUM_TOKENS)]
    out_decoded = torch.cat(decoded, dim=1)
    torch.testing.assert_close(
        out_decoded, out[:, PREFILLED:], rtol=1e-4, atol=1e-5
    )  # the reference agrees with itself
    weights = {key: value.numpy() for key, value in layer.state_dict().items()}
    past = SIZES["linear_conv_kernel_dim"] - 1
    return {
        "config": np.array(json.dumps(SIZES)),
        **{f"w.{key}": value.astype(np.float32 if key == "A_log" else np.float16) for key, value in weights.items()},
        "x": x[0].numpy(),
        "out": out[0].numpy(),
        "out_decoded": out_decoded[0].numpy(),
        "state": cache.layers[0].recurrent_states[0][0].numpy(),
        "conv": cache.layers[0].conv_states[0][0, :, -past:].numpy(),
    }


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    here = pathlib.Path(__file__).parent
    for seed, (name, classes) in enumerate(LAYERS.items()):
        arrays = make(*classes, seed)
        path = here / f"delta_{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {path.stat().st_size} bytes, outputs over a range of {np.ptp(arrays['out']):.2f}")


if __name__ == "__main__":
    main()
