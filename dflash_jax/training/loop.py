"""A training run, from a config to an exported drafter. Read `_train` from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from ml_collections import ConfigDict

from dflash_jax import sharding
from dflash_jax.checkpoints.draft_vocab import DRAFT_VOCAB_FILE, write_draft_vocab
from dflash_jax.checkpoints.export_drafter import check_replaceable, export_drafter
from dflash_jax.checkpoints.load_drafter import bind_drafter, check_mask, shared_weights
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.data.batches import sample_ids
from dflash_jax.data.responses import write_atomically
from dflash_jax.drafters.contract import Drafter
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models.scanned import stack_layers
from dflash_jax.models.target import Target
from dflash_jax.training import from_config, processes
from dflash_jax.training.acceptance import Evaluate, open_evaluation
from dflash_jax.training.adapter import configured_drafter, trainable
from dflash_jax.training.checkpointing import Checkpoints, check_fingerprint
from dflash_jax.training.corpus import TrainingData, choose_draft_vocabulary, open_training_data
from dflash_jax.training.initialise import Statistics, coordinate_units
from dflash_jax.training.interrupts import stop_signal
from dflash_jax.training.metrics import MetricsWriter, summarise
from dflash_jax.training.optimizer import OptimizerConfig, make_optimizer
from dflash_jax.training.profiling import Profile, peak_device_bytes
from dflash_jax.training.run_config import RunConfig
from dflash_jax.training.step import Frozen, StepConfig, TrainState, init_state, make_loss, make_train_step, put_batch
from dflash_jax.training.watch import Explosion, TrainingDiverged, warn_if_apart
from dflash_jax.training.workdir import BEST_FILE, held, no_best, read_best, read_own_vocabulary

# Parts of a run's fingerprint, for fields that were added after a run had been saved.
_KINDS = {"target.config": TargetConfig, "drafter": DrafterConfig, "step": StepConfig, "optimizer": OptimizerConfig}


@dataclasses.dataclass
class TrainResult:
    """How a run ended: steps taken, last evaluation, where the best and the last drafter were exported."""

    step: int
    evaluation: dict[str, Any]
    best: dict[str, Any]
    export: pathlib.Path


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
      workdir: receives config.json, metrics.jsonl, tensorboard/, checkpoints/, best/ and export/, and where
        it comes to that profile/ and diverged/.
      target, data, evaluate: None builds them from the config; a notebook or a test may pass its own.
        `evaluate(target, drafter)` runs the draft-verify loop on held-out prompts and returns at least "tau"; with
        several processes each calls it, on its own devices, or, where none has the target whole, all together.

    Raises:
      ConfigError: a field is wrong, or differs from what the checkpoints in workdir were trained with; or another
        process trains there.
      CheckpointError: what lies in workdir is damaged; says what to delete.
      TrainingDiverged: see there.
      SystemExit: SIGTERM came; a checkpoint was saved.
    """
    began = time.monotonic()
    workdir = pathlib.Path(workdir).absolute()
    run, optimizer_config, step_config = from_config.check_sections(
        config, data=data is None, evaluation=evaluate is None
    )
    with held(workdir):
        for name in ("best", "export"):  # what can not be replaced there shall not show at the end
            check_replaceable(workdir / name)
        return _train(config, workdir, began, (run, optimizer_config, step_config), target, data, evaluate)


