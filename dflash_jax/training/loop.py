"""A training run, from a config to an exported drafter. Read `train` from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from dflash_jax import sharding
from dflash_jax.checkpoints.draft_vocab import DRAFT_VOCAB_FILE, read_draft_vocab, write_draft_vocab
from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.load_drafter import bind_drafter, check_mask, load_drafter, shared_weights
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.config import ConfigError, DrafterConfig, TargetConfig, from_config_dict
from dflash_jax.data.batches import sample_ids
from dflash_jax.drafters.contract import Drafter
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.target import Target
from dflash_jax.sharding import MeshConfig
from dflash_jax.training import processes
from dflash_jax.training.acceptance import Evaluate, open_evaluation
from dflash_jax.training.adapter import FROZEN, check_trunk, drafter_on_trunk, trainable, with_trunk_of
from dflash_jax.training.checkpointing import Checkpoints, check_fingerprint
from dflash_jax.training.corpus import BatchIterator, TrainingData, choose_draft_vocabulary, open_training_data
from dflash_jax.training.dry_run import TINY, tiny_target
from dflash_jax.training.initialise import Statistics, coordinate_units, drafter_config, initial_params, measure
from dflash_jax.training.losses import LossConfig
from dflash_jax.training.metrics import MetricsWriter, summarise
from dflash_jax.training.step import (
    Frozen,
    OptimizerConfig,
    StepConfig,
    TrainState,
    init_state,
    make_loss,
    make_optimizer,
    make_train_step,
    put_batch,
)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """When things happen, in steps unless the name says otherwise.

    Attributes:
      stop_after: stop there, with a checkpoint, though the schedule goes on; None runs to total_steps.
      save_every_minutes: besides save_every; one process only, since clocks differ.
      eval_every: 0 for only at the end.
      export_weights: what is evaluated and exported, "raw" parameters or their moving average "ema", which needs
        optimizer.ema_decay. An export's config.json says which it holds. Both are in every checkpoint.
    """

    log_every: int = 20
    eval_every: int = 0
    save_every: int = 500
    save_every_minutes: float | None = 10.0
    keep_checkpoints: int = 2
    stop_after: int | None = None
    export_weights: str = "raw"

    def __post_init__(self) -> None:
        for name, least in (("log_every", 1), ("eval_every", 0), ("save_every", 1), ("keep_checkpoints", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"run.{name} is {getattr(self, name)}, must be at least {least}")
        if self.save_every_minutes is not None and self.save_every_minutes <= 0:
            raise ConfigError(f"run.save_every_minutes is {self.save_every_minutes}, must be positive or None")
        if self.export_weights not in ("raw", "ema"):
            raise ConfigError(f"run.export_weights is {self.export_weights!r}, must be 'raw' or 'ema'")


@dataclasses.dataclass
class TrainResult:
    """How a run ended: steps taken, last evaluation, where the best and the last drafter were exported."""

    step: int
    evaluation: dict[str, Any]
    best: dict[str, Any]
    export: pathlib.Path


class TrainingDiverged(RuntimeError):
    """A loss or gradient that is no finite number: names the step, the samples, and the saved state."""


def train(
    config: ConfigDict,
    workdir: str | pathlib.Path,
    *,
    target: Target | None = None,
    data: TrainingData | None = None,
    evaluate: Evaluate | None = None,
) -> TrainResult:
    """Trains a DFlash drafter; the same call on the same workdir resumes.

    Args:
      config: an experiment of `configs/`; sections seed, mesh, target, drafter, data, step, loss, optimizer,
        run, evaluation.
      workdir: receives config.json, metrics.jsonl, tensorboard/, checkpoints/, best/ and export/.
      target, data, evaluate: None builds them from the config; a notebook or a test may pass its own.
        `evaluate(target, drafter)` runs the draft-verify loop on held-out prompts and returns at least "tau"; with
        several processes each calls it, on its own devices.

    Raises:
      ConfigError: a field is wrong, or differs from what the checkpoints in workdir were trained with.
      TrainingDiverged: see there.
      SystemExit: SIGTERM came; a checkpoint was saved.
    """
    workdir = pathlib.Path(workdir).absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    run = from_config_dict(RunConfig, config.run)
    optimizer_config = from_config_dict(OptimizerConfig, config.optimizer)
    if run.export_weights == "ema" and not optimizer_config.ema_decay:
        raise ConfigError(
            "run.export_weights is 'ema', but optimizer.ema_decay is 0: no average is kept; set it (such as 0.999), or "
            "export 'raw' weights"
        )
    if run.save_every_minutes is not None and jax.process_count() > 1:
        raise ConfigError("run.save_every_minutes needs a single process; set it to None and use run.save_every")

    check_trunk(config.drafter.trunk, config.drafter.init_from)
    logging.info("== target")
    mesh = _mesh(config)
    if target is None:
        target = _target(config, mesh)
    logging.info("%s: %d layers, hidden size %d", target.source, target.config.num_layers, target.config.hidden_size)

    logging.info("== data")
    draft = configured_drafter(config, target.config)
    check_mask(draft, target, "Set drafter.mask_token_id to a special token that the chat format never uses")
    own = processes.here(target)  # answers, reads, measures and decodes; `target` takes the training steps
    if data is None:
        data = processes.in_turn(
            lambda: open_training_data(config.data.to_dict(), own, draft.target_layer_ids, workdir)
        )  # fmt: skip
    if evaluate is None:
        evaluate = open_evaluation(config.evaluation.to_dict(), own)

    logging.info("== drafter")
    step_config = StepConfig(
        block_size=draft.block_size, loss=from_config_dict(LossConfig, config.loss), **config.step.to_dict()
    )
    fingerprint = {
        "seed": config.seed,
        "target": {"source": target.source, "config": dataclasses.asdict(target.config)},
        "drafter": dataclasses.asdict(draft),
        "init": {
            "layers": list(config.drafter.init_layers),
            "from": config.drafter.init_from,
            "trunk": config.drafter.trunk,
        },
        "draft_vocab_size": config.drafter.draft_vocab_size,
        "step": dataclasses.asdict(step_config),
        "optimizer": dataclasses.asdict(optimizer_config),
        "data": data.facts,
    }
    fingerprint = json.loads(json.dumps(fingerprint))  # tuples become lists, as they come back from disk
    checkpoints = Checkpoints(workdir / "checkpoints", run.keep_checkpoints)
    latest = checkpoints.latest
    if latest is None:
        draft_to_target = choose_draft_vocabulary(data.samples, config.drafter.draft_vocab_size, target)
        if processes.is_first():
            (workdir / "config.json").write_text(config.to_json_best_effort(indent=2))
            (workdir / DRAFT_VOCAB_FILE).unlink(missing_ok=True)  # of a run stopped before its first checkpoint
            if draft_to_target is not None:
                write_draft_vocab(workdir, draft_to_target, draft.vocab_size)
        statistics = _measure(config, own, draft, data.batches)
    else:
        facts = checkpoints.facts(latest)
        check_fingerprint(facts["fingerprint"], fingerprint, str(checkpoints.directory / str(latest)))
        draft_to_target = read_draft_vocab(workdir, draft.vocab_size)
        statistics = Statistics(**{k: tuple(v) for k, v in facts["statistics"].items()})
    facts = {"fingerprint": fingerprint, "statistics": dataclasses.asdict(statistics)}
    logging.info("taps %s with typical sizes %s", draft.target_layer_ids, np.round(statistics.tap_rms, 2))

    params = _initial_params(config, own, draft, statistics)
    unit = coordinate_units(params, draft, statistics)
    changing = trainable(params, config.drafter.trunk)
    optimizer = make_optimizer(optimizer_config, unit, changing)
    state = init_state(params, optimizer, config.seed, mesh, ema=optimizer_config.ema_decay > 0)
    if latest is not None:
        state, data_state = checkpoints.restore(latest, state)
        data.batches.set_state(data_state)
        logging.info("resumed at step %d from %s", latest, checkpoints.directory)
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    logging.info(
        "drafter: %d layers, block %d, %.2f M parameters", draft.num_layers, draft.block_size, num_params / 1e6
    )

    graphdef = nnx.split(nnx.eval_shape(lambda: DFlash(draft, jnp.float32, nnx.Rngs(0))))[0]
    frozen = Frozen(
        shared=shared_weights(target, draft_to_target),
        target_to_draft_V=_inverse(draft_to_target, target.config.vocab_size, mesh),
        target=target.params,
    )
    loss = make_loss(step_config, graphdef, draft, target.config, target.graphdef)
    train_step = make_train_step(step_config, loss, optimizer, optimizer_config, unit, mesh, changing)

    def chosen(state: TrainState) -> nnx.State:
        params = state.ema if run.export_weights == "ema" else state.params
        return params if jax.process_count() == 1 else sharding.on_this_process(params, mesh)

    def bound(state: TrainState) -> Drafter:
        # A copy: the step donates the state's buffers, and the drafter lives on.
        params = jax.tree.map(lambda x: jnp.array(x, target.dtype, copy=True), chosen(state))
        return bind_drafter(draft, graphdef, params, own, draft_to_target, source=f"{workdir} step {state.step}")

    def export(state: TrainState, name: str) -> pathlib.Path:
        if not processes.is_first():
            return workdir / name
        training = {"step": int(state.step), "weights": run.export_weights}
        if run.export_weights == "ema":
            training["ema_decay"] = optimizer_config.ema_decay
        return export_drafter(
            workdir / name, draft, chosen(state), draft_to_target=draft_to_target, training=training
        )  # fmt: skip

    def save(state: TrainState) -> pathlib.Path:
        return checkpoints.save(state, data_state, facts)

    logging.info("== training")
    last_step = min(optimizer_config.total_steps, run.stop_after or optimizer_config.total_steps)
    step, data_state = int(state.step), data.batches.get_state()
    best = _read_json(workdir / "best.json") or {"step": 0, "tau": -math.inf}
    evaluation: dict[str, Any] = {}
    window: list[Any] = []  # metrics of the steps since the last log line
    pending: tuple[int, np.ndarray, Any] | None = None  # the newest step: its number, sample ids, metrics

    def settle() -> None:
        """Reads the newest step's metrics: one step late, so that the host prepares the next one meanwhile."""
        nonlocal pending
        if pending is None:
            return
        number, ids, metrics = pending
        metrics, pending = jax.device_get(metrics), None
        if not metrics["finite"]:
            where = save(state)
            raise TrainingDiverged(
                f"step {number}: loss {metrics['sums'].loss} with gradient norm {metrics['grad_norm']} is not finite. "
                f"Samples of the batch: {ids.tolist()}. The parameters before the step are saved in {where}. Look at "
                "these samples, or lower optimizer.learning_rate"
            )
        window.append(metrics)

    def assess() -> None:
        nonlocal best, evaluation
        if evaluate is None:
            return
        evaluation = dict(evaluate(own, bound(state)))
        writer.write(step, "eval", evaluation)
        logging.info("step %d evaluation: %s", step, _line(evaluation))
        _warn_if_apart(evaluation["tau"], last_summary.get("chain_tau"))
        if evaluation["tau"] > best["tau"]:
            best = {"step": step, "tau": evaluation["tau"]}
            export(state, "best")
            if processes.is_first():
                (workdir / "best.json").write_text(json.dumps(best))

    last_summary: dict[str, float] = {}
    saved_at = logged_at = time.monotonic()
    with (
        checkpoints,
        contextlib.closing(MetricsWriter(workdir, step, enabled=processes.is_first())) as writer,
        _progress(step, last_step) as bar,
        _stop_signal() as stopped,
    ):
        while step < last_step:
            batch = dict(next(data.batches))
            settle()
            data_state = data.batches.get_state()
            with jax.profiler.StepTraceAnnotation("train", step_num=step), sharding.use(mesh):
                state, metrics = train_step(state, frozen, put_batch(batch, mesh))
            step += 1
            pending = (step, sample_ids(batch), metrics)
            bar.update(1)

            if step % run.log_every == 0 or step == last_step:
                settle()
                seconds, logged_at = time.monotonic() - logged_at, time.monotonic()
                last_summary = summarise(window) | {"epoch": float(np.max(batch["epoch_B"]))}
                last_summary |= {"seconds": seconds, "blocks_per_s": last_summary["blocks"] / seconds}
                window.clear()
                writer.write(step, "train", last_summary)
                _report(bar, step, last_summary)
            due = run.save_every_minutes and time.monotonic() - saved_at > 60 * run.save_every_minutes
            stopping = stopped(step)
            if step % run.save_every == 0 or due or stopping:
                settle()
                where = save(state)
                saved_at = time.monotonic()
            if stopping:
                logging.info("stopped by a signal at step %d, saved in %s; the same command goes on", step, where)
                raise SystemExit(128 + signal.SIGTERM)
            if run.eval_every and step % run.eval_every == 0 and step < last_step:
                settle()
                assess()
                logged_at = time.monotonic()  # evaluation is not training time

        logging.info("== done at step %d", step)
        settle()
        save(state)
        assess()
    directory = export(state, "export")
    logging.info("exported to %s; best tau %.3f at step %d", directory, best["tau"], best["step"])
    return TrainResult(step, evaluation, best, directory)


