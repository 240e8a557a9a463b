"""One training step: anchors, the frozen target where the batch has no features, loss, update. One jit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import Mesh

from dflash_jax import sharding
from dflash_jax.config import ConfigError, DrafterConfig, TargetConfig, from_config_dict
from dflash_jax.drafters.contract import SharedWeights
from dflash_jax.models.scanned import StackedTarget
from dflash_jax.models.whole_rows import forward_rows
from dflash_jax.training import processes
from dflash_jax.training.anchors import gather_rows, sample_anchors, slot_labels
from dflash_jax.training.block_forward import REMAT, block_forward
from dflash_jax.training.losses import HeadMath, LossSums, Markov, block_loss
from dflash_jax.training.objectives import LossConfig, position_weights
from dflash_jax.training.optimizer import OptimizerConfig, moving_average, schedule


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a step computes.

    Attributes:
      num_anchors: blocks a row. block_size: slots a block, anchor included.
      accumulation: parts that a batch is cut into, one after another; the result is that of one part.
      compute_dtype: of activations and of the parameters' working copy; masters, moments, logits and all sums are
        float32.
      scan_target: the target's like layers are stacked and scanned (`Frozen.target` is a StackedTarget): its program is
        compiled in the time of one pattern of layers. For targets that run in the step.
      remat: what of each drafter layer is kept for the backward pass: "none" computes nothing again, "layers" keeps a
        layer's input alone, "dots" also the results of its matrix products with weights. The target needs none: nothing
        is differentiated through it, so each of its layers is gone once the next has run.
    """

    num_anchors: int
    block_size: int
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    accumulation: int = 1
    compute_dtype: str = "float32"
    remat: str = "none"
    scan_target: bool = False

    def __post_init__(self) -> None:
        if self.num_anchors < 1:
            raise ConfigError(f"step.num_anchors is {self.num_anchors}, must be at least 1")
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}, must be at least 2")
        if self.accumulation < 1:
            raise ConfigError(f"step.accumulation is {self.accumulation}, must be at least 1")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"step.compute_dtype is {self.compute_dtype!r}, must be 'float32' or 'bfloat16'")
        if self.remat not in REMAT:
            raise ConfigError(f"step.remat is {self.remat!r}, must be one of {', '.join(REMAT)}")

    @classmethod
    def of(cls, step: Mapping[str, Any], loss: Mapping[str, Any], block_size: int) -> StepConfig:
        """The `step` and `loss` sections of a config, for a drafter's block size.

        Raises:
          ConfigError: a field is unknown, missing or wrong.
        """
        for name, place in (("loss", "the section loss"), ("block_size", "drafter.block_size")):
            if name in step:
                raise ConfigError(f"step.{name} is {step[name]!r}, but a step reads {place}; set it there alone")
        values = {**step, "loss": LossConfig.of(loss), "block_size": block_size}
        return from_config_dict(cls, values, "step")


@struct.dataclass
class TrainState:
    """All that changes: float32 master parameters, optimiser state, steps taken, the run's PRNG key.

    The key is constant; what is drawn depends on it, on a sample's epoch and on its id. `ema` is the moving average
    of the parameters, float32, or None where `OptimizerConfig.ema_decay` is 0.
    """

    params: nnx.State
    opt_state: Any
    step: jax.Array
    key: jax.Array
    ema: nnx.State | None = None


@struct.dataclass
class Frozen:
    """What a step reads and never changes.

    Attributes:
      shared: the target's table and its head over the draft vocabulary.
      target_to_draft_V: draft id of each target id, -1 outside the draft vocabulary; None for all.
      target: the target's parameters, stacked where `StepConfig.scan_target`, for batches without features; else None.
      whole_head_DxV: the target's head over its whole vocabulary, where the draft vocabulary is a part of it and the
        loss asks what lies outside (`LossConfig.needs_whole_law`); else None.
    """

    shared: SharedWeights
    target_to_draft_V: jax.Array | None = None
    target: nnx.State | StackedTarget | None = None
    whole_head_DxV: jax.Array | None = None


