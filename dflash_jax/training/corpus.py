"""From a config's `data` section to batches: prompts, the target's answers, features, iterator.

Every stage lies on disk under the data directory and is only continued, never repeated: a killed run takes
up where it stopped, and a second run on the same directory begins to train at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from absl import logging

from dflash_jax import sharding
from dflash_jax.checkpoints.load_drafter import drafter_directory, load_drafter
from dflash_jax.config import ConfigError, from_config_dict
from dflash_jax.data import held_out
from dflash_jax.data.batches import make_iterator
from dflash_jax.data.features import FeatureStore, compute_features
from dflash_jax.data.packing import PackedRows, sample_order
from dflash_jax.data.prompts import Counts, Prompt, check_counts, file_sources, mixture
from dflash_jax.data.regenerate import InStep, regenerate_share, store_natural
from dflash_jax.data.responses import ResponseStore, Sample, read_samples
from dflash_jax.data.vocabulary import draft_vocabulary
from dflash_jax.decoding.sampling import check_sampling_value
from dflash_jax.models.target import Target
from dflash_jax.training import processes

# A store and the ids of the prompts that this run takes from it, None for all: other runs may have asked for more.
_Wanted = tuple[pathlib.Path, frozenset[str] | None]
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class BatchIterator(Protocol):
    """Batches for ever, from a position that can be saved: what a Grain iterator is."""

    def __next__(self) -> Mapping[str, np.ndarray]: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


@dataclasses.dataclass
class TrainingData:
    """What a run trains on.

    Attributes:
      batches: see `BatchIterator`; every batch has the same shapes, those of `dflash_jax.data.batches.make_iterator`
        (taps_BxSxTD and hidden_BxSxD in any floating dtype, or neither: then the step runs the target).
      samples: what the batches are made of; the draft vocabulary is chosen from them.
      facts: JSON-able, what makes this data this data; a resumed run must have the same.
    """

    batches: BatchIterator
    samples: Sequence[Sample]
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class AnswerConfig:
    """Prompts that the target answers, into a store of their own.

    Attributes:
      prompts: how many of each source: {source: number}, or pairs of both where a source's name has a dot, as those of
        files do; None takes all (see `dflash_jax.data.prompts.load`).
      batch_size: rows decoded together.
      chat_template_kwargs: None: those of the `data` section. Stores with thinking on and off lie side by side so.
      drafter: "", or a drafter as `load_drafter` takes it, that makes answering faster and changes no answer's law.
      Other fields: see `dflash_jax.data.regenerate.regenerate`.
    """

    prompts: Counts
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    batch_size: int = 16
    max_prompt_tokens: int | None = None
    multi_turn: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    drafter: str = ""

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any]) -> AnswerConfig:
        """The fields of store `name` of the `data.answers` section, checked before anything is answered.

        Raises:
          ConfigError: the name can be no folder beside the others, or a field is wrong.
        """
        where = f"data.answers.{name}"
        if name == "natural" or name.startswith("features") or ".part-" in name or not _PLAIN_NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: {name!r} can not be the name of a store: it names a folder, beside `natural` and "
                "`features-...`; take letters, digits, '_' and '-'"
            )
        config = from_config_dict(cls, values, where)
        if not config.prompts:
            raise ConfigError(
                f"{where}.prompts is empty: name a source and how many of its prompts; see docs/training.md"
            )
        check_counts(config.prompts, f"{where}.prompts")
        for field in ("max_new_tokens", "batch_size"):
            if getattr(config, field) < 1:
                raise ConfigError(f"{where}.{field} is {getattr(config, field)}, must be at least 1")
        if config.max_prompt_tokens is not None and config.max_prompt_tokens < 1:
            raise ConfigError(
                f"{where}.max_prompt_tokens is {config.max_prompt_tokens}, must be at least 1, or None for what the "
                "target's context leaves"
            )
        try:
            for field in ("temperature", "top_k", "top_p", "min_p"):
                check_sampling_value(field, getattr(config, field), where)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return config


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The `data` section.

    Attributes:
      batch_size, seq_len: rows of a batch, over all processes, and tokens of a row; longer samples keep their head.
      packing: whole samples share rows where they fit, each as if it were alone: fewer rows of padding. An epoch then
        has fewer steps, and `step.num_anchors` of a row go to all its samples.
      answers: {store name: fields of `AnswerConfig`}.
      natural: how many finished conversations of each source are taken as they are, written as `prompts` above.
      stores: folders of further response stores, made before.
      directory: where stores and features lie; "" is `data` in the workdir.
      features: cache taps and final states on disk (cheap steps); False runs the target in every step (no disk,
        the choice when the target is large and the accelerator fast).
      workers: processes that read batches, each with its own copy of the samples; 0: threads of this one. Threads do
        unless features are read from a slow disk.
      keep_out: "human_eval": prompts of files and datasets that share text with it are left out, as they are of the
        program's own sources, so that what the drafter reaches there says something; "" for no check.
      seed: of prompts and of the order of samples.
    """

    batch_size: int
    seq_len: int
    answers: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    natural: Counts = ()
    stores: Sequence[str] = ()
    directory: str = ""
    features: bool = True
    packing: bool = False
    workers: int = 0
    keep_out: str = "human_eval"
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.answers or self.natural or self.stores):
            raise ConfigError("data has neither answers, natural nor stores: there is nothing to train on")
        for name, least in (("batch_size", 1), ("seq_len", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name} is {getattr(self, name)}, must be at least {least}")
        for name, fields in self.answers.items():
            AnswerConfig.of(name, fields)
        check_counts(self.natural, "data.natural")
        if self.seed < 0:
            raise ConfigError(f"data.seed is {self.seed}, must be at least 0")
        if self.workers < 0:
            raise ConfigError(f"data.workers is {self.workers}, must be at least 0")
        if self.keep_out not in ("human_eval", ""):
            raise ConfigError(f"data.keep_out is {self.keep_out!r}, must be 'human_eval' or '' for no check")


def open_training_data(
    values: Mapping[str, Any], target: Target, tap_ids: Sequence[int], workdir: pathlib.Path
) -> TrainingData:
    """Makes what is missing of answers and features, and opens the batches. Every process calls it.

    Args:
      values: the `data` section of a config; see `DataConfig`.
      tap_ids: target layers whose states the drafter reads.
    """
    config = from_config_dict(DataConfig, values, "data")
    if config.seq_len > target.config.max_positions and not config.packing:
        raise ConfigError(
            f"data.seq_len is {config.seq_len}, must be at most {target.config.max_positions}, the target's context; "
            "longer rows need data.packing"
        )
    for name, fields in config.answers.items():
        if (own := AnswerConfig.of(name, fields)).drafter:
            drafter_directory(own.drafter)  # one that is not there is said before anything is answered
        if own.max_new_tokens >= target.config.max_positions:
            raise ConfigError(
                f"data.answers.{name}.max_new_tokens is {own.max_new_tokens}, must be less than "
                f"{target.config.max_positions}, the target's context"
            )
    share, shares = processes.row_share(target.mesh)
    if config.batch_size % shares:
        raise ConfigError(f"data.batch_size is {config.batch_size}, must be a multiple of the {shares} processes")
    directory = pathlib.Path(config.directory) if config.directory else workdir / "data"
    if config.directory and (config.answers or config.natural):
        processes.check_shared(directory)
    stores: list[_Wanted] = [(pathlib.Path(path), None) for path in config.stores]
    # All sources are read before the first answer: what is wrong with the last of them shall not show after hours.
    asked = {name: _prompts(config, AnswerConfig.of(name, fields).prompts) for name, fields in config.answers.items()}
    natural = processes.in_turn(lambda: _natural(config, target, directory))
    stores += [*_answers(config, asked, target, directory), *natural]
    samples = read_samples(
        [ResponseStore(path) for path, _ in stores], config.seq_len, prompts=[wanted for _, wanted in stores],
        vocab_size=target.config.vocab_size,
    )  # fmt: skip
    if not samples:
        answered = sum(len(ResponseStore(path)) for path, _ in stores)
        raise ConfigError(
            f"data.seq_len is {config.seq_len}: of {answered} answers none keeps two supervised tokens within it. "
            "Raise it, or shorten the prompts; where there are no answers, raise max_prompt_tokens of data.answers"
        )
    supervised = sum(int(s.loss_mask_S.sum()) for s in samples)
    logging.info("%d samples, %d supervised tokens", len(samples), supervised)
    # A folder a choice of taps: runs that share the answers may differ in them.
    folder = directory / "-".join(["features", *map(str, tap_ids)])
    features = _features(target, samples, folder, tap_ids) if config.features else None
    batches = make_iterator(
        samples, features, batch_size=config.batch_size // shares, seq_len=config.seq_len, seed=config.seed,
        packing=config.packing, process_index=share, process_count=shares,
        num_workers=config.workers,
    )  # fmt: skip
    if config.packing:
        _report_packing(samples, config.seq_len, config.seed)
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.ascontiguousarray(sample.token_S, "<i4").tobytes())
    facts = {
        "samples": len(samples),
        "tokens_sha256": digest.hexdigest()[:16],
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "seed": config.seed,
        "packing": config.packing,
        "workers": config.workers,  # the saved position is one of each
    }
    return TrainingData(batches, samples, facts)


