"""One module a kind of target: its `config.json` and its tensor names, both ways. See `common`."""

from dflash_jax.checkpoints.families import deepseek, dense, gemma, gpt_oss, llama4, mixtral, qwen_moe, qwen_next

_MODULES = (
    dense,
    mixtral,
    qwen_moe,
    deepseek,
    gpt_oss,
    gemma,
    qwen_next,
    llama4,
)
# model_type -> module; a module serves the model types of its DEFAULTS.
FAMILIES = {model_type: module for module in _MODULES for model_type in module.DEFAULTS}
# Multimodal model_type -> the model type of its decoder, which is read alone.
WRAPPERS = {**gemma.WRAPPERS, **qwen_next.WRAPPERS, **llama4.WRAPPERS}

# Relatives that look alike and are not: why they are refused.
REFUSED = {
    "deepseek_v32": "its sparse attention (an indexer that chooses keys) is not supported",
    "deepseek_v4": "its attention is not supported",
    "gemma": "the first Gemma is not supported; Gemma 2, 3 and 4 are",
    "gemma3n": "its per-layer embeddings and alternating updates are not supported",
    "gemma3n_text": "its per-layer embeddings and alternating updates are not supported",
    "gemma4_unified": "Gemma 4's unified multimodal model is not supported; its text siblings are (gemma4)",
}
