"""What the experiments with large targets have in common; no experiment itself.

`experiment` has every section of train.py and serve.py, so that one file trains, serves and compiles ahead of time;
`tiny` shrinks one to a random target of the same family.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

# What every tiny architecture has; families add their own.
SMALL = {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SMALL_DENSE = SMALL | {"intermediate_size": 96}
SMALL_DELTA = SMALL | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def experiment(
    source: str,
    architecture: Mapping[str, Any],
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...],
    **shape: int,
) -> ConfigDict:
    """Trains, serves and compiles a drafter with the recipe of the DFlash paper (arXiv 2602.06036, section 5.1).

    Args:
      source: of the target's weights, as `load_target` takes it.
      architecture: what the target's config.json holds, as far as the decoder reads it.
      shape: fields of the drafter that are not the target's: intermediate_size, num_heads, num_kv_heads, head_dim.
    """
    config = ConfigDict()
    config.seed = 0
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.target = ConfigDict({"source": source, "dtype": "bfloat16", "architecture": dict(architecture)})

    config.drafter = ConfigDict()
    config.drafter.num_layers = num_layers
    config.drafter.block_size = block_size
    config.drafter.mask_token_id = mask_token_id
    config.drafter.target_layer_ids = target_layer_ids
    for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        config.drafter[name] = config_dict.placeholder(int)  # None: the target's
    config.drafter.update(shape)
    config.drafter.draft_vocab_size = 0  # the whole vocabulary
    config.drafter.markov_rank = 0  # e.g. 256: a head that knows the token drafted before
    config.drafter.init_layers = ()
    config.drafter.init_from = ""
    config.drafter.trunk = "trained"  # "frozen": train the adapter alone, the rest is that of `init_from`
    config.drafter.init_target = ""  # of a frozen trunk: the target it was made for, to fit the adapter to
    config.drafter.projections = config_dict.placeholder(bool)  # None: where the trunk has another width
    config.drafter.source = ""  # for serve.py: the trained drafter
    config.drafter.proposal = "argmax"

    config.data = ConfigDict()
    config.data.batch_size = 16
    config.data.seq_len = 3072
    config.data.directory = ""
    config.data.features = False  # the target runs in each step: no disk
    config.data.packing = False  # True: short samples share rows
    config.data.workers = 0  # processes that read batches
    sources = ("code", "tasks", "instruction", "reasoning", "json")
    config.data.answers = ConfigDict(
        {
            "greedy": {
                "prompts": {name: config_dict.placeholder(int) for name in sources},  # None: all that there are
                "max_new_tokens": 2048,
                "max_prompt_tokens": 1024,
                "batch_size": 64,
            }
        }
    )
    config.data.natural = ConfigDict()
    config.data.stores = ()
    config.data.seed = 0
    config.data.chat_template_kwargs = ConfigDict()

    config.step = ConfigDict({"num_anchors": 512, "accumulation": 1, "compute_dtype": "bfloat16"})
    config.step.remat = "none"  # or "dots", "layers": less memory, more computing
    config.step.scan_target = False  # True: a deep target that runs in the step compiles in the time of few layers
    config.loss = ConfigDict()
    config.loss.objective = ConfigDict(
        {"hard": 1.0, "forward_kl": 0.0, "reverse_kl": 0.0, "total_variation": 0.0, "acceptance": 0.0}
    )
    config.loss.weighting = "decay"  # or "uniform", "dpace", "dpace_confidence", "dpace_continuation"
    config.loss.gamma = config_dict.placeholder(float)  # None: 7, 5, 4 for blocks of 16, 10, 8
    config.loss.dpace_alpha = 0.5  # read by the three "dpace" kinds
    config.loss.chunk_slots = 4096
    config.optimizer = ConfigDict()
    config.optimizer.kind = "adamw"  # or "muon"
    config.optimizer.learning_rate = 6e-4
    config.optimizer.total_steps = 30_000
    config.optimizer.warmup_steps = 1200
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = 1.0
    config.optimizer.ema_decay = 0.0

    config.run = ConfigDict()
    config.run.log_every = 20
    config.run.eval_every = 2000
    config.run.save_every = 1000
    config.run.save_every_minutes = config_dict.placeholder(float)  # one process only
    config.run.keep_checkpoints = 2
    config.run.stop_after = config_dict.placeholder(int)
    config.run.max_minutes = config_dict.placeholder(float)  # for a machine that is lent by the hour; one process only
    config.run.export_weights = "raw"
    config.run.max_loss_ratio = 10.0  # of the running median, three steps in a row: the run stops; inf: never
    config.run.max_grad_norm_ratio = config_dict.placeholder(float)
    config.run.profile_steps = ()  # (first, count): a trace of these steps in WORKDIR/profile
    config.run.wandb = ConfigDict({"project": "", "entity": "", "name": ""})  # arguments of wandb.init

    config.evaluation = ConfigDict()
    config.evaluation.prompts = ConfigDict({"code": 16, "instruction": 8, "reasoning": 8})
    config.evaluation.max_tokens = 512
    config.evaluation.batch_size = 8
    config.evaluation.max_prompt_tokens = 1024
    config.evaluation.cost_repeats = 20  # of each timed call, for predicted_speedup; 0: no prediction
    config.evaluation.chat_template_kwargs = ConfigDict()

    config.generation = ConfigDict({"max_tokens": 1024, "temperature": 0.0, "seed": 0})
    config.generation.chat_template_kwargs = ConfigDict()
    config.cache = ConfigDict({"rows": 32, "max_length": 8192, "page_size": 256})
    return config


def set_thinking(config: ConfigDict, on: bool) -> None:
    """Renders prompts for a target that thinks, or not, if its template is told so: for its answers, for the
    evaluation in between and in serving alike."""
    for section in (config.data, config.evaluation, config.generation):
        section.chat_template_kwargs = ConfigDict({"enable_thinking": on})


def over_hosts(config: ConfigDict) -> ConfigDict:
    """The same experiment as a step of eight rows on 128 devices, the target over all hosts: 16 parts of its experts,
    fsdp of 8. Its layers are scanned, and nothing is evaluated in between: this mesh decodes slowly."""
    config.mesh.update({"fsdp": 8, "expert": 16, "tensor": 1})
    config.data.batch_size = 8
    config.step.scan_target = True
    config.evaluation.prompts = ConfigDict()
    return config


def tiny(config: ConfigDict, architecture: Mapping[str, Any], **drafter: Any) -> ConfigDict:
    """The same experiment on a random target of the same family, small enough for a minute on two CPU cores.

    Args:
      architecture: what its config.json would hold.
      drafter: fields of the drafter besides its block, taps, mask and vocabulary.
    """
    config.target.source = "random:tiny"
    config.target.dtype = "float32"
    with config.unlocked():
        config.target.architecture = dict(architecture)
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.drafter.update(
        {
            "num_layers": 2, "block_size": 4, "mask_token_id": 2, "target_layer_ids": (0, 2), "draft_vocab_size": 200,
            "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, **drafter,
        }
    )  # fmt: skip
    config.data.batch_size = 4
    config.data.seq_len = 256
    config.data.answers.greedy.update({"max_new_tokens": 32, "max_prompt_tokens": 224, "batch_size": 8})
    config.data.answers.greedy.prompts = ConfigDict({"instruction": 24})
    config.step.update({"num_anchors": 8, "compute_dtype": "float32"})
    config.loss.chunk_slots = 256
    config.optimizer.update({"total_steps": 40, "warmup_steps": 4})
    config.run.update({"log_every": 10, "eval_every": 20})
    config.evaluation.update({"max_tokens": 24, "batch_size": 4, "max_prompt_tokens": 320})
    config.evaluation.prompts = ConfigDict({"instruction": 4})
    for section in (config.data, config.evaluation, config.generation):
        section.chat_template_kwargs = ConfigDict()  # the template of the random target has no options
    config.cache.update({"rows": 2, "max_length": 256, "page_size": 64})
    return config


def check_variant(variant: str, known: tuple[str, ...] = ("tiny",)) -> None:
    """Refuses a variant that a config does not have, by name."""
    if variant and variant not in known:
        raise ValueError(f"variant {variant!r} is unknown; known are {', '.join(map(repr, known))} and none")