def _train(
    config: ConfigDict, workdir: pathlib.Path, began: float, sections: tuple[RunConfig, OptimizerConfig, StepConfig],
    target: Target | None, data: TrainingData | None, evaluate: Evaluate | None,
) -> TrainResult:  # fmt: skip
    """`train` in a workdir that no other run uses; `began` is when that was called."""
    run, optimizer_config, step_config = sections
    logging.info("== target")
    mesh = from_config.configured_mesh(config)
    if not sharding.whole_on_each_process(mesh):
        from_config.check_without_own_target(config, evaluation=evaluate is None)
    if target is None:
        target = from_config.configured_target(config, mesh)
    logging.info("%s: %d layers, hidden size %d", target.source, target.config.num_layers, target.config.hidden_size)

    logging.info("== data")
    draft = configured_drafter(config.drafter, target.config)
    check_mask(draft, target, "Set drafter.mask_token_id to a special token that the chat format never uses")
    from_config.check_for_target(config.drafter, target.config)
    own = processes.here(target)  # answers, reads, measures and decodes; `target` takes the training steps
    if evaluate is None:  # first: what is wrong with it shall show before prompts are answered
        evaluate = open_evaluation(config.evaluation.to_dict(), own)
    if data is None:
        data = open_training_data(config.data.to_dict(), own, draft.target_layer_ids, workdir)

    logging.info("== drafter")
    fingerprint = {
        "seed": config.seed,
        "target": {
            "source": target.source,
            "dtype": jnp.dtype(target.dtype).name,
            "config": dataclasses.asdict(target.config),
        },
        "drafter": dataclasses.asdict(draft),
        "init": {
            "layers": list(config.drafter.init_layers),
            "from": config.drafter.init_from,
            "trunk": config.drafter.trunk,
            "target": config.drafter.get("init_target") or None,
        },
        "draft_vocab_size": config.drafter.draft_vocab_size,
        "step": dataclasses.asdict(step_config),
        "optimizer": dataclasses.asdict(optimizer_config),
        "data": data.facts,
    }
    fingerprint = json.loads(json.dumps(fingerprint))  # tuples become lists, as they come back from disk
    others = {"run": dataclasses.asdict(run), "evaluation": config.get("evaluation", ConfigDict()).to_dict()}
    processes.check_same({**fingerprint, **others}, f"workdir {workdir}")
    checkpoints = Checkpoints(workdir / "checkpoints", run.keep_checkpoints)
    latest = checkpoints.latest
    processes.check_same({"the latest checkpoint": latest}, f"workdir {workdir}")
    if latest is None:
        draft_to_target = choose_draft_vocabulary(data.samples, config.drafter.draft_vocab_size, target)
        if processes.is_first():
            (workdir / "config.json").write_text(config.to_json_best_effort(indent=2))
            for name in (DRAFT_VOCAB_FILE, BEST_FILE):  # of a run stopped before its first checkpoint
                (workdir / name).unlink(missing_ok=True)
            if draft_to_target is not None:
                write_draft_vocab(workdir, draft_to_target, draft.vocab_size)
        statistics = from_config.measured(config, own, draft, data.batches)
    else:
        facts = checkpoints.facts(latest)
        check_fingerprint(facts["fingerprint"], fingerprint, str(checkpoints.directory / str(latest)), _KINDS)
        draft_to_target = read_own_vocabulary(workdir, config.drafter.draft_vocab_size, draft.vocab_size)
        statistics = Statistics(**{k: tuple(v) for k, v in facts["statistics"].items()})
    facts = {"fingerprint": fingerprint, "statistics": dataclasses.asdict(statistics)}
    logging.info("taps %s with typical sizes %s", draft.target_layer_ids, np.round(statistics.tap_rms, 2))

    params = from_config.first_params(config, own, draft, statistics, data.batches if latest is None else None)
    unit = coordinate_units(params, draft, statistics)
    changing = trainable(params, config.drafter.trunk)
    optimizer = make_optimizer(optimizer_config, unit, changing)
    state = init_state(params, optimizer, config.seed, mesh, ema=optimizer_config.ema_decay > 0)
    del params  # the state has copies of its own, laid out on the mesh: these would lie beside them to the end
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
        target_to_draft_V=from_config.inverse_vocabulary(draft_to_target, target.config.vocab_size, mesh),
        target=stack_layers(target.params, target.graphdef, mesh) if step_config.scan_target else target.params,
        whole_head_DxV=from_config.whole_head(step_config.loss, target, draft_to_target),
    )
    loss = make_loss(step_config, graphdef, draft, target.config, target.graphdef)
    train_step = make_train_step(step_config, loss, optimizer, optimizer_config, unit, mesh, changing)

    def chosen(state: TrainState) -> nnx.State:
        return state.ema if run.export_weights == "ema" else state.params

    def bound(state: TrainState) -> Drafter:
        # A copy: the step donates the state's buffers, and the drafter lives on.
        params = chosen(state) if own is target else processes.whole(chosen(state), mesh)
        params = jax.tree.map(lambda x: jnp.array(x, target.dtype, copy=True), params)
        shared = frozen.shared if own is target else sharding.on_this_process(frozen.shared, mesh)
        return bind_drafter(
            draft, graphdef, params, own, draft_to_target, f"{workdir} step {state.step}", shared
        )  # fmt: skip

    def export(state: TrainState, name: str) -> pathlib.Path:
        params = processes.whole(chosen(state), mesh)
        if not processes.is_first():
            return workdir / name
        training = {"step": int(state.step), "weights": run.export_weights}
        if run.export_weights == "ema":
            training["ema_decay"] = optimizer_config.ema_decay
        return export_drafter(workdir / name, draft, params, draft_to_target=draft_to_target, training=training)

    def save(state: TrainState) -> pathlib.Path:
        return checkpoints.save(state, data_state, facts)

    logging.info("== training")
    last_step = min(optimizer_config.total_steps, run.stop_after or optimizer_config.total_steps)
    step, data_state = int(state.step), data.batches.get_state()
    best = no_best() if latest is None else read_best(workdir)
    if not (workdir / "best").exists():  # a kill came between the old one and the new
        best = no_best()
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
        loss, norm = float(metrics["sums"].loss / max(metrics["sums"].denominator, 1e-30)), float(metrics["grad_norm"])
        if not metrics["finite"]:
            where = save(state)
            checkpoints.wait()
            raise TrainingDiverged(
                f"step {number}: loss {metrics['sums'].loss} with gradient norm {metrics['grad_norm']} is not finite. "
                f"Samples of the batch: {ids.tolist()}. The parameters before the step are saved in {where}. Look at "
                "these samples, or lower optimizer.learning_rate"
            )
        exploded = explosion.see(number, ids, loss, norm)
        if exploded:
            with Checkpoints(workdir / "diverged", 1) as aside:
                where = aside.save(state, data_state, facts)
            raise TrainingDiverged(
                f"{exploded}. The state behind the step is saved in {where}, apart from the checkpoints: the same "
                f"command goes back to step {checkpoints.latest or 0} and comes here again. Look at these samples; in "
                "another workdir lower optimizer.learning_rate or optimizer.clip_norm, or lengthen warmup_steps "
                "(drafter.init_from takes over exported weights); or let it pass: raise the ratio (inf: never)"
            )
        window.append(metrics)

    def assess() -> None:
        nonlocal best, evaluation
        if evaluate is None:
            return
        evaluation = dict(evaluate(own, bound(state)))
        logging.info("step %d evaluation: %s", step, _line(evaluation))
        warn_if_apart(evaluation["tau"], last_summary.get("chain_tau"))
        # One process decides for all: they export together, and each has read the best so far from a shared disk.
        if any(processes.of_the_first([evaluation["tau"] > best["tau"]])):
            best = {"step": step, "tau": evaluation["tau"]}
            export(state, "best")
            if processes.is_first():
                write_atomically(workdir / BEST_FILE, json.dumps(best))
        # Last: a resumed run takes an evaluation that has its line for done, and one that a kill cut short must come
        # again, with its export.
        writer.write(step, "eval", evaluation)

    last_summary: dict[str, float] = {}
    explosion = Explosion(run)
    again = evaluate is not None and step >= last_step  # a run that was ended already
    writer = MetricsWriter(workdir, step, processes.is_first(), run.wandb, config.to_dict(), again)
    saved_at = logged_at = time.monotonic()
    with (
        checkpoints,
        contextlib.closing(writer),
        Profile(workdir / "profile", run.profile_steps) as profile,
        _progress(step, last_step) as bar,
        stop_signal() as stopped,
    ):
        missed = run.eval_every and 0 < step < last_step and step % run.eval_every == 0
        if missed and not any(processes.of_the_first([writer.evaluated])):
            assess()  # the run was stopped between the checkpoint and its evaluation
            logged_at = time.monotonic()
        while step < last_step:
            batch = dict(next(data.batches))
            placed = put_batch(batch, mesh)  # on its way while the device still takes the step before
            settle()
            data_state = data.batches.get_state()
            profile.before(step + 1)
            with jax.profiler.StepTraceAnnotation("train", step_num=step), sharding.use(mesh):
                state, metrics = train_step(state, frozen, placed)
            step += 1
            profile.after(step, metrics)
            pending = (step, sample_ids(batch), metrics)
            bar.update(1)
            if run.max_minutes is not None and step < last_step and time.monotonic() - began > 60 * run.max_minutes:
                logging.info("%g minutes are over at step %d of %d", run.max_minutes, step, last_step)
                last_step = step

            if step % run.log_every == 0 or step == last_step:
                settle()
                seconds, logged_at = time.monotonic() - logged_at, time.monotonic()
                last_summary = summarise(window) | {"epoch": float(np.max(batch["epoch_B"]))}
                last_summary |= {"seconds": seconds, "blocks_per_s": last_summary["blocks"] / seconds}
                if (peak := peak_device_bytes()) is not None:
                    last_summary["peak_device_bytes"] = float(peak)
                window.clear()
                writer.write(step, "train", last_summary)
                _report(bar, step, last_summary)
            due = run.save_every_minutes and time.monotonic() - saved_at > 60 * run.save_every_minutes
            stopping = stopped(step)
            if step % run.save_every == 0 or due or stopping:
                settle()
                if stopping or not explosion.suspected:
                    where = save(state)
                    saved_at = time.monotonic()
            if stopping:
                checkpoints.wait()
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


def _progress(step: int, last_step: int) -> Any:
    """A bar on a terminal; elsewhere log lines do."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() and processes.is_first()
    return tqdm(total=last_step, initial=step, disable=not shown, unit="step", dynamic_ncols=True)


def _report(bar: Any, step: int, summary: Mapping[str, float]) -> None:
    shown = {k: summary[k] for k in ("loss", "accuracy", "chain_tau", "grad_norm", "learning_rate", "blocks_per_s")}
    if "peak_device_bytes" in summary:
        shown["peak_device_GB"] = summary["peak_device_bytes"] / 1e9
    if bar.disable:
        logging.info("step %d epoch %d: %s", step, summary["epoch"], _line(shown))
    else:
        bar.set_postfix_str(_line(shown), refresh=False)


def _line(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, (int, float)))
