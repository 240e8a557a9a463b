"""What made answers and features, as JSON: target, weights, tokenizer, template. A store is only continued alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.target import Target

_PROBE_TEXT = "def f(x: int = 10) -> str:\n    return 'a  b'  # naïve — ½ 東京 🙂\n"
_PROBE_CHAT = ({"role": "user", "content": "Hello?"},)


def fingerprint(
    target: Target,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that an answer depends on, as JSON: target, weights, dtype, tokenizer, template, sampling, limit."""
    rendering = {}
    if target.tokenizer is not None:
        rendering = rendering_fingerprint(target.tokenizer, chat_template_kwargs or {})
    return {
        **target_fingerprint(target),
        **rendering,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }


def target_fingerprint(target: Target) -> dict[str, Any]:
    """What makes two targets the same: source, weights, dtype and tokenizer."""
    return {
        "target": target.source,
        "weights": weights_digest(target.params),
        "dtype": jnp.dtype(target.dtype).name,
        "tokenizer": None if target.tokenizer is None else tokenizer_digest(target.tokenizer),
    }


def rendering_fingerprint(tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two renderings of one conversation the same: tokenizer, template and template arguments."""
    kwargs = dict(chat_template_kwargs)
    return {
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_digest(tokenizer, kwargs),
        "chat_template_kwargs": kwargs,
    }


def weights_digest(params: nnx.State) -> str:
    """A digest of parameters from the largest magnitude of each layer and of what lies outside the layers.

    It reads every weight once on the device and moves one number a layer to the host. Training of any kind changes
    it; how projections are fused or transposed in memory does not.
    """
    groups: dict[str, list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        if names[0].startswith("head"):
            continue  # a tied head may be kept as a copy of the table; a head of its own is trained with the rest
        groups.setdefault("/".join(names[:2]) if names[0] == "layers" else names[0], []).append(leaf)
    peaks = jax.device_get(_peaks(groups))
    text = json.dumps({name: f"{float(peak):.9g}" for name, peak in sorted(peaks.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@jax.jit
def _peaks(groups: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    def peak(leaves):
        return jnp.max(jnp.stack([jnp.max(jnp.abs(x.astype(jnp.float32))) for x in leaves]))

    return {name: peak(leaves) for name, leaves in groups.items()}


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of what the tokenizer does to a probe text with code, digits, spaces and several scripts."""
    return hashlib.sha256(json.dumps(_ids(tokenizer.encode(_PROBE_TEXT))).encode()).hexdigest()[:16]


def template_digest(tokenizer: Any, kwargs: Mapping[str, Any]) -> str:
    """A digest of how a probe conversation is rendered with these template arguments."""
    ids = tokenizer.apply_chat_template(list(_PROBE_CHAT), add_generation_prompt=True, **kwargs)
    return hashlib.sha256(json.dumps(ids if isinstance(ids, str) else _ids(ids)).encode()).hexdigest()[:16]


def _ids(ids: Iterable[int]) -> list[int]:
    return [int(i) for i in ids]