def _target(config: ConfigDict, mesh: jax.sharding.Mesh | None) -> Target:
    if config.target.source == TINY:
        return tiny_target(config.seed, mesh)

    def progress(done: int, total: int, what: str) -> None:
        if total and done == total:
            logging.info("%s: complete", what)

    return load_target(config.target.source, dtype=config.target.dtype, mesh=mesh, progress=progress)


def _mesh(config: ConfigDict) -> jax.sharding.Mesh | None:
    mesh, count = from_config_dict(MeshConfig, config.mesh), jax.process_count()
    if count > 1 and mesh.size != jax.device_count():
        raise ConfigError(
            f"mesh has {mesh.size} devices ({config.mesh.to_dict()}), must use all {jax.device_count()} of the {count} "
            "processes"
        )
    if mesh.data % count:
        raise ConfigError(f"mesh.data is {mesh.data}, must be a multiple of the {count} processes")
    return mesh.make()


def configured_drafter(config: ConfigDict, target: TargetConfig) -> DrafterConfig:
    """The drafter that the config's `drafter` section asks for."""
    fields = config.drafter.to_dict()
    for name in ("init_layers", "init_from", "trunk", "draft_vocab_size"):
        fields.pop(name)
    if config.drafter.trunk == FROZEN:
        return drafter_on_trunk(config.drafter.init_from, target, **fields)
    return drafter_config(target, **fields)


