"""The gate between training and serving: what is learned by heart must be accepted in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.load_drafter import bind_drafter, shared_weights
from dflash_jax.config import FULL, SLIDING
from dflash_jax.decoding.generate import generate
from dflash_jax.training.objectives import LossConfig
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.step import Frozen, StepConfig, init_state, make_loss, make_train_step, put_batch
from tests.training import toy

PROMPT, ANSWER, BLOCK = 7, 41, 5


@pytest.mark.parametrize("pruned", [False, True])
def test_b65_a_sequence_learned_by_heart_is_served_at_full_acceptance(pruned):
    target = toy.target(seed=4)
    prompt = np.random.default_rng(2).integers(4, toy.VOCAB, PROMPT).tolist()
    answer = generate(target, None, [prompt], max_tokens=ANSWER)[0].token_ids
    assert len(answer) == ANSWER and len(set(answer)) >= 6, "an answer that repeats itself would prove little"

    draft_ids = np.unique([*answer, *range(20)]).astype(np.int32) if pruned else None
    inverse = None
    if pruned:
        inverse = np.full(toy.VOCAB, -1, np.int32)
        inverse[draft_ids] = np.arange(len(draft_ids))
        inverse = jnp.asarray(inverse)
    config = toy.drafter_config(block_size=BLOCK, layer_types=(SLIDING, FULL), sliding_window=9)
    graphdef, params = toy.drafter(config)
    batch = {
        "tokens_BxS": np.asarray([[*prompt, *answer]], np.int32),
        "loss_mask_BxS": np.arange(PROMPT + ANSWER)[None] >= PROMPT,
        "length_B": np.asarray([PROMPT + ANSWER], np.int32),
        "id_B": np.zeros(1, np.int32),
        "epoch_B": np.zeros(1, np.int32),
    }
    optimizer_config = OptimizerConfig(learning_rate=1e-2, warmup_steps=20, total_steps=1000)
    optimizer = make_optimizer(optimizer_config)
    step_config = StepConfig(ANSWER - 1, BLOCK, LossConfig("hard", "uniform"))
    loss = make_loss(step_config, graphdef, config, target.config, target.graphdef)
    train_step = make_train_step(step_config, loss, optimizer, optimizer_config)
    state = init_state(params, optimizer, 0, None)
    frozen = Frozen(shared_weights(target, draft_ids), inverse, target.params)
    batch = put_batch(batch, None)
    for _ in range(optimizer_config.total_steps):
        state, metrics = train_step(state, frozen, batch)
    sums = jax.device_get(metrics["sums"])
    assert sums.loss / sums.denominator < 0.01
    assert sums.correct_J.sum() == sums.count_J.sum()

    drafter = bind_drafter(config, graphdef, state.params, target, draft_ids)
    result = generate(target, drafter, [prompt], max_tokens=ANSWER)[0]
    assert result.token_ids == answer
    assert result.acceptance == [BLOCK] * ((ANSWER - 1) // BLOCK)
