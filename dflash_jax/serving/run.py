"""serve.py's one call: load, then answer a prompt and compare, or chat."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dflash_jax.checkpoints.load_drafter import load_drafter
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.compilation_cache import use_compilation_cache
from dflash_jax.config import ConfigError, check_output_file
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.lockstep import Leader, follow
from dflash_jax.drafters.contract import Drafter
from dflash_jax.kernels import native
from dflash_jax.models.target import Target
from dflash_jax.serving.chat import chat
from dflash_jax.serving.compare import compare, comparison_table
from dflash_jax.serving.config import ServeConfig, TargetSection, read_config
from dflash_jax.serving.session import DFLASH, PLAIN, Session
from dflash_jax.serving.terminal import Terminal, Update
from dflash_jax.training.dry_run import TINY, tiny_drafter, tiny_target


def serve(
    config: ConfigDict,
    prompt: str | None = None,
    stats_json: str | pathlib.Path | None = None,
    *,
    terminal: Terminal | None = None,
    target: Target | None = None,
    drafter: Drafter | None = None,
) -> dict[str, Any] | None:
    """Answers a prompt and compares plain decoding with DFlash on it; without a prompt, chats.

    Several processes call it with the same config: the first has the user, the others follow it (decoding/lockstep.py)
    until it ends.

    Args:
      config: an experiment of `configs/`; sections target, drafter, generation, comparison, mesh.
      prompt: the user's message.
      stats_json: a file for the comparison's numbers.
      terminal: where input comes from and output goes.
      target, drafter: already loaded; None loads what the config names.

    Returns:
      The numbers (see `compare`); None after a chat, and on processes that follow.

    Raises:
      ConfigError: a field or argument that can not be right.
      CheckpointError: weights that can not be loaded.
      SystemExit: on processes that follow, the first has ended with an error.
    """
    settings = read_config(config)
    if jax.process_index() > 0:
        return follow(lambda: _load(settings, Terminal.silent(), target, drafter))
    terminal = Terminal() if terminal is None else terminal
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(Leader()) if jax.process_count() > 1 else None
        _check_arguments(prompt, stats_json, settings)
        if leader is not None:
            leader.load()
        target, drafter = _load(settings, terminal, target, drafter)
        make_engine = Engine if leader is None else leader.make_engine
        session = Session(target, drafter, settings.generation, settings.drafter, make_engine)
        if prompt is None:
            return chat(session, terminal)
        stats = _answer_and_compare(session, terminal, prompt, settings.comparison.repeats)
    if stats_json is not None:
        pathlib.Path(stats_json).write_text(json.dumps(stats, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return stats


def _load(
    settings: ServeConfig, terminal: Terminal, target: Target | None, drafter: Drafter | None
) -> tuple[Target, Drafter | None]:
    """What of both is not there already."""
    use_compilation_cache()
    if native.needs_build():
        with terminal.stage("building the native CPU kernels"):
            native.available()
    if target is None:
        with terminal.stage(f"loading {settings.target.source}") as update:
            target = _load_target(settings.target, settings.mesh.make(), update)
    if drafter is None and settings.drafter.source:
        with terminal.stage(f"loading {settings.drafter.source}") as update:
            drafter = _load_drafter(settings.drafter.source, target, update)
    return target, drafter


def _load_target(section: TargetSection, mesh: Mesh | None, update: Update) -> Target:
    if section.source != TINY:
        return load_target(section.source, dtype=section.dtype, mesh=mesh, progress=update)
    return tiny_target(mesh=mesh, architecture=section.architecture, dtype=section.dtype)


def _load_drafter(source: str, target: Target, update: Update) -> Drafter:
    if source != TINY:
        return load_drafter(source, target, progress=update)
    if target.source != TINY:
        raise ConfigError(
            f"drafter.source is {TINY!r}, which drafts for a target of that name only, not {target.source}"
        )
    return tiny_drafter(target)


def _answer_and_compare(session: Session, terminal: Terminal, prompt: str, repeats: int) -> dict[str, Any]:
    request = session.request(session.encode([{"role": "user", "content": prompt}]))
    modes = [PLAIN] if session.drafter is None else [DFLASH, PLAIN]
    names = {PLAIN: "plain decoding", DFLASH: "DFlash"}
    with terminal.stage(f"compiling {names[modes[0]]}"):
        session.prepare(modes[0], request)
    for delta in session.stream(modes[0], request):
        terminal.write(delta.text)
    terminal.write("\n\n")
    for mode in modes[1:]:
        with terminal.stage(f"compiling {names[mode]}"):
            session.prepare(mode, request)
    with terminal.stage("measuring" if len(modes) == 1 else "measuring both in turn") as update:
        stats = compare(session, request, repeats, update)
    terminal.out.print(comparison_table(stats))
    return stats


def _check_arguments(prompt: str | None, stats_json: str | pathlib.Path | None, settings: ServeConfig) -> None:
    """What can be known to be wrong before anything is loaded."""
    if prompt is not None:
        if not prompt.strip():
            raise ConfigError("--prompt is empty; leave it out to chat")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--prompt is no valid UTF-8 at character {error.start}") from error
    elif not settings.generation.chat_template:
        raise ConfigError("generation.chat_template is False, but a chat needs the template; give a --prompt")
    if stats_json is not None:
        if prompt is None:
            raise ConfigError("--stats_json is set, but a chat has no comparison to write; give a --prompt")
        check_output_file("stats_json", stats_json)
