"""The training loss written the slow and obvious way: one anchor and one slot at a time, whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.models.layers import rope_table


def one_block(drafter, shared, token_S, taps_SxTD, anchor: int, block_size: int):
    """Normed states [K, D] of one block: softmax over an explicit list of visible keys for each slot."""
    config = drafter.config
    feature = drafter.fuse(taps_SxTD[None, :anchor])  # nothing at or behind the anchor exists
    token_K = jnp.asarray([int(token_S[anchor])] + [config.mask_token_id] * (block_size - 1))
    x = drafter.embed(shared, token_K[None])

    def rope(positions):
        return rope_table(config.rope, config.head_dim, jnp.asarray(positions, jnp.int32)[None])

    block_positions = [anchor + o for o in range(block_size)]
    for layer in drafter.layers:
        attention = layer.attention
        u = layer.attention_norm(x)
        q = attention.queries(u, rope(block_positions))[0]  # [K, N, H]
        k_block, v_block = (y[0] for y in attention.keys_values(u, rope(block_positions)))  # [G, K, H]
        if anchor:
            k_context, v_context = (y[0] for y in attention.keys_values(feature, rope(range(anchor))))

        def by_query_head(x_GxPxH):
            return jnp.repeat(x_GxPxH, config.num_heads // config.num_kv_heads, axis=0)

        slots = []
        for o in range(block_size):
            context = [p for p in range(anchor) if attention.window is None or anchor + o - p < attention.window]
            own = [
                j for j in range(block_size)
                if not (attention.causal and j > o) and (attention.window is None or abs(o - j) < attention.window)
            ]  # fmt: skip
            keys, values = k_block[:, np.asarray(own)], v_block[:, np.asarray(own)]
            if context:
                keys = jnp.concatenate([k_context[:, np.asarray(context)], keys], axis=1)
                values = jnp.concatenate([v_context[:, np.asarray(context)], values], axis=1)
            weights = jax.nn.softmax(jnp.einsum("nh,nph->np", q[o], by_query_head(keys)) * attention.scale, axis=-1)
            slots.append(jnp.einsum("np,nph->nh", weights, by_query_head(values)))
        x = layer.finish(x, jnp.stack(slots)[None])
    return drafter.norm(x)[0]


def loss(
    graphdef, params, shared, batch, anchors, block_size, *, hard_weight, soft_weight, gamma, target_to_draft=None,
    teacher_softcap=None,
):  # fmt: skip
    """(sum of weighted losses, sum of weights) over `anchors`: {row: [anchor, ...]}."""
    drafter = nnx.merge(graphdef, params)
    total, weights = 0.0, 0.0
    for row, chosen in anchors.items():
        token_S, mask_S = np.asarray(batch["tokens_BxS"][row]), np.asarray(batch["loss_mask_BxS"][row])
        length = int(batch["length_B"][row])
        for anchor in chosen:
            hidden_KxD = one_block(drafter, shared, token_S, batch["taps_BxSxTD"][row], anchor, block_size)
            logits = drafter.logits(shared, hidden_KxD[None])[0]
            for o in range(1, block_size):
                position = anchor + o
                if position >= length or not mask_S[position]:
                    continue
                weight = 1.0 if gamma is None else float(np.exp(-(o - 1) / gamma))
                log_q = jax.nn.log_softmax(logits[o])
                teacher = jnp.dot(batch["hidden_BxSxD"][row, position - 1], shared.head_DxV)
                if teacher_softcap is not None:
                    teacher = teacher_softcap * jnp.tanh(teacher / teacher_softcap)
                log_p = jax.nn.log_softmax(teacher)
                kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q))
                label = int(token_S[position])
                label = label if target_to_draft is None else int(target_to_draft[label])
                hard = -log_q[label] if label >= 0 else 0.0
                total += weight * (hard_weight * hard + soft_weight * kl)
                weights += weight
    return total, weights
