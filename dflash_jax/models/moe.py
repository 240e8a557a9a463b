"""Mixture of experts: routing, the chosen experts' products, the shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from dflash_jax import sharding
from dflash_jax.config import ConfigError, MoeConfig, TargetConfig
from dflash_jax.kernels import dispatch
from dflash_jax.kernels.expert_matmul import expert_matmul
from dflash_jax.models.layers import GatedMLP, dense, gated, param


class MoE(nnx.Module):
    """Each token goes through the experts that its router chose, and through the shared expert if there is one.

    Experts lie on the mesh axis of "experts" and their inner channels on that of "mlp". A device computes what
    its part of its experts gives to its tokens, and one sum over both axes makes the result. No token is ever
    dropped: shapes are static because each device has room for all its tokens' choices.
    """

    def __init__(self, config: TargetConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        moe = config.moe
        if moe is None:
            raise ConfigError("moe is None: this target has no experts")
        d, e, f = config.hidden_size, moe.num_experts, moe.intermediate_size
        # Every device chooses among all experts: the router is not cut over them.
        self.router_DxE = param(rngs, (d, e), ("embed", None), dtype, d)
        self.router_bias_E = param(rngs, (e,), (None,), dtype, 0) if moe.router_bias else None
        self.selection_bias_E = param(rngs, (e,), (None,), jnp.float32, 0) if moe.selection_bias else None
        self.gate_up_Ex2xDxF = param(rngs, (e, 2, d, f), ("experts", None, "embed", "mlp"), dtype, d)
        self.down_ExFxD = param(rngs, (e, f, d), ("experts", "mlp", "embed"), dtype, f)
        has_bias = moe.expert_bias
        self.gate_up_bias_Ex2xF = param(rngs, (e, 2, f), ("experts", None, "mlp"), dtype, 0) if has_bias else None
        self.down_bias_ExD = param(rngs, (e, d), ("experts", "embed"), dtype, 0) if has_bias else None
        shared = moe.shared_intermediate_size
        self.shared = (
            GatedMLP(d, shared, False, dtype, rngs, config.activation, config.activation_limit) if shared else None
        )
        has_gate = shared and moe.shared_gate
        self.shared_gate_Dx1 = param(rngs, (d, 1), ("embed", None), dtype, d) if has_gate else None
        self.moe = moe
        self.activation, self.limit = config.activation, config.activation_limit

    def __call__(self, x_BxMxD: jax.Array) -> jax.Array:
        out_BxMxD = self._routed(x_BxMxD).astype(x_BxMxD.dtype)
        if self.shared is not None:
            shared_BxMxD = self.shared(x_BxMxD)
            if self.shared_gate_Dx1 is not None:
                shared_BxMxD *= jax.nn.sigmoid(dense(x_BxMxD, self.shared_gate_Dx1[...]))
            out_BxMxD += shared_BxMxD
        return out_BxMxD

    def _routed(self, x_BxMxD: jax.Array) -> jax.Array:
        """The experts' weighted sum, float32, each device of the surrounding mesh doing its part."""
        names = (
            "router_DxE", "router_bias_E", "selection_bias_E", "gate_up_Ex2xDxF", "gate_up_bias_Ex2xF",
            "down_ExFxD", "down_bias_ExD",
        )  # fmt: skip
        variables = {name: getattr(self, name) for name in names}
        weights = {name: variable[...] for name, variable in variables.items() if variable is not None}
        mesh = dispatch.context_mesh(None)
        if not dispatch.needs_mapping(mesh):
            return self._part(x_BxMxD, weights)

        def spec(name: str) -> P:
            # Weights come whole along "embed": what fsdp cut is gathered here.
            axes = [None if axis == "embed" else axis for axis in variables[name].get_metadata("axes")]
            return sharding.partition_spec(mesh, axes, weights[name].shape)

        expert_axes, inner_axes = spec("down_ExFxD")[:2]
        summed = axis_names(expert_axes) + axis_names(inner_axes)

        def body(x_BxMxD, weights):
            out_BxMxD = self._part(x_BxMxD, weights, axis_names(expert_axes), axis_names(inner_axes))
            return jax.lax.psum(out_BxMxD, summed) if summed else out_BxMxD

        rows = P(dispatch.mesh_axis(mesh, "batch", x_BxMxD.shape[0]))
        return jax.shard_map(
            body, mesh=mesh, in_specs=(rows, {name: spec(name) for name in weights}), out_specs=rows,
            check_vma=False,  # a loop over tiles starts with zeros, which vary over no axis
        )(x_BxMxD, weights)  # fmt: skip

    def _part(
        self, x_BxMxD: jax.Array, weights: dict[str, jax.Array], expert_axes: tuple[str, ...] = (),
        inner_axes: tuple[str, ...] = (),
    ) -> jax.Array:  # fmt: skip
        """What the experts in `weights` give to the tokens, float32.

        `expert_axes` and `inner_axes` are the mesh axes that experts and their inner channels are cut along; the
        results of all devices along them have to be added.
        """
        b, m, d = x_BxMxD.shape
        x_TxD, k = x_BxMxD.reshape(b * m, d), self.moe.experts_per_token
        weight_TxK, expert_TxK = self._route(x_TxD, weights)

        gate_up_Ex2xDxF, down_ExFxD = weights["gate_up_Ex2xDxF"], weights["down_ExFxD"]
        e, f = down_ExFxD.shape[:2]
        # One row a choice, sorted by expert. Choices of other devices' experts go to the end, as expert e.
        first = jax.lax.axis_index(expert_axes) * e if expert_axes else 0
        expert_R = expert_TxK.reshape(-1) - first
        expert_R = jnp.where((expert_R >= 0) & (expert_R < e), expert_R, e)
        order_R = jnp.argsort(expert_R, stable=True)
        count_E = (expert_R[:, None] == jnp.arange(e, dtype=jnp.int32)[None]).sum(0, dtype=jnp.int32)
        x_RxD, weight_R, expert_R = x_TxD[order_R // k], weight_TxK.reshape(-1)[order_R], expert_R[order_R]
        mine_R = expert_R < e
        if self.moe.weigh_input:
            x_RxD = (x_RxD * weight_R[:, None]).astype(x_TxD.dtype)

        # Gates and ups as 2 E experts, of which every other one has no rows. As columns of one product they would
        # have to be laid side by side first: on TPUs, a copy of all experts' weights at every call.
        both_2ExDxF, none_E = gate_up_Ex2xDxF.reshape(2 * e, d, f), jnp.zeros_like(count_E)
        h_Rx2xF = jnp.stack(
            [
                expert_matmul(x_RxD, both_2ExDxF, jnp.stack(counts, axis=1).reshape(-1)).astype(x_TxD.dtype)
                for counts in ((count_E, none_E), (none_E, count_E))
            ],
            axis=1,
        )
        if "gate_up_bias_Ex2xF" in weights:
            h_Rx2xF += weights["gate_up_bias_Ex2xF"].at[expert_R].get(mode="clip")
        inner_RxF = gated(h_Rx2xF[:, 0], h_Rx2xF[:, 1], self.activation, self.limit)
        y_RxD = expert_matmul(inner_RxF, down_ExFxD, count_E)
        if "down_bias_ExD" in weights:
            counted_R = mine_R & (jax.lax.axis_index(inner_axes) == 0) if inner_axes else mine_R
            bias_RxD = weights["down_bias_ExD"].at[expert_R].get(mode="clip").astype(jnp.float32)
            y_RxD += jnp.where(counted_R[:, None], bias_RxD, 0.0)
        if not self.moe.weigh_input:
            y_RxD *= weight_R[:, None]
        return y_RxD[jnp.argsort(order_R)].reshape(b, m, k, d).sum(2)

    def _route(self, x_TxD: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits_TxE = jnp.dot(
            x_TxD.astype(jnp.float32), weights["router_DxE"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        if "router_bias_E" in weights:
            logits_TxE += weights["router_bias_E"].astype(jnp.float32)[None]
        return route(logits_TxE, weights.get("selection_bias_E"), self.moe)


def route(
    logits_TxE: jax.Array, selection_bias_E: jax.Array | None, moe: MoeConfig
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(weights [T, K] float32, experts [T, K] int32) of each token, best first; of equals, the lower id.

    See `MoeConfig` for the rules. Sources: DeepSeek-V2 (section 2.1.2) and DeepSeek-V3 (section 2.1.2) for
    groups and the selection bias.
    """
    t, e = logits_TxE.shape
    score_TxE = jax.nn.softmax(logits_TxE) if moe.scoring == "softmax" else jax.nn.sigmoid(logits_TxE)
    choice_TxE = score_TxE if selection_bias_E is None else score_TxE + selection_bias_E[None]
    if moe.num_groups > 1:
        members = e // moe.num_groups
        best_TxGxC, _ = jax.lax.top_k(
            choice_TxE.reshape(t, moe.num_groups, members), 1 if moe.group_score == "max" else min(2, members)
        )
        _, group_TxC = jax.lax.top_k(best_TxGxC.sum(-1), moe.groups_per_token)
        group_E = jnp.arange(e, dtype=jnp.int32) // members
        open_TxE = (group_TxC[:, :, None] == group_E[None, None]).any(1)
        choice_TxE = jnp.where(open_TxE, choice_TxE, -jnp.inf)
    _, expert_TxK = jax.lax.top_k(choice_TxE, moe.experts_per_token)
    weight_TxK = jnp.take_along_axis(score_TxE, expert_TxK, axis=-1)
    if moe.normalise:
        # The small number is for sigmoids, which may all be zero.
        weight_TxK /= weight_TxK.sum(-1, keepdims=True) + 1e-20
    return weight_TxK * moe.scale, expert_TxK


def axis_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
