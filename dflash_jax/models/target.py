"""A loaded target: what `load_target` returns and everything else takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import TargetConfig
from dflash_jax.models.transformer import Transformer


@dataclasses.dataclass
class Target:
    """A target model with its weights and its text side.

    Attributes:
      config: the architecture.
      graphdef: the model without its parameters (static, hashable): `nnx.merge(graphdef, params)` inside jit.
      params: parameters, an `nnx.State`, laid out on `mesh` when there is one.
      tokenizer: has encode, decode, apply_chat_template (checkpoints.tokenizer), or None.
      eos_token_ids: ids that end an answer, from every place that names them (generation config first).
      dtype: of parameters, cache and activations.
      mesh: None for one device.
      source: where it was loaded from, for messages and records.
    """

    config: TargetConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Any = jnp.float32
    mesh: Mesh | None = None
    source: str = ""


def abstract_model(make, *args, **kwargs) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, params of ShapeDtypeStructs) of an NNX class, nothing allocated."""
    return nnx.split(nnx.eval_shape(lambda: make(*args, **kwargs, rngs=nnx.Rngs(0))))


def logical_axes(abstract_params: nnx.State) -> Any:
    """A pytree like the parameters with each one's logical axes (a tuple of names or None)."""
    return jax.tree.map(
        lambda variable: variable.get_metadata("axes"),
        abstract_params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def place(params: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Lays parameters out on the mesh by their logical axes (replicated where an axis does not divide)."""
    if mesh is None:
        return params
    return jax.tree.map(
        lambda variable: variable.replace(
            sharding.put(
                variable.get_value(),
                sharding.named_sharding(mesh, variable.get_metadata("axes"), variable.get_value().shape),
            )
        ),
        params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def place_abstract(params: nnx.State, mesh: Mesh | None) -> nnx.State:
    """`place` of abstract parameters: ShapeDtypeStructs with the shardings that the arrays would have."""
    return jax.tree.map(
        lambda variable: variable.replace(
            sharding.abstract_array(
                mesh, variable.get_value().shape, variable.get_value().dtype, variable.get_metadata("axes")
            )
        ),
        params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def random_target(config: TargetConfig, seed: int = 0, dtype=jnp.float32, mesh: Mesh | None = None) -> Target:
    """A target with random weights and no tokenizer, for tests and dry runs."""
    graphdef, params = nnx.split(Transformer(config, dtype, nnx.Rngs(seed)))
    return Target(config, graphdef, place(params, mesh), dtype=dtype, mesh=mesh, source=f"random:{seed}")