def _answers(
    config: DataConfig, asked: Mapping[str, list[Prompt]], target: Target, directory: pathlib.Path
) -> list[_Wanted]:
    """Fills the stores of answers: all processes at the same time, each its share, or, where none has the target whole,
    all in step."""
    stores = []
    part, parts = processes.row_share(target.mesh)
    whole = sharding.whole_on_each_process(target.mesh)
    in_step = None if whole else InStep(processes.is_first(), processes.all_done)
    for name, fields in config.answers.items():
        answers = AnswerConfig.of(name, fields)
        options = {f.name: getattr(answers, f.name) for f in dataclasses.fields(answers) if f.name != "prompts"}
        if answers.chat_template_kwargs is None:
            options["chat_template_kwargs"] = config.chat_template_kwargs
        options["drafter"] = load_drafter(answers.drafter, target) if answers.drafter else None
        prompts = asked[name]
        report, folders = regenerate_share(
            target, prompts, directory / name,
            part=part, parts=parts, wait=processes.all_done, in_step=in_step, **options,
        )  # fmt: skip
        logging.info("answers %r: %s", name, report)
        stores += [(folder, frozenset(p.id for p in prompts)) for folder in folders]
    return stores


def _natural(config: DataConfig, target: Target, directory: pathlib.Path) -> list[_Wanted]:
    """Fills the store of natural text, if any is asked for."""
    if not config.natural:
        return []
    prompts = _prompts(config, config.natural)
    report = store_natural(
        target, prompts, directory / "natural", chat_template_kwargs=config.chat_template_kwargs
    )  # fmt: skip
    logging.info("natural text: %s", report)
    return [(directory / "natural", frozenset(p.id for p in prompts))]


