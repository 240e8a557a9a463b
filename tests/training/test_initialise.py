"""What training starts from."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.load_drafter import load_drafter, shared_weights
from dflash_jax.config import FULL, SLIDING, ConfigError, LatentConfig
from dflash_jax.models.whole_rows import forward_rows
from dflash_jax.training.from_config import first_params
from dflash_jax.training.initialise import Statistics, coordinate_units, drafter_config, initial_params, measure
from dflash_jax.training.loop import train
from tests.training import toy

TARGET = toy.target()
CONFIG = toy.drafter_config()
TOKENS = toy.batch(features=False)["tokens_BxS"]
LENGTH = np.asarray([24, 17, 20], np.int32)


@pytest.fixture(scope="module")
def statistics():
    return measure(TARGET, TOKENS, LENGTH, CONFIG.target_layer_ids, layers=(2, 4))


def test_measured_sizes_are_those_of_the_target(statistics):
    model = nnx.merge(TARGET.graphdef, TARGET.params)
    result = forward_rows(model, jnp.asarray(TOKENS), (1, 3))
    inside = np.arange(24)[None] < LENGTH[:, None]
    taps = np.asarray(result.taps_BxMxTD).reshape(3, 24, 2, -1)
    rms = np.sqrt(np.square(taps).mean(-1))[inside]
    np.testing.assert_allclose(statistics.tap_rms, np.median(rms, 0), rtol=1e-5)
    before = forward_rows(model, jnp.asarray(TOKENS), (1, 3)).taps_BxMxTD[..., : toy.HIDDEN]  # the input of layer 2
    layer = model.layers[2]
    qkv = np.einsum("bsd,dgrh->bsgrh", layer.attention_norm(before), layer.attention.qkv_DxGxRxH[...])[inside]
    np.testing.assert_allclose(statistics.query_rms[0], np.sqrt(np.square(qkv[:, :, :-2]).mean()), rtol=1e-5)
    np.testing.assert_allclose(statistics.key_rms[0], np.sqrt(np.square(qkv[:, :, -2]).mean()), rtol=1e-5)


def test_outliers_do_not_carry_the_tap_size_away():
    config = toy.target_config()
    target = toy.target()
    table = np.asarray(target.params["embedding_VxD"].get_value()).copy()
    calm = measure(target, TOKENS, LENGTH, (1, 3))
    rare = TOKENS[0, 5]
    table[rare] *= 1e4
    target.params["embedding_VxD"] = target.params["embedding_VxD"].replace(jnp.asarray(table))
    wild = measure(target, TOKENS, LENGTH, (1, 3))
    assert config.num_layers == 5
    np.testing.assert_allclose(wild.tap_rms, calm.tap_rms, rtol=0.3)


def test_copied_layers_give_the_targets_keys_and_values(statistics):
    """Folding the input norm: a drafter layer's k and v of normed features are the target's of its input."""
    params = initial_params(CONFIG, TARGET, statistics, init_layers=(2, 4))
    drafter = nnx.merge(toy.drafter(CONFIG)[0], params)
    model = nnx.merge(TARGET.graphdef, TARGET.params)
    # Norm scales of a random target are ones; others tell whether they are folded where they should be.
    x = jax.random.normal(jax.random.key(0), (1, 7, toy.HIDDEN)) * 5
    normed = x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
    zero = (jnp.ones((1, 7, 4)), jnp.zeros((1, 7, 4)))
    _, v = drafter.layers[0].attention.keys_values(normed, zero)
    layer = model.layers[2]
    expected = jnp.einsum("bsd,dgrh->bgsrh", layer.attention_norm(x), layer.attention.qkv_DxGxRxH[...])[..., -1, :]
    np.testing.assert_allclose(v, expected, atol=1e-4)


def test_norm_scales_of_the_target_are_folded():
    target = toy.target()
    scale = jnp.linspace(0.5, 2.0, toy.HIDDEN)
    norm = target.params["layers"][2]["attention_norm"]
    norm["scale"] = norm["scale"].replace(scale)
    sizes = measure(target, TOKENS, LENGTH, CONFIG.target_layer_ids, layers=(2, 4))
    params = initial_params(CONFIG, target, sizes, init_layers=(2, 4))
    kernel = target.params["layers"][2]["attention"]["qkv_DxGxRxH"].get_value() * scale[:, None, None, None]
    np.testing.assert_allclose(params["layers"][0]["attention"]["kv_DxGx2xH"].get_value(), kernel[:, :, -2:], rtol=1e-6)
    np.testing.assert_allclose(params["layers"][0]["attention"]["q_DxGxRxH"].get_value(), kernel[:, :, :-2], rtol=1e-6)
    assert (params["layers"][0]["attention_norm"]["scale"].get_value() == 1).all()
    q_scale = params["layers"][0]["attention"]["q_norm"]["scale"].get_value()
    np.testing.assert_allclose(q_scale, sizes.query_rms[0], rtol=1e-6)


def test_fc_passes_the_last_tap_through(statistics):
    params = initial_params(CONFIG, TARGET, statistics, init_layers=(2, 4))
    drafter = nnx.merge(toy.drafter(CONFIG)[0], params)
    taps = jax.random.normal(jax.random.key(1), (1, 5, 2 * toy.HIDDEN)) * jnp.repeat(
        jnp.asarray(statistics.tap_rms), toy.HIDDEN
    )[None, None]  # fmt: skip
    last = taps[..., toy.HIDDEN :]
    expected = last / jnp.sqrt(jnp.mean(jnp.square(last), -1, keepdims=True))
    np.testing.assert_allclose(drafter.fuse(taps), expected, atol=1e-4)


def test_random_fc_gives_every_tap_the_same_weight():
    config = toy.drafter_config()
    params = initial_params(config, TARGET, Statistics(tap_rms=(100.0, 0.01)))
    fc = np.asarray(params["fc_TDxD"].get_value()).reshape(2, toy.HIDDEN, toy.HIDDEN)
    spread = fc.std((1, 2)) * np.asarray([100.0, 0.01]) * np.sqrt(2 * toy.HIDDEN)
    np.testing.assert_allclose(spread, 1.0, atol=0.15)
    unit = coordinate_units(params, config, Statistics(tap_rms=(100.0, 0.01)))
    rows = np.asarray(unit["fc_TDxD"].get_value())[:, 0]
    np.testing.assert_allclose(rows[[0, toy.HIDDEN - 1, toy.HIDDEN, -1]], [0.01, 0.01, 100.0, 100.0], rtol=1e-6)
    assert unit["hidden_norm"]["scale"].get_value() == 1


def test_initial_parameters_belong_to_nobody_else(statistics):
    params = initial_params(CONFIG, TARGET, statistics, init_layers=(2, 4))
    held = {id(x) for x in jax.tree.leaves((TARGET.params, shared_weights(TARGET)))}
    assert not held & {id(x) for x in jax.tree.leaves(params)}


def test_the_drafter_takes_over_the_targets_scale_and_cap():
    target = toy.target_config(embedding_scale=4.0, final_logit_softcap=30.0)
    config = drafter_config(target, num_layers=1, block_size=4, mask_token_id=0, target_layer_ids=(1, 3))
    assert (config.embedding_scale, config.final_logit_softcap) == (4.0, 30.0)
    windows = drafter_config(
        target, num_layers=3, block_size=4, mask_token_id=0, target_layer_ids=2, sliding_window=9, num_full_layers=1
    )
    assert windows.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert windows.target_layer_ids == (1, 2)


def test_a_deeper_drafter_starts_as_the_one_that_it_goes_on_from(tmp_path):
    """The first loss is the shallow one's; then the new layers learn, those that see no gradient at first too."""
    config = toy.drafter_config(layer_types=(FULL, FULL), sliding_window=None)
    made = export_drafter(tmp_path / "made", config, toy.drafter(config)[1])
    losses = []
    for layers in ((2, 4), (2, 4, 1, 3)):
        run = toy.experiment(stop_after=3, save_every=3)
        run.drafter.update(init_from=str(made), init_layers=layers, num_layers=len(layers))
        workdir = tmp_path / str(len(layers))
        train(run, workdir, target=TARGET, data=toy.data(), evaluate=None)
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-6)
    assert abs(losses[0][2] / losses[1][2] - 1) > 1e-5

    deep = dataclasses.replace(config, num_layers=4, layer_types=(FULL,) * 4)
    sizes = measure(TARGET, TOKENS, LENGTH, config.target_layer_ids, layers=(2, 4, 1, 3))
    params = first_params(run, TARGET, deep, sizes)
    attention = params["layers"][3]["attention"]
    assert not attention["out_GxRxHxD"].get_value().any() and attention["q_DxGxRxH"].get_value().any()
    with pytest.raises(ConfigError, match="has layer_types"):
        first_params(
            run, TARGET, dataclasses.replace(deep, layer_types=(SLIDING, FULL, FULL, FULL), sliding_window=6), sizes
        )