def _initial_params(config: ConfigDict, target: Target, draft: DrafterConfig, statistics: Statistics) -> nnx.State:
    if not config.drafter.init_from or config.drafter.trunk == FROZEN:
        params = initial_params(
            draft, target, statistics, seed=config.seed, init_layers=tuple(config.drafter.init_layers)
        )
        return with_trunk_of(config.drafter.init_from, draft, params) if config.drafter.init_from else params
    trained = load_drafter(config.drafter.init_from, target, dtype=jnp.float32, draft_vocab=False)
    if trained.own_vocabulary:
        raise ConfigError(
            f"drafter.init_from {config.drafter.init_from} has a table or head of its own, and training uses the "
            "target's: its layers would start on others than they were trained with"
        )
    ours, theirs = dataclasses.asdict(draft), dataclasses.asdict(trained.config)
    for name, value in ours.items():
        if name != "block_size" and theirs[name] != value:
            raise ConfigError(
                f"drafter.init_from {config.drafter.init_from} has {name} = {theirs[name]}, this run has {value}"
            )
    return trained.params


def _measure(config: ConfigDict, target: Target, draft: DrafterConfig, batches: BatchIterator) -> Statistics:
    """Measures on the first rows of the first batch, and puts the iterator back."""
    start = batches.get_state()
    batch = next(batches)
    batches.set_state(start)
    token_BxS, length_B, document_BxS, position_BxS = (
        processes.first_rows(batch[name], 4) if name in batch else None
        for name in ("tokens_BxS", "length_B", "document_BxS", "position_BxS")
    )
    found = measure(
        target, token_BxS, length_B, draft.target_layer_ids, tuple(config.drafter.init_layers), position_BxS,
        document_BxS,
    )  # fmt: skip
    return Statistics(*(processes.of_the_first(numbers) for numbers in dataclasses.astuple(found)))


