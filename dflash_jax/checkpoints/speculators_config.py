"""`config.json` of DFlash drafters in vllm-project/speculators' format, and what that format can not say.

Differences from z-lab's format that matter:

- the transformer's fields are nested in `transformer_layer_config`;
- `aux_hidden_state_layer_ids` count Hugging Face hidden states, where 0 is the embedding: one more than a layer's id;
- the checkpoint has its own table (`embed_tokens.weight`) and head (`lm_head.weight`, a row an id of the draft
  vocabulary), and with a pruned vocabulary the buffers `d2t` (int64 offsets, target id = u + d2t[u]) and `t2d` (bool);
- full layers are two-sided within the block, sliding ones causal unless `sliding_window_non_causal`;
- it names the target, not how many layers that has, and knows no factors on embedding, output or logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.checkpoints.drafter_config import drafter_config_to_hf, own_modules
from dflash_jax.config import FULL, SLIDING, ConfigError, DrafterConfig, TargetConfig

VERSION = "0.9.0"  # of the package whose fields these are
_ALGORITHM = "dflash"
_ARCHITECTURE = "DFlashDraftModel"
_READ = ("DFlashDraftModel", "DFlashSpeculator")
# Of a z-lab config.json, what is not the transformer's.
_OUTSIDE = (
    "architectures", "auto_map", "block_size", "dflash_config", "dtype", "is_causal", "mask_token_id",
    "num_target_layers", "torch_dtype",
)  # fmt: skip
_QUANTISED = ("quantization_config", "compression_config")


def is_speculators(hf: Mapping[str, Any]) -> bool:
    """Whether a decoded config.json is of the speculators format."""
    return hf.get("speculators_model_type") is not None or "transformer_layer_config" in hf


def zlab_from_speculators(hf: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The same drafter as a z-lab config.json, for `drafter_config_from_hf`.

    The format has no factors on embedding and logits, so that a target's own are switched off.

    Args:
      hf: the decoded configuration.
      target: the target it drafts for: the format does not say how many layers that has.

    Raises:
      ConfigError: a field is missing, unknown, or asks for what is not supported.
    """
    method = hf.get("speculators_model_type")
    if method != _ALGORITHM:
        raise ConfigError(f"speculators_model_type is {method!r}, supported is {_ALGORITHM!r}")
    architectures = hf.get("architectures") or [_ARCHITECTURE]
    if not set(architectures) & set(_READ):
        raise ConfigError(f"architectures is {architectures!r}, supported are {', '.join(_READ)}")
    inner = hf.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise ConfigError(f"transformer_layer_config is {inner!r}, must be a mapping")
    hidden = hf.get("target_hidden_size")
    if hidden is not None and hidden != inner.get("hidden_size"):
        raise ConfigError(
            f"target_hidden_size is {hidden}, the drafter's hidden_size {inner.get('hidden_size')}: they must be equal"
        )
    if hf.get("sample_from_anchor"):
        raise ConfigError(
            "sample_from_anchor is true: slot k would predict the token after its position; supported is false"
        )
    ids = hf.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise ConfigError(f"aux_hidden_state_layer_ids is {ids!r}, must list the tapped hidden states")
    if 0 in ids:
        raise ConfigError("aux_hidden_state_layer_ids holds 0, the embedding itself; supported are outputs of layers")
    layers = inner.get("layer_types") or [FULL] * int(inner.get("num_hidden_layers") or 0)
    dflash: dict[str, Any] = {
        "block_size": hf.get("block_size"),
        "mask_token_id": hf.get("mask_token_id"),
        "target_layer_ids": [i - 1 for i in ids],
        "causal": False if hf.get("sliding_window_non_causal") and SLIDING in layers else None,
    }
    if target.embedding_scale != 1.0:
        dflash["input_embedding_scale"] = 1.0
    if target.final_logit_softcap is not None:
        dflash["final_logit_softcapping"] = 0.0
    fields = {name: value for name, value in inner.items() if name not in _OUTSIDE}
    quantised = {name: hf[name] for name in _QUANTISED if name in hf}  # refused by name with z-lab's own
    return {**fields, **quantised, "num_target_layers": target.num_layers, "dflash_config": dflash}


def speculators_config(
    config: DrafterConfig, dtype_name: str, draft_vocab_size: int, verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """The speculators config.json of a drafter.

    Args:
      config: bound to its target (`bind_to_target`).
      dtype_name: of the weights, such as "bfloat16".
      draft_vocab_size: ids that may be proposed; the vocabulary's size where all may.
      verifier: where engines find the target: a name on the hub or a directory.
      architectures: of the target's config.json.

    Raises:
      ConfigError: the drafter needs something that the format does not have; names the field.
    """
    refused = {
        **dict.fromkeys(own_modules(config), True),
        "embedding_scale": config.embedding_scale not in (None, 1.0),
        "output_multiplier": config.output_multiplier != 1.0,
        "final_logit_softcap": config.final_logit_softcap not in (None, 0.0),
        "causal": config.causal is True or (config.causal is False and SLIDING not in config.layer_types),
    }
    for field, set_here in refused.items():
        if set_here:
            raise ConfigError(
                f"{field} is {getattr(config, field)}, which the speculators format can not hold; export to zlab"
            )
    if config.num_target_layers - 1 in config.target_layer_ids:
        raise ConfigError(
            f"target_layer_ids holds the last layer ({config.num_target_layers - 1}), which the speculators format "
            "keeps for the target's own final state; export to zlab"
        )
    zlab = drafter_config_to_hf(config, dtype_name)
    greedy = {
        "proposal_type": "greedy", "speculative_tokens": config.block_size - 1, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": [_ARCHITECTURE],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": draft_vocab_size,
        "dtype": dtype_name,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.causal is False,
        "speculators_config": {
            "algorithm": _ALGORITHM,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": list(architectures), "name_or_path": verifier},
        },
        "speculators_model_type": _ALGORITHM,
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "transformer_layer_config": {name: value for name, value in zlab.items() if name not in _OUTSIDE},
    }
