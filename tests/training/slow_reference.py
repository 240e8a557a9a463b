"""The training loss written the slow and obvious way: one anchor and one slot at a time, whole logits, python loops."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.models.layers import rope_table
from dflash_jax.training.objectives import LossConfig


def one_block(drafter, shared, token_S, taps_SxTD, anchor: int, block_size: int):
    """What the head reads [K, E] of one block: softmax over an explicit list of visible keys for each slot."""
    config = drafter.config
    feature = drafter.fuse(taps_SxTD[None, :anchor])  # nothing at or behind the anchor exists
    masks = jnp.full(block_size - 1, config.mask_token_id)
    token_K = jnp.concatenate([jnp.asarray(token_S)[anchor : anchor + 1], masks])
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
    return drafter.for_head(x)[0]


def slot_objective(name: str, logit_U, teacher_V, id_U, label):
    """One objective at one slot, by its definition: laws as vectors over the target's whole vocabulary.

    Args:
      teacher_V: the target's logits over its vocabulary. id_U: target id of each draft id. label: draft id, or -1.
    """
    log_q_U = jax.nn.log_softmax(logit_U)
    if name == "hard":
        return jnp.where(label >= 0, -log_q_U[jnp.maximum(label, 0)], 0.0)
    p_V = jax.nn.softmax(teacher_V)
    inside_U = p_V[id_U] / p_V[id_U].sum()
    q_U = jnp.exp(log_q_U)
    q_V = jnp.zeros_like(p_V).at[id_U].set(q_U)
    match name:
        case "forward_kl":
            return jnp.sum(inside_U * (jnp.log(inside_U) - log_q_U))
        case "reverse_kl":
            return jnp.sum(q_U * (log_q_U - jnp.log(inside_U)))
        case "total_variation":
            return jnp.abs(p_V - q_V).sum() / 2
        case "acceptance":
            return -jnp.log(jnp.minimum(p_V, q_V).sum())


def slot_weights(config: LossConfig, probability, counts) -> list:
    """Weights of a block's slots. probability: of each label, by the drafter. counts: which slots are supervised."""
    slots, smoothed = range(len(counts)), [(1 - config.dpace_alpha) * q + config.dpace_alpha for q in probability]

    def accepted(first, last):
        """The chance that all supervised slots from first to last are right."""
        product = 1.0
        for i in range(first, last + 1):
            product = product * (smoothed[i] if counts[i] else 1.0)
        return product

    def weight(j):
        match config.weighting:
            case "uniform":
                return 1.0
            case "decay":  # gamma given
                return float(np.exp(-j / config.gamma))
            case "dpace":
                return sum(accepted(0, m) for m in slots if m >= j and counts[m])
            case "dpace_confidence":
                return accepted(0, j)
            case "dpace_continuation":
                return sum(accepted(j + 1, m) for m in slots if m >= j and counts[m])

    return [weight(j) if counts[j] else 0.0 for j in slots]


def block_terms(
    graphdef, params, shared, head_DxV, row, anchor: int, counts: tuple[bool, ...], config: LossConfig,
    teacher_softcap=None,
):  # fmt: skip
    """(weighted loss, denominator) of one block.

    Args:
      shared: what the drafter reads; head_DxV: the target's head over its whole vocabulary.
      row: {name: array} of one row: tokens_S, label_S (draft ids), taps_SxTD, hidden_SxD.
      counts: for each of the slots 1 .. K-1, whether it is supervised.
    """
    drafter = nnx.merge(graphdef, params)
    hidden_KxE = one_block(drafter, shared, row["tokens_S"], row["taps_SxTD"], anchor, len(counts) + 1)
    before_K = None
    if drafter.markov is not None:
        before_K = row["tokens_S"][jnp.asarray([anchor - 1 + o for o in range(len(counts) + 1)])]
        shared = shared.replace(markov_RxV=drafter.markov.columns(shared.draft_to_target_V))
    logits_KxU = drafter.logits(shared, hidden_KxE[None], None if before_K is None else before_K[None])[0]
    id_U = jnp.arange(head_DxV.shape[1]) if shared.draft_to_target_V is None else shared.draft_to_target_V
    probability, values = [], []
    for o, supervised in enumerate(counts, 1):
        if not supervised:
            probability.append(1.0)
            values.append(0.0)
            continue
        teacher_V = row["hidden_SxD"][anchor + o - 1] @ head_DxV
        if teacher_softcap is not None:
            teacher_V = teacher_softcap * jnp.tanh(teacher_V / teacher_softcap)
        label = row["label_S"][anchor + o]
        value = sum(c * slot_objective(name, logits_KxU[o], teacher_V, id_U, label) for name, c in config.objective)
        q = jnp.where(label >= 0, jax.nn.softmax(logits_KxU[o])[jnp.maximum(label, 0)], 0.0)
        probability.append(jax.lax.stop_gradient(q))
        values.append(value)
    weights = slot_weights(config, probability, counts)
    by_block = config.weighting.startswith("dpace")
    return sum(w * v for w, v in zip(weights, values, strict=True)), 1.0 if by_block else sum(weights)


def blocks(batch, anchors, block_size):
    """(row number, anchor, counts) of every block with something to learn. anchors: {row: [anchor, ...]}."""
    for row, chosen in anchors.items():
        mask_S, length = np.asarray(batch["loss_mask_BxS"][row]), int(batch["length_B"][row])
        for anchor in chosen:
            slots = range(anchor + 1, anchor + block_size)
            yield row, anchor, tuple(bool(p < length and mask_S[p]) for p in slots)


def row_of(batch, row, target_to_draft=None):
    """A row as `block_terms` takes it."""
    token_S = jnp.asarray(batch["tokens_BxS"][row])
    return {
        "tokens_S": token_S, "label_S": token_S if target_to_draft is None else jnp.asarray(target_to_draft)[token_S],
        "taps_SxTD": jnp.asarray(batch["taps_BxSxTD"][row]), "hidden_SxD": jnp.asarray(batch["hidden_BxSxD"][row]),
    }  # fmt: skip


def loss_and_gradient(
    graphdef, params, shared, head_DxV, batch, anchors, block_size, config, target_to_draft=None, teacher_softcap=None
):
    """(sum of weighted losses, denominator, gradient of the sum), block after block."""

    def terms(params, row, anchor, counts):
        return block_terms(graphdef, params, shared, head_DxV, row, anchor, counts, config, teacher_softcap)

    # Compiled once for blocks of the same anchor and length, of whatever row; and not optimised: that takes longest.
    plain = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    one = jax.jit(jax.value_and_grad(terms, has_aux=True), static_argnums=(2, 3), compiler_options=plain)
    total, denominator, gradient = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
    for row, anchor, counts in blocks(batch, anchors, block_size):
        (value, weight), part = one(params, row_of(batch, row, target_to_draft), anchor, counts)
        total, denominator = total + float(value), denominator + float(weight)
        gradient = jax.tree.map(jnp.add, gradient, part)
    return total, denominator, gradient
