"""serve.py's one call: load, then answer a prompt and compare, or chat."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from ml_collections import ConfigDict

from dflash_jax.checkpoints.load_drafter import load_drafter
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.compilation_cache import use_compilation_cache
from dflash_jax.config import ConfigError
from dflash_jax.drafters.contract import Drafter
from dflash_jax.kernels import native
from dflash_jax.models.target import Target
from dflash_jax.serving.chat import chat
from dflash_jax.serving.compare import compare, comparison_table
from dflash_jax.serving.config import ServeConfig, read_config
from dflash_jax.serving.session import DFLASH, PLAIN, Session
from dflash_jax.serving.terminal import Terminal


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

    Args:
      config: an experiment of `configs/`; sections target, drafter, generation, comparison, mesh.
      prompt: the user's message.
      stats_json: a file for the comparison's numbers.
      terminal: where input comes from and output goes.
      target, drafter: already loaded; None loads what the config names.

    Returns:
      The numbers (see `compare`); None after a chat.

    Raises:
      ConfigError: a field or argument that can not be right.
      CheckpointError: weights that can not be loaded.
    """
    settings = read_config(config)
    _check_arguments(prompt, stats_json, settings)
    terminal = Terminal() if terminal is None else terminal
    use_compilation_cache()
    if native.needs_build():
        with terminal.stage("building the native CPU kernels"):
            native.available()
    if target is None:
        with terminal.stage(f"loading {settings.target.source}") as update:
            target = load_target(
                settings.target.source, dtype=settings.target.dtype, mesh=settings.mesh.make(), progress=update
            )
    if drafter is None and settings.drafter.source:
        with terminal.stage(f"loading {settings.drafter.source}") as update:
            drafter = load_drafter(settings.drafter.source, target, progress=update)
    session = Session(target, drafter, settings.generation, settings.drafter)
    if prompt is None:
        return chat(session, terminal)
    stats = _answer_and_compare(session, terminal, prompt, settings.comparison.repeats)
    if stats_json is not None:
        pathlib.Path(stats_json).write_text(json.dumps(stats, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return stats


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
        parent = pathlib.Path(stats_json).absolute().parent
        if not parent.is_dir() or pathlib.Path(stats_json).is_dir():
            raise ConfigError(f"--stats_json is {str(stats_json)!r}, which can not be a file: {parent} must exist")
