"""Trains a drafter: python train.py --config=configs/smollm2_135m_dflash.py --workdir=DIR

The same command on the same workdir resumes. `--config.optimizer.total_steps=500` changes a field,
`--config=configs/smollm2_135m_dflash.py:tiny` takes a variant.
"""

from absl import flags, logging
from ml_collections import config_flags

from dflash_jax import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "An experiment of configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints, metrics and the drafter go; resumes what is there.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the processes of a pod (jax.distributed.initialize).")


def main(argv: list[str]) -> None:
    del argv
    import jax

    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    logging.info("process %d of %d, devices: %s", jax.process_index(), jax.process_count(), jax.devices())

    from dflash_jax.training.loop import train

    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main)
