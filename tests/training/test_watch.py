"""Explosions stop a run, are told from single hard batches, and leave checkpoints to go back to."""

import json

import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.training.checkpointing import Checkpoints
from dflash_jax.training.loop import train
from dflash_jax.training.run_config import RunConfig
from dflash_jax.training.watch import LEAST, PATIENCE, Explosion, TrainingDiverged
from tests.training import toy

IDS = np.array([4, 9])


def watched(losses, norms=None, **config):
    """What is said after each step."""
    watch = Explosion(RunConfig(**config))
    norms = [1.0] * len(losses) if norms is None else norms
    return watch, [watch.see(i, IDS + i, *pair) for i, pair in enumerate(zip(losses, norms, strict=True), 1)]


def test_some_steps_in_a_row_are_an_explosion_and_fewer_are_not():
    steady, high = [1.0, 1.2] * LEAST, [15.0] * (PATIENCE - 1)
    watch, said = watched([*steady, *high, 1.0, *high])
    assert not any(said) and watch.suspected
    last = len(said) + 1
    message = watch.see(last, IDS + last, 16.0, 1.0)
    assert message.startswith(f"step {last}: loss 16, 16.0 times the median 1 of the last 33 steps")
    assert f"{PATIENCE} steps in a row" in message and "run.max_loss_ratio is 10.0" in message
    for back in range(PATIENCE):
        assert f"step {last - back}: {[4 + last - back, 9 + last - back]}" in message
    assert not watch.see(last + 1, IDS, 1.0, 1.0) and not watch.suspected


def test_high_steps_do_not_raise_the_median():
    watch, _ = watched([1.0] * LEAST)
    for step in range(40):
        said = watch.see(step, IDS, 12.0 if step % PATIENCE else 1.0, 1.0)
        assert not said
    watch, said = watched([1.0] * LEAST + [12.0] * PATIENCE)
    assert said[-1]


def test_the_first_steps_are_no_measure():
    assert not any(watched([1.0] * (LEAST - 1) + [1e6] * PATIENCE)[1])
    assert any(watched([1.0] * LEAST + [1e6] * PATIENCE)[1])


def test_a_loss_near_zero_may_go_up_and_down():
    assert not any(watched([0.0] * LEAST + [0.09] * PATIENCE)[1])
    assert "loss 0.11, 11.0 times the median 0.01 of" in watched([1e-4] * LEAST + [0.11] * PATIENCE)[1][-1]


def test_each_ratio_is_its_own_and_none_never_stops():
    losses, norms = [1.0] * (LEAST + PATIENCE), [1.0] * LEAST + [50.0] * PATIENCE
    assert not any(watched(losses, norms)[1])
    assert "grad_norm 50, 50.0 times" in watched(losses, norms, max_grad_norm_ratio=20.0)[1][-1]
    assert not any(watched(norms, losses, max_loss_ratio=None)[1])


@pytest.mark.parametrize("field", ["max_loss_ratio", "max_grad_norm_ratio"])
def test_a_ratio_that_every_step_exceeds_is_refused(field):
    with pytest.raises(ConfigError, match=rf"run\.{field} is 0\.5, must be above 1"):
        RunConfig(**{field: 0.5})


class Sharpened(toy.Recorded):
    """From step 17 on the target's final states are a thousandfold: nothing that was learned is right any more."""

    def __init__(self, batches):
        super().__init__(batches)
        self.step = 0

    def __next__(self):
        batch = super().__next__()
        self.step += 1
        rows, length = batch["tokens_BxS"].shape
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(rows, length, toy.HIDDEN)).astype(np.float32) * (1e3 if self.step > 16 else 0.1)
        taps = rng.normal(size=(rows, length, 2 * toy.HIDDEN)).astype(np.float32)
        return batch | {"taps_BxSxTD": taps, "hidden_BxSxD": hidden}

    def set_state(self, state):
        super().set_state(state)
        self.step = 0


def test_a_run_that_explodes_stops_and_leaves_its_checkpoints(tmp_path):
    data = toy.data()
    data.batches = Sharpened(data.batches)
    config = toy.experiment(max_loss_ratio=2.0, save_every=18)
    with pytest.raises(
        TrainingDiverged, match=r"step 19: loss .*run\.max_loss_ratio is 2\.0.*goes back to step 0"
    ) as told:
        train(config, tmp_path, target=toy.target(), data=data)
    # Step 18 was suspected already: it is no checkpoint to go back to. What the run had become lies apart.
    assert str(tmp_path / "diverged" / "19") in str(told.value)
    with Checkpoints(tmp_path / "checkpoints") as kept, Checkpoints(tmp_path / "diverged") as aside:
        assert kept.latest is None and aside.latest == 19
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 18 and min(losses[16:]) > 2 * max(losses[8:16])
    batches = [data.batches.seen[4 * i : 4 * i + 4] for i in (16, 17, 18)]
    for step, ids in zip((17, 18, 19), batches, strict=True):
        assert f"step {step}: {ids}" in str(told.value)
    # The way out that the message names.
    config.run.max_loss_ratio = None
    assert train(config, tmp_path, target=toy.target(), data=toy.data()).step == toy.STEPS
