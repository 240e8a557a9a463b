"""Inputs and independent answers for the attention kernels' tests."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """Sizes and kinds of one `paged_block_attention` call.

    `pages` None is the contiguous layout, `value_dim` None that of the keys; `in_keys`: the values are the first
    value_dim channels of the keys.
    """

    batch: int = 2
    slots: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    pages: int | None = 3
    window: int | None = None
    visibility: str = "chain"
    lengths: tuple[int, ...] | None = None
    dtype: str = "float32"
    value_dim: int | None = None
    in_keys: bool = False
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def capacity(self) -> int:
        return self.page_size * (self.pages or 1)


def block_inputs(case: BlockCase, seed: int = 0) -> tuple[tuple, dict]:
    """(arrays, keywords) of the call: shuffled pages, one page more than is in use, random lengths."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    b, m, g, h = case.batch, case.slots, case.kv_heads, case.head_dim
    value_dim = 0 if case.in_keys else case.value_dim or h
    table = None
    num_pages = b
    if case.pages is not None:
        num_pages = b * case.pages + 1
        table = jnp.asarray(rng.permutation(num_pages)[: b * case.pages].reshape(b, -1), jnp.int32)
    lengths = case.lengths if case.lengths is not None else rng.integers(0, case.capacity + 1, b)
    length_B = jnp.asarray(lengths, jnp.int32)
    visibility = {
        "chain": np.tril(np.ones((m, m), bool)),
        "full": np.ones((m, m), bool),
        "tree": tree_visibility(rng, b, m),
    }[case.visibility]
    arrays = (
        normal(b, m, g * case.group, h),
        normal(num_pages, g, case.page_size, h), normal(num_pages, g, case.page_size, value_dim), table,
        normal(b, g, m, h), normal(b, g, m, value_dim),
    )  # fmt: skip
    keywords = {
        "length_B": length_B,
        "position_BxM": length_B[:, None] + jnp.arange(m, dtype=jnp.int32)[None],
        "visibility": jnp.asarray(visibility),
        "window": case.window,
        "scale": h**-0.5,
        "chunk": case.chunk,
        "softcap": case.softcap,
        "sinks_N": 2 * normal(g * case.group) if case.sinks else None,
        "values_in_keys": case.value_dim if case.in_keys else None,
    }
    return arrays, keywords


def tree_visibility(rng: np.random.Generator, batch: int, slots: int) -> np.ndarray:
    """[B, M, M]: ancestors of random trees, one a row; every slot sees itself."""
    visibility = np.zeros((batch, slots, slots), bool)
    for row in visibility:
        for slot in range(slots):
            if slot:
                row[slot] = row[rng.integers(slot)]
            row[slot, slot] = True
    return visibility


def block_oracle(arrays: tuple, keywords: dict) -> np.ndarray:
    """The same attention in float64 numpy, row by row, head by head, slot by slot."""
    q, k_pages, v_pages, table, k_block, v_block = (None if x is None else np.asarray(x, np.float64) for x in arrays)
    length, position = np.asarray(keywords["length_B"]), np.asarray(keywords["position_BxM"])
    window, chunk, cap, sinks_N = (keywords[name] for name in ("window", "chunk", "softcap", "sinks_N"))
    if keywords["values_in_keys"]:
        v_pages, v_block = (x[..., : keywords["values_in_keys"]] for x in (k_pages, k_block))
    b, m, n, _ = q.shape
    visibility = np.broadcast_to(np.asarray(keywords["visibility"]), (b, m, m))
    group = n // k_block.shape[1]
    out = np.zeros((b, m, n, v_block.shape[-1]))
    for i in range(b):
        pages = [i] if table is None else [int(p) for p in table[i]]
        key_position = np.concatenate([np.arange(length[i]), position[i]])
        for head in range(n):
            g = head // group
            k_all = np.concatenate([np.concatenate([k_pages[p, g] for p in pages])[: length[i]], k_block[i, g]])
            v_all = np.concatenate([np.concatenate([v_pages[p, g] for p in pages])[: length[i]], v_block[i, g]])
            for slot in range(m):
                seen = np.concatenate([np.ones(length[i], bool), visibility[i, slot]])
                if window is not None:
                    seen &= position[i, slot] - key_position < window
                if chunk is not None:
                    seen &= position[i, slot] // chunk == key_position // chunk
                scores = k_all[seen] @ q[i, slot, head] * keywords["scale"]
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                if sinks_N is not None:
                    scores = np.append(scores, np.float64(sinks_N[head]))
                if len(scores):
                    weights = np.exp(scores - scores.max())
                    out[i, slot, head] = (weights / weights.sum())[: seen.sum()] @ v_all[seen]
    return out


@dataclasses.dataclass(frozen=True)
class AnchorCase:
    """Sizes and kinds of one `anchor_attention` call."""

    batch: int = 2
    anchors: int = 5
    slots: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    context: int = 50
    window: int | None = None
    causal: bool = False
    packed: bool = False
    dtype: str = "float32"


def anchor_inputs(case: AnchorCase, seed: int = 0) -> tuple[tuple[jax.Array, ...], dict]:
    """(q, context k and v, block k and v), keywords. Anchor 0, the last row and a padding block are among them."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    b, a, k, g, h, s = case.batch, case.anchors, case.slots, case.kv_heads, case.head_dim, case.context
    anchor = rng.integers(0, s, (b, a))
    anchor[0, :2] = 0, s - 1
    keep = np.ones((b, a), bool)
    keep[-1, -1] = False
    document = np.sort(rng.integers(0, 3, (b, s)), axis=1) if case.packed else None
    arrays = (
        normal(b, a, k, g * case.group, h), normal(b, g, s, h), normal(b, g, s, h),
        normal(b, a, g, k, h), normal(b, a, g, k, h),
    )  # fmt: skip
    visibility = np.tril(np.ones((k, k), bool)) if case.causal else np.ones((k, k), bool)
    keywords = {
        "anchor_BxA": jnp.asarray(anchor, jnp.int32),
        "keep_BxA": jnp.asarray(keep),
        "visibility_KxK": jnp.asarray(visibility),
        "window": case.window,
        "scale": h**-0.5,
        "document_BxS": None if document is None else jnp.asarray(document, jnp.int32),
    }
    return arrays, keywords
