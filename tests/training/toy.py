"""A tiny target, a tiny drafter, batches in memory: what the training tests share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from dflash_jax.config import (
    FULL,
    LINEAR,
    SLIDING,
    DeltaConfig,
    DrafterConfig,
    MoeConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_jax.data.batches import make_iterator, sample_ids
from dflash_jax.data.responses import Sample
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import random_target
from dflash_jax.training.corpus import TrainingData

VOCAB, HIDDEN, MASK = 48, 16, 3


def target_config(**changes) -> TargetConfig:
    config = TargetConfig(
        family="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_layers=5, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(10_000.0), max_positions=256,
        layer_types=(FULL,) * 5, tie_embeddings=True,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def mixture_config() -> TargetConfig:
    """The same with experts in every layer, as Qwen3-MoE has them."""
    experts = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=16, layers=tuple(range(5)))
    return target_config(family="qwen3_moe", qk_norm=True, moe=experts)


def hybrid_config() -> TargetConfig:
    """The same with experts, a shared expert and recurrent layers, as Qwen3.5-MoE has them."""
    experts = dataclasses.replace(mixture_config().moe, shared_intermediate_size=16, shared_gate=True)
    delta = DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_width=4)
    layer_types = (LINEAR, LINEAR, FULL, LINEAR, FULL)
    return target_config(
        family="qwen3_5_moe_text", qk_norm=True, norm_offset=True, attention_gate=True, moe=experts, delta=delta,
        layer_types=layer_types,
    )  # fmt: skip


def drafter_config(**changes) -> DrafterConfig:
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        rms_norm_eps=1e-5, rope=RopeConfig(10_000.0), vocab_size=VOCAB, block_size=4, mask_token_id=MASK,
        target_layer_ids=(1, 3), num_target_layers=5, layer_types=(FULL, SLIDING), max_positions=256,
        sliding_window=6,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def target(seed: int = 0, mesh=None):
    return random_target(target_config(), seed, mesh=mesh)


def drafter(config: DrafterConfig, seed: int = 1):
    """(graphdef, params)."""
    return nnx.split(DFlash(config, jnp.float32, nnx.Rngs(seed)))


def batch(seed=0, rows=3, length=24, starts=(6, 2, 10), ends=(24, 17, 20), features=True, taps=2):
    """Rows with answers at [start, end); a row's tokens depend on its index only."""
    rng = np.random.default_rng(seed)
    position_S = np.arange(length)
    mask = np.stack([(position_S >= starts[i]) & (position_S < ends[i]) for i in range(rows)])
    result = {
        "tokens_BxS": rng.integers(4, VOCAB, (rows, length)).astype(np.int32),
        "loss_mask_BxS": mask,
        "length_B": np.asarray(ends[:rows], np.int32),
        "id_B": np.arange(rows, dtype=np.int32) + 100,
        "epoch_B": np.zeros(rows, np.int32),
    }
    if features:
        result["taps_BxSxTD"] = rng.normal(size=(rows, length, taps * HIDDEN)).astype(np.float32)
        result["hidden_BxSxD"] = rng.normal(size=(rows, length, HIDDEN)).astype(np.float32)
    return result


class Recorded:
    """A batch iterator that remembers the sample ids it gave since its position was last set."""

    def __init__(self, batches):
        self.batches, self.seen = batches, []

    def __next__(self) -> dict[str, np.ndarray]:
        result = next(self.batches)
        self.seen += sample_ids(result).tolist()
        return result

    def get_state(self) -> dict:
        return self.batches.get_state()

    def set_state(self, state: dict) -> None:
        self.seen.clear()
        self.batches.set_state(state)


def data(
    rows: int = 12, length: int = 24, batch_size: int = 4, process: int = 0, processes: int = 1, packing: bool = False
) -> TrainingData:
    """Batches of the real iterator (shuffled, read ahead) over samples in memory, without features."""
    rng = np.random.default_rng(7)
    shortest = length // 4 if packing else length // 2
    starts = rng.integers(2, shortest, rows)
    ends = rng.integers(shortest + 3, length + 1, rows)
    whole = batch(7, rows, length, starts, ends, features=False)
    samples = [Sample(str(i), whole["tokens_BxS"][i, :e], whole["loss_mask_BxS"][i, :e]) for i, e in enumerate(ends)]
    iterator = make_iterator(
        samples, batch_size=batch_size // processes, seq_len=length, seed=5, packing=packing,
        process_index=process, process_count=processes,
    )  # fmt: skip
    return TrainingData(Recorded(iterator), samples, {"rows": rows, "length": length, "packing": packing})


STEPS = 20


def experiment(**run) -> ConfigDict:
    """A config for `train` with this module's target and data; fields of its `run` section by name."""
    return ConfigDict(
        {
            "seed": 3,
            "mesh": {"data": 1, "tensor": 1},
            "target": {"source": "toy", "dtype": "float32"},
            "drafter": {
                "num_layers": 2, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": (1, 3),
                "init_layers": (2, 4), "init_from": "", "trunk": "trained", "draft_vocab_size": 32,
            },
            "step": {"num_anchors": 5, "accumulation": 2, "compute_dtype": "float32"},
            "loss": {"objective": {"hard": 0.3, "forward_kl": 0.7}, "gamma": 4.0, "chunk_slots": 24},
            "optimizer": {
                "learning_rate": 3e-3, "warmup_steps": 4, "total_steps": STEPS, "weight_decay": 0.01, "ema_decay": 0.8,
            },
            "run": {"log_every": 1, "eval_every": 0, "save_every": 100, **run},
            "evaluation": {},
        }
    )  # fmt: skip


def feed(batch_of_numpy: dict) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.asarray, batch_of_numpy)