def _inverse(draft_to_target: np.ndarray | None, vocab: int, mesh: jax.sharding.Mesh | None) -> jax.Array | None:
    if draft_to_target is None:
        return None
    inverse_V = np.full((vocab,), -1, np.int32)
    inverse_V[draft_to_target] = np.arange(len(draft_to_target), dtype=np.int32)
    return jnp.asarray(inverse_V) if mesh is None else sharding.put(inverse_V, sharding.replicated(mesh))


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[int], bool]]:
    """stopped(step): whether this run should save and end, because of SIGTERM or of a pod's preemption notice.

    With several processes the answer is agreed on, so that all stop at the same step.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False  # only the main thread may take signals
        return
    received = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: received.set())
    try:
        yield lambda step: received.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def _warn_if_apart(tau: float, chain_tau: float | None) -> None:
    """Training and serving measure the same thing twice; a large gap is a fault or overfitting."""
    if chain_tau is not None and chain_tau > 1.3 and tau - 1 < 0.5 * (chain_tau - 1):
        logging.warning(
            "tau is %.2f when decoding, but training accuracy would give %.2f: the drafter has overfitted the training "
            "answers, or training and serving differ (answers not the target's own, labels, taps, positions)",
            tau, chain_tau,
        )  # fmt: skip


def _progress(step: int, last_step: int) -> Any:
    """A bar on a terminal; elsewhere log lines do."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() and processes.is_first()
    return tqdm(total=last_step, initial=step, disable=not shown, unit="step", dynamic_ncols=True)


def _report(bar: Any, step: int, summary: Mapping[str, float]) -> None:
    shown = {k: summary[k] for k in ("loss", "accuracy", "chain_tau", "grad_norm", "learning_rate", "blocks_per_s")}
    if bar.disable:
        logging.info("step %d epoch %d: %s", step, summary["epoch"], _line(shown))
    else:
        bar.set_postfix_str(_line(shown), refresh=False)


def _line(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, (int, float)))


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
