"""`train.py --data_only`: what a run trains on, made before it and, if need be, on another mesh."""

from __future__ import annotations

import pathlib

from absl import logging
from ml_collections import ConfigDict

from dflash_jax import sharding
from dflash_jax.training import from_config, processes
from dflash_jax.training.adapter import configured_drafter
from dflash_jax.training.corpus import open_training_data
from dflash_jax.training.workdir import held


def make_data(config: ConfigDict, workdir: str | pathlib.Path) -> None:
    """Answers prompts and stores features as `train` would first, and ends; `train` on the workdir finds them.

    A mesh that decodes well keeps the weights where they are used (mesh.tensor, mesh.expert); one that trains well cuts
    them along mesh.fsdp, and would gather them in every round. Stores do not depend on the mesh.

    Args:
      config, workdir: see `dflash_jax.training.loop.train`.

    Raises:
      ConfigError, CheckpointError: see there.
    """
    workdir = pathlib.Path(workdir).absolute()
    from_config.check_sections(config, data=True, evaluation=False)
    with held(workdir):
        mesh = from_config.configured_mesh(config)
        if not sharding.whole_on_each_process(mesh):
            from_config.check_without_own_target(config, evaluation=False)
        target = from_config.configured_target(config, mesh)
        draft = configured_drafter(config.drafter, target.config)
        from_config.check_for_target(config.drafter, target.config)
        open_training_data(config.data.to_dict(), processes.here(target), draft.target_layer_ids, workdir)
        processes.all_done("data")
        logging.info("== data is made; the same command without --data_only trains on it")
