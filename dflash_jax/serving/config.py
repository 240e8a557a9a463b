"""The config of serve.py as dataclasses: every field is checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from dflash_jax.config import ConfigError, from_config_dict
from dflash_jax.decoding.request import PENALTIES, check_logit_bias
from dflash_jax.decoding.sampling import FIELDS
from dflash_jax.sharding import MeshConfig


@dataclasses.dataclass(frozen=True)
class TargetSection:
    """`source` as `load_target` takes it, or "random:tiny" for a trial. dtype: float32, bfloat16 or float16.

    Attributes:
      architecture: None, or what the published config.json holds: `--compile_only` then needs no file. Loading reads
        the checkpoint's own config.json.
    """

    source: str
    dtype: str | None = "float32"
    architecture: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class DrafterSection:
    """`source` as `load_drafter` takes it, "random:tiny" beside such a target; "" decodes plainly.

    Attributes:
      architecture: as of the target.
      block_size: tokens of a round, root included; None is the trained size.
      proposal: "argmax" or "drawn"; read by sampled decoding only.
    """

    source: str = ""
    block_size: int | None = None
    proposal: str = "argmax"
    architecture: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check("drafter.block_size", self.block_size, lambda k: k is None or k >= 2, "at least 2, or None")
        _check("drafter.proposal", self.proposal, lambda p: p in ("argmax", "drawn"), "argmax or drawn")


@dataclasses.dataclass(frozen=True)
class GenerationSection:
    """How answers are made.

    Attributes:
      max_tokens: the most tokens of an answer.
      temperature, top_p, top_k, min_p: sampling; 0, 1, 0, 0 mean off, temperature 0 is greedy.
      presence_penalty, frequency_penalty, repetition_penalty: as in `generate`; 0, 0, 1 mean off.
      logit_bias: {token id: number}; ids may be texts, as JSON has them.
      seed: of the sampling; turn i of a chat uses seed + i.
      chat_template: False gives the prompt to the model as it is.
      chat_template_kwargs: options that the template reads, such as enable_thinking.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int | str, float] = dataclasses.field(default_factory=dict)
    seed: int = 0
    chat_template: bool = True
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("generation.max_tokens", self.max_tokens, lambda n: n >= 1, "at least 1")
        _check(
            "generation.temperature", self.temperature, lambda t: 0 <= t < math.inf,
            "a finite number >= 0; 0 decodes greedily",
        )  # fmt: skip
        _check("generation.top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1]; 1 switches top-p off")
        _check("generation.top_k", self.top_k, lambda k: k >= -1, "at least 1; 0 or -1 switches top-k off")
        _check("generation.min_p", self.min_p, lambda p: 0 <= p <= 1, "in [0, 1]; 0 switches min-p off")
        for name in PENALTIES:
            _check(f"generation.{name}", getattr(self, name), *FIELDS[name])
        self.bias()

    def bias(self, vocab_size: int | None = None) -> dict[int, float]:
        """`logit_bias` with whole numbers for ids.

        Raises:
          ConfigError: it is no mapping, an id is none (of the vocabulary, if its size is given), or a value can not be.
        """
        bias = self.logit_bias
        if isinstance(bias, Mapping):
            bias = {int(key) if isinstance(key, str) and key.isdecimal() else key: bias[key] for key in bias}
        try:
            check_logit_bias(bias, "generation.logit_bias", vocab_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return bias


@dataclasses.dataclass(frozen=True)
class ComparisonSection:
    """repeats: timed runs of plain decoding and of DFlash, in turn; medians are shown."""

    repeats: int = 3

    def __post_init__(self) -> None:
        _check("comparison.repeats", self.repeats, lambda n: n >= 1, "at least 1")


@dataclasses.dataclass(frozen=True)
class CacheSection:
    """The cache of `--compile_only`, as a server's engine would have it. A chat has one row, as long as it needs.

    Attributes:
      rows: prompts decoded together.
      max_length: prompt and answer together, of each row; None: the target's context.
      page_size: slots a page; None for a page a row.
    """

    rows: int = 1
    max_length: int | None = None
    page_size: int | None = None

    def __post_init__(self) -> None:
        _check("cache.rows", self.rows, lambda n: n >= 1, "at least 1")
        _check("cache.max_length", self.max_length, lambda n: n is None or n >= 2, "at least 2, or None")
        _check("cache.page_size", self.page_size, lambda n: n is None or n >= 1, "at least 1, or None")


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """The whole config; a section for each of its groups."""

    target: TargetSection
    drafter: DrafterSection = dataclasses.field(default_factory=DrafterSection)
    generation: GenerationSection = dataclasses.field(default_factory=GenerationSection)
    comparison: ComparisonSection = dataclasses.field(default_factory=ComparisonSection)
    cache: CacheSection = dataclasses.field(default_factory=CacheSection)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)


_SECTIONS = {
    "target": TargetSection,
    "drafter": DrafterSection,
    "generation": GenerationSection,
    "comparison": ComparisonSection,
    "cache": CacheSection,
    "mesh": MeshConfig,
}


# Sections of train.py; a config that trains a drafter may serve it too.
_TRAINING = ("seed", "data", "step", "loss", "optimizer", "run", "evaluation")


def read_config(config: ConfigDict) -> ServeConfig:
    """The dataclasses of a config. Of one that trains, sections and fields of training are left out.

    Raises:
      ConfigError: a section or field is unknown, missing, or has a value that can not be.
    """
    sections = {}
    groups = config.to_dict()
    if trains(config):
        known = {field.name for field in dataclasses.fields(DrafterSection)}
        groups = {name: values for name, values in groups.items() if name not in _TRAINING}
        groups["drafter"] = {name: value for name, value in groups["drafter"].items() if name in known}
    for name, values in groups.items():
        if name not in _SECTIONS:
            raise ConfigError(f"the config has a section {name!r}; serve.py knows {', '.join(_SECTIONS)}")
        sections[name] = from_config_dict(_SECTIONS[name], values, name)
    return from_config_dict(ServeConfig, sections)


def trains(config: ConfigDict) -> bool:
    """Whether the config is one of train.py (and perhaps of serve.py as well)."""
    return "optimizer" in config and "drafter" in config


def _check(name: str, value: Any, ok: Any, must: str) -> None:
    try:
        right = bool(ok(value))
    except TypeError:
        right = False
    if not right:
        raise ConfigError(f"{name} is {value!r}, must be {must}")
