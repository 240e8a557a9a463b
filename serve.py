"""Answers with a DFlash drafter: python serve.py --config=configs/smollm2_135m.py --prompt="..."

Streams the answer, then shows plain decoding and DFlash side by side. Without --prompt it is a chat.
`--config.target.dtype=bfloat16` changes a field of the config.
"""

from absl import flags
from ml_collections import config_flags

from dflash_jax import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "An experiment of configs/.", lock_config=True)
_PROMPT = flags.DEFINE_string("prompt", None, "What to answer. Without it: a chat in the terminal.")
_STATS_JSON = flags.DEFINE_string("stats_json", None, "A file for the numbers of the comparison.")


def main(argv: list[str]) -> None:
    del argv
    from dflash_jax.serving.run import serve

    serve(_CONFIG.value, _PROMPT.value, _STATS_JSON.value)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config"])
    command_line.run(main)