def _prompts(config: DataConfig, counts: Counts) -> list[Prompt]:
    checked = config.keep_out and file_sources(counts)
    return mixture(counts, config.seed, held_out=held_out.human_eval() if checked else None)


def _features(
    target: Target, samples: Sequence[Sample], path: pathlib.Path, tap_ids: Sequence[int]
) -> FeatureStore:  # fmt: skip
    """All processes compute at the same time, each its share, or, where none has the target whole, all in step."""
    part, parts = jax.process_index(), jax.process_count()
    in_step = not sharding.whole_on_each_process(target.mesh)
    store = compute_features(
        target, samples, path, tap_ids, part=part, parts=parts, wait=processes.all_done if in_step else None,
        progress=not in_step or part == 0,
    )  # fmt: skip
    if parts == 1:
        return store
    processes.all_done("features")
    return FeatureStore(path, store.fingerprint)


def _report_packing(samples: Sequence[Sample], seq_len: int, seed: int) -> None:
    lengths = [min(sample.length, seq_len) for sample in samples]
    rows = len(PackedRows(lengths, sample_order(len(samples), seed), seq_len).rows_of(0))
    tokens = sum(lengths) / seq_len
    logging.info(
        "packing: %d samples in %d rows; %.1f %% of the positions of an epoch hold tokens, unpacked %.1f %%",
        len(samples), rows, 100 * tokens / rows, 100 * tokens / len(samples),
    )  # fmt: skip


def choose_draft_vocabulary(samples: Sequence[Sample], size: int, target: Target) -> np.ndarray | None:
    """Target ids a drafter may propose, ascending; None for the whole vocabulary (size 0 or the target's)."""
    if not size or size == target.config.vocab_size:
        return None
    chosen = draft_vocabulary(samples, size, target.config.vocab_size, target.eos_token_ids)
    logging.info(
        "draft vocabulary: %d ids, %d of them seen, %.2f %% of supervised tokens", size, chosen.seen,
        100 * chosen.coverage,
    )  # fmt: skip
    return chosen.draft_to_target_U