def test_a_markov_head_starts_as_no_change_and_learns(tmp_path):
    config = toy.drafter_config(layer_types=(FULL, FULL), sliding_window=None)
    made = export_drafter(tmp_path / "made", config, toy.drafter(config)[1])
    losses = []
    for rank in (0, 6):
        run = toy.experiment(stop_after=4, save_every=4)
        run.drafter.update(init_from=str(made), init_layers=(2, 4), markov_rank=rank)
        workdir = tmp_path / str(rank)
        train(run, workdir, target=TARGET, data=toy.data(), evaluate=None)
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-6)
    assert abs(losses[0][3] / losses[1][3] - 1) > 1e-4
    drafter = load_drafter(workdir / "export", TARGET)
    assert drafter.config.markov_rank == 6 and drafter.params["markov"]["w2_VxR"].get_value().any()
    # A run may go on from it, but not into a drafter without the head.
    run.drafter.init_from = str(workdir / "export")
    again = first_params(run, TARGET, drafter.config, None)
    jax.tree.map(np.testing.assert_array_equal, again, drafter.params)
    with pytest.raises(ConfigError, match="has markov_rank = 6, this run has 0"):
        first_params(run, TARGET, dataclasses.replace(drafter.config, markov_rank=0), None)


def test_a_markov_head_knows_tokens_by_the_principal_components_of_the_table(statistics):
    rank = toy.HIDDEN + 4  # more than the table has
    params = initial_params(dataclasses.replace(CONFIG, markov_rank=rank), TARGET, statistics)
    w1 = np.asarray(params["markov"]["w1_VxR"].get_value())
    missing, w1 = w1[:, toy.HIDDEN :], w1[:, : toy.HIDDEN]
    np.testing.assert_allclose(w1.T @ w1 / len(w1), np.eye(toy.HIDDEN), atol=1e-4)  # of unit variance, not correlated
    assert (missing.std(0) > 0.6).all() and (missing.std(0) < 1.4).all()  # noise: zeros would never learn
    np.testing.assert_allclose(w1.mean(0), 0, atol=1e-5)
    table = np.asarray(TARGET.params["embedding_VxD"].get_value(), np.float64)
    spread = np.linalg.eigvalsh(np.cov(table.T, bias=True))[::-1]
    first = (table - table.mean(0)) @ np.linalg.lstsq(table - table.mean(0), w1[:, 0], rcond=None)[0]
    np.testing.assert_allclose(first, w1[:, 0], atol=1e-4)  # made of the table
    along = np.linalg.lstsq(table - table.mean(0), w1[:, 0], rcond=None)[0]
    np.testing.assert_allclose(np.linalg.norm(along) ** -2, spread[0], rtol=1e-3)  # along its widest direction


