"""Trains a drafter: python train.py --config=configs/smollm2_135m_dflash.py --workdir=DIR

The same command on the same workdir resumes. `--config.optimizer.total_steps=500` changes a field,
`--config=configs/smollm2_135m_dflash.py:tiny` takes a variant.

    python train.py --config=... --workdir=DIR --data_only

only answers the prompts and stores features, on a mesh that need not be the one to train on (docs/pods.md).

    python train.py --config=... --compile_only --topology=v5p:4x4x8

compiles the train step for a TPU slice that need not be there: bytes a device, and whether it fits (docs/pods.md).
"""

from absl import flags, logging
from ml_collections import config_flags

from dflash_jax import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "An experiment of configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints, metrics and the drafter go; resumes what is there.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the processes of a pod (jax.distributed.initialize).")
_DATA_ONLY = flags.DEFINE_bool("data_only", False, "Make answers and features, and train nothing.")
_COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Compile for --topology, and load and train nothing.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "The TPU slice of --compile_only, such as v5p:4x4x8.")
_STATS_JSON = flags.DEFINE_string("stats_json", None, "A file for the numbers of --compile_only.")


def main(argv: list[str]) -> None:
    del argv
    if _COMPILE_ONLY.value:
        from dflash_jax.training.compile_only import compile_only

        compile_only(_CONFIG.value, _TOPOLOGY.value, _STATS_JSON.value)
        return
    if _DISTRIBUTED.value:
        command_line.join_processes()
    import jax

    logging.info("process %d of %d, devices: %s", jax.process_index(), jax.process_count(), jax.devices())

    if _DATA_ONLY.value:
        from dflash_jax.training.data_only import make_data

        make_data(_CONFIG.value, _WORKDIR.value)
        return
    from dflash_jax.training.loop import train

    train(_CONFIG.value, _WORKDIR.value)


def _check_flags(values: dict[str, object]) -> bool:
    if values["compile_only"] != (values["topology"] is not None):
        raise flags.ValidationError("--compile_only and --topology belong together; such as --topology=v5p:4x4x8")
    if values["compile_only"] and values["data_only"]:
        raise flags.ValidationError("--compile_only makes no data; leave out --data_only or it")
    if values["compile_only"] == (values["workdir"] is not None):
        raise flags.ValidationError("--workdir is needed to train, and not with --compile_only")
    if values["stats_json"] is not None and not values["compile_only"]:
        raise flags.ValidationError("--stats_json is for the numbers of --compile_only; training writes metrics.jsonl")
    return True


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    checked = ["compile_only", "data_only", "topology", "workdir", "stats_json"]
    flags.register_multi_flags_validator(checked, _check_flags)
    command_line.run(main)
