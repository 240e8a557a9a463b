"""Answers with a DFlash drafter: python serve.py --config=configs/smollm2_135m.py --prompt="..."

Streams the answer, then shows plain decoding and DFlash side by side. Without --prompt it is a chat.
`--config.target.dtype=bfloat16` changes a field of the config.

With `--distributed` on every host of a slice, the first host has the terminal (docs/pods.md).

    python serve.py --config=configs/qwen35_397b_a17b.py --compile_only --topology=v5p:4x4x8

compiles the decode step for a TPU slice that need not be there: bytes a device, roofline, speedup (docs/pods.md).
"""

from absl import flags
from ml_collections import config_flags

from dflash_jax import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "An experiment of configs/.", lock_config=True)
_PROMPT = flags.DEFINE_string("prompt", None, "What to answer. Without it: a chat in the terminal.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the processes of a pod (jax.distributed.initialize).")
_STATS_JSON = flags.DEFINE_string("stats_json", None, "A file for the numbers of the comparison, or of --compile_only.")
_COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Compile for --topology, and load and decode nothing.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "The TPU slice of --compile_only, such as v5p:4x4x8.")
_TAU = flags.DEFINE_list("tau", ["2", "4", "6", "8"], "Acceptance lengths that --compile_only foretells speedups for.")


def main(argv: list[str]) -> None:
    del argv
    if _COMPILE_ONLY.value:
        from dflash_jax.serving.compile_only import compile_only

        compile_only(_CONFIG.value, _TOPOLOGY.value, _STATS_JSON.value, [float(tau) for tau in _TAU.value])
        return
    if _DISTRIBUTED.value:
        command_line.join_processes(patience_s=20)  # all end together, unless one has failed alone
    from dflash_jax.serving.run import serve

    serve(_CONFIG.value, _PROMPT.value, _STATS_JSON.value)


def _check_flags(values: dict[str, object]) -> bool:
    if values["compile_only"] != (values["topology"] is not None):
        raise flags.ValidationError("--compile_only and --topology belong together; such as --topology=v5p:4x4x8")
    try:
        [float(tau) for tau in values["tau"]]
    except ValueError as error:
        raise flags.ValidationError(f"--tau is {','.join(values['tau'])!r}, must be numbers, as 2,4,6") from error
    if values["compile_only"] and values["prompt"] is not None:
        raise flags.ValidationError("--compile_only answers no --prompt")
    if values["compile_only"] and values["distributed"]:
        raise flags.ValidationError("--compile_only is one process; leave --distributed out")
    return True


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    flags.register_multi_flags_validator(["compile_only", "topology", "prompt", "distributed", "tau"], _check_flags)
    command_line.run(main)