def test_wrong_initialisations_are_refused_by_name(statistics):
    with pytest.raises(ConfigError, match="init_layers holds 9"):
        measure(TARGET, TOKENS, LENGTH, (1, 3), layers=(9,))
    latent = LatentConfig(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)
    for config, layer, has in (
        (toy.mixture_config(), 2, "experts"),
        (toy.hybrid_config(), 3, "a recurrent state"),
        (dataclasses.replace(TARGET.config, latent=latent), 4, "latent attention"),
    ):
        with pytest.raises(ConfigError, match=f"init_layers holds {layer}, a layer with {has}.*leave it empty"):
            measure(dataclasses.replace(TARGET, config=config), TOKENS, LENGTH, (1, 3), layers=(layer,))
    with pytest.raises(ConfigError, match="no token"):
        measure(TARGET, TOKENS, np.zeros(3, np.int32), (1, 3))
    with pytest.raises(ConfigError, match="must name 2 layers"):
        initial_params(CONFIG, TARGET, statistics, init_layers=(2,))
    with pytest.raises(ConfigError, match="intermediate_size is 48 and the target's 32"):
        wide = dataclasses.replace(CONFIG, intermediate_size=48)
        initial_params(wide, TARGET, statistics, init_layers=(2, 4))
    with pytest.raises(ConfigError, match="q and k sizes"):
        initial_params(CONFIG, TARGET, Statistics(tap_rms=(1.0, 1.0)), init_layers=(2, 4))
    with pytest.raises(ConfigError, match="tap_rms"):
        initial_params(CONFIG, TARGET, Statistics(tap_rms=(1.0, 0.0)))