def init_state(
    params: nnx.State, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh | None, ema: bool = False
) -> TrainState:
    """A fresh state; moments and average lie where their parameters lie, the rest is replicated on the mesh.

    Args:
      ema: whether a moving average is kept; it begins at the parameters.
    """

    # Copies: the step donates the state, and parameters may be someone else's (a target's, a loaded drafter's). Each is
    # laid out before the next is made, and moments are made where their parameters lie: no device holds a whole state
    # that is to be cut.
    def master(variable: nnx.Variable) -> nnx.Variable:
        x = jnp.array(variable.get_value(), jnp.float32, copy=True)
        if mesh is not None:
            x = sharding.put(x, sharding.named_sharding(mesh, variable.get_metadata("axes"), x.shape))
        return variable.replace(x)

    def masters() -> nnx.State:
        return jax.tree.map(master, params, is_leaf=lambda x: isinstance(x, nnx.Variable))

    average, own = masters() if ema else None, masters()
    state = TrainState(own, optimizer.init(own), jnp.zeros((), jnp.int32), jax.random.key(seed), average)
    if mesh is None:
        return state
    return jax.tree.map(sharding.put, state, state_shardings(state, mesh))


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """A TrainState of shardings: parameters and moments by their logical axes, the rest replicated.

    A moment is an array of the optimiser's state that lies where its parameter lies in the tree of parameters, whatever
    chains and partitions are around it.
    """
    whole = sharding.replicated(mesh)

    def by_axes(variable):
        axes = variable.get_metadata("axes")
        return variable.replace(sharding.named_sharding(mesh, axes, variable.get_value().shape))

    params = jax.tree.map(by_axes, state.params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    own = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    layout = dict(jax.tree_util.tree_leaves_with_path(params))

    def of_its_parameter(path, x):
        for start in range(len(path)):  # the longest tail first
            if own.get(path[start:]) == x.shape:
                return layout[path[start:]]
        return whole

    moments = jax.tree_util.tree_map_with_path(of_its_parameter, state.opt_state)
    return TrainState(params, moments, whole, whole, None if state.ema is None else params)


def put_batch(batch: dict[str, Any], mesh: Mesh | None) -> dict[str, jax.Array]:
    """Lays a host batch out on the devices, rows over the data axis.

    With several processes each brings its own rows, and together they are the batch; where the target lies over
    several of them, each brings the batch (`processes.row_share`).

    Raises:
      ConfigError: rows do not divide over the data axis.
    """
    if mesh is None:
        return jax.device_put(batch)
    count = processes.row_share(mesh)[1]
    rows, parts = len(batch["length_B"]) * count, sharding.data_parallel_size(mesh)
    if rows % parts:
        raise ConfigError(f"a batch of {rows} rows does not divide over {parts} data shards; change batch_size")

    def placed(x: np.ndarray) -> jax.Array:
        layout = sharding.named_sharding(mesh, ("batch", *([None] * (x.ndim - 1))), (rows, *x.shape[1:]))
        return sharding.put(x, layout) if count == 1 else jax.make_array_from_process_local_data(layout, x)

    return {name: placed(x) for name, x in batch.items()}


def packed_documents(batch: dict[str, Any]) -> tuple[Any, Any]:
    """(document_BxS, position_BxS) of a packed batch, see `make_iterator`; (None, None) of any other."""
    return batch.get("document_BxS"), batch.get("position_BxS")


LossFunction = Callable[[nnx.State, jax.Array, Frozen, dict[str, jax.Array]], LossSums]


def make_loss(
    config: StepConfig,
    drafter_graphdef: nnx.GraphDef,
    drafter_config: DrafterConfig,
    target_config: TargetConfig,
    target_graphdef: nnx.GraphDef | None = None,
) -> LossFunction:
    """loss(params, key, frozen, batch) -> LossSums over the batch; pure, not jitted.

    Args:
      target_graphdef: needed for batches without cached features only.
    """
    math = HeadMath(
        config.loss, drafter_config.output_multiplier, drafter_config.final_logit_softcap or None,
        target_config.final_logit_softcap,
    )  # fmt: skip
    dtype = jnp.dtype(config.compute_dtype)
    k = config.block_size
    if k > drafter_config.block_size:
        raise ConfigError(f"block_size {k} of the step exceeds the drafter's block_size {drafter_config.block_size}")

    def loss(params: nnx.State, key: jax.Array, frozen: Frozen, batch: dict[str, jax.Array]) -> LossSums:
        token_BxS, mask_BxS, length_B = batch["tokens_BxS"], batch["loss_mask_BxS"], batch["length_B"]
        document_BxS, position_BxS = packed_documents(batch)
        anchor_BxA, keep_BxA = sample_anchors(
            key, batch["epoch_B"], batch.get("id_B"), mask_BxS, length_B, config.num_anchors, document_BxS, position_BxS
        )
        label_BxAxJ, counts_BxAxJ = slot_labels(token_BxS, mask_BxS, length_B, anchor_BxA, keep_BxA, k, document_BxS)
        if frozen.target_to_draft_V is not None:
            if config.loss.needs_whole_law and frozen.whole_head_DxV is None:
                raise ConfigError(
                    f"loss.objective {dict(config.loss.objective)} compares with the target's whole law, but the draft "
                    "vocabulary is a part of it and the step has no head over the whole: pass Frozen.whole_head_DxV"
                )
            label_BxAxJ = frozen.target_to_draft_V[label_BxAxJ]
        taps_BxSxTD, hidden_BxSxD = features(frozen, batch)

        # Slot o of anchor a predicts token a + o, which the target predicts from position a + o - 1.
        s = token_BxS.shape[1]
        offset_J = jnp.arange(k - 1, dtype=jnp.int32)
        index_BxAxJ = jnp.minimum(anchor_BxA[..., None] + offset_J[None, None], s - 1)
        teacher_BxAxJxD = gather_rows(hidden_BxSxD, index_BxAxJ) if config.loss.needs_target else None

        working = jax.tree.map(lambda x: x.astype(dtype), params)
        drafter = nnx.merge(drafter_graphdef, working)
        markov = None
        if drafter.markov is not None:
            # Rows of the masters: the gradient of a row is summed over all slots that it came before, in their dtype.
            masters = nnx.merge(drafter_graphdef, params).markov
            before_BxAxJxR = masters.before(gather_rows(token_BxS, index_BxAxJ)).astype(dtype)
            columns_RxU = masters.columns(frozen.shared.draft_to_target_V).astype(dtype)
            markov = Markov(
                sharding.constrain(before_BxAxJxR, ("batch", None, None, None)),
                sharding.constrain(columns_RxU, (None, "vocab")),
            )
        hidden_BxAxKxD = block_forward(
            drafter,
            frozen.shared,  # rows of the table are cast once they are read, as in serving
            token_BxS,
            taps_BxSxTD.astype(dtype),
            anchor_BxA,
            keep_BxA,
            k,
            position_BxS,
            document_BxS,
            config.remat,
        )
        weight_BxAxJ = jnp.broadcast_to(position_weights(config.loss, k)[None, None], label_BxAxJ.shape)
        return block_loss(
            math, hidden_BxAxKxD[:, :, 1:], teacher_BxAxJxD, frozen.shared.head_DxV,
            label_BxAxJ, counts_BxAxJ, weight_BxAxJ, frozen.whole_head_DxV, markov,
        )  # fmt: skip

    def features(frozen: Frozen, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        if "taps_BxSxTD" in batch:
            if config.scan_target:
                raise ConfigError(
                    "step.scan_target is True, but batches hold the target's states and it is not run: set it to "
                    "False, or data.features to False"
                )
            return batch["taps_BxSxTD"], batch.get("hidden_BxSxD")
        if frozen.target is None or target_graphdef is None:
            raise ConfigError("the batch has no taps_BxSxTD and the step no target to compute them with")
        if isinstance(frozen.target, StackedTarget) != config.scan_target:
            raise ValueError(f"scan_target is {config.scan_target}, but the step's target is {type(frozen.target)}")
        params = jax.lax.stop_gradient(frozen.target)
        target = (target_graphdef, params) if config.scan_target else nnx.merge(target_graphdef, params)
        document_BxS, position_BxS = packed_documents(batch)
        result = forward_rows(
            target, batch["tokens_BxS"], drafter_config.target_layer_ids, position_BxS, document_BxS
        )  # fmt: skip
        return jax.lax.stop_gradient((result.taps_BxMxTD, result.hidden_BxMxD))

    return loss


def make_train_step(
    config: StepConfig,
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    optimizer_config: OptimizerConfig,
    unit: Any = None,
    mesh: Mesh | None = None,
    trainable: Any = None,
) -> Callable[[TrainState, Frozen, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """train_step(state, frozen, batch) -> state, metrics; jitted, the state is donated.

    The gradient is that of loss / denominator (`LossSums`) over the whole batch: neither shards nor accumulated
    parts are averaged on their own. A batch without a supervised slot, and one whose loss or gradient is
    not finite, changes neither parameters nor optimiser; the step counter goes on all the same.

    A state with an average (`init_state(ema=True)`) has it moved once an update, whatever the accumulation; a
    skipped update leaves it as it is. It needs `optimizer_config.ema_decay`.

    `unit` and `trainable` are those of `make_optimizer`: what does not train has no gradient, and the reported
    gradient norm is the one that is clipped. On a mesh the new state is laid out as the old one, and metrics are on
    every device.

    Metrics: see `dflash_jax.training.metrics.summarise`; values are device arrays.
    """
    rate = schedule(optimizer_config)

    def summed(params, key, frozen, batch):
        sums = loss(params, key, frozen, batch)
        return sums.loss, sums

    def gradient(params, key, frozen, batch):
        parts = config.accumulation
        if parts == 1:
            grads, sums = jax.grad(summed, has_aux=True)(params, key, frozen, batch)
            return grads, sums
        rows = batch["length_B"].shape[0]
        if rows % parts:
            raise ConfigError(f"accumulation {parts} does not divide the batch of {rows} rows")
        # Part m takes rows m, m + parts, ...: each device holds some of every part.
        cut = jax.tree.map(lambda x: x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)

        def body(carry, part):
            grads, sums = jax.grad(summed, has_aux=True)(params, key, frozen, part)
            return jax.tree.map(jnp.add, carry, (grads, sums)), None

        first = jax.eval_shape(jax.grad(summed, has_aux=True), params, key, frozen, jax.tree.map(lambda x: x[0], cut))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
        return jax.lax.scan(body, zeros, cut)[0]

    def train_step(state: TrainState, frozen: Frozen, batch: dict[str, jax.Array]):
        if (state.ema is not None) != (optimizer_config.ema_decay > 0):
            raise ValueError(
                f"the state has {'no' if state.ema is None else 'a'} moving average, optimizer.ema_decay is "
                f"{optimizer_config.ema_decay}: pass ema to init_state where, and only where, the decay is positive"
            )
        grads, sums = gradient(state.params, state.key, frozen, batch)
        scale = 1.0 / jnp.where(sums.denominator > 0, sums.denominator, 1.0)
        grads = jax.tree.map(lambda g: g * scale, grads)
        if trainable is not None:
            grads = jax.tree.map(lambda g, trains: g if trains else jnp.zeros_like(g), grads, trainable)
        norm = optax.tree.norm(grads if unit is None else jax.tree.map(jnp.multiply, grads, unit))
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)

        def apply(state):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            ema = None if state.ema is None else moving_average(state.ema, params, optimizer_config.ema_decay)
            return state.replace(params=params, opt_state=opt_state, ema=ema)

        rate_now = rate(state.opt_state[-1].count)
        state = jax.lax.cond(finite & (sums.denominator > 0), apply, lambda state: state, state)
        real = jnp.sum(batch["length_B"]) / batch["tokens_BxS"].size
        metrics = {"sums": sums, "grad_norm": norm, "learning_rate": rate_now, "finite": finite, "real_tokens": real}
        return state.replace(step=state.step + 1), metrics

    if mesh is None:
        return jax.jit(train_step, donate_argnums=0)

    def placed_step(state: TrainState, frozen: Frozen, batch: dict[str, jax.Array]):
        layout = state_shardings(state, mesh)
        state, metrics = train_step(state, frozen, batch)
        return jax.lax.with_sharding_constraint((state, metrics), (layout, _everywhere(metrics, mesh)))

    return jax.jit(placed_step, donate_argnums=0)


def _everywhere(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda _: sharding.replicated(mesh), tree)
