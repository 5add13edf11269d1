"""Every file name in a run's folder; they are spelled nowhere else."""

BUNDLE = "nagjax"  # the model_type of an exported bundle, and the field of its config.json that is nagjax's own
CONFIG = "config.json"  # the RunConfig
CORPUS = "corpus.json"  # identifies the text that the run reads
IDENTITY = "run.json"  # the run's id, which every checkpoint names
INFO = "info.json"  # sizes, FLOPs, device, versions
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"  # a folder with one folder per step
TOKENIZER = "tokenizer.json"  # unless the run reads bytes
SKIPPED = "skipped.json"  # batches left out since a rollback
LOCK = "lock.json"  # names the process that writes here
STACKS = "stacks.txt"  # the stacks of a step that hung
SAMPLE = "sample.txt"  # text that the demo generates
TENSORBOARD = "tensorboard"  # a folder
WANDB_ID = "wandb_id"
WANDB = "wandb"  # a folder, which Weights & Biases writes
ORIGIN = "origin.json"  # of an imported run: the origin of its parameters, and the size of its tokenizer
PRUNED = "prune.json"  # of a pruned run: what was removed, and what that cost
AVERAGED = "average.json"  # of an average of checkpoints: which ones, and their losses
CALIBRATION = "calibration.json"  # the skipping rate at which the run is used
SKIP_CURVE, SKIP_CURVE_PLOT = "skip_curve.json", "skip_curve.png"
MAP, MAP_DATA = "map.png", "map.json"
DIAGNOSIS, DIAGNOSIS_DATA = "diagnosis.html", "diagnosis.json"
TASKS = "tasks.json"

# In a checkpoint, and beside it what an interrupted save or removal leaves.
MANIFEST, SEAL = "manifest.json", "seal.json"  # the second is what older versions called it
SAVING, DELETING, DAMAGED = ".saving", ".deleting", ".damaged"

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
# Files of a tokenizer as transformers writes them; an imported run keeps them.
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
)

# Files that describe a run's weights or stand for them elsewhere: another run must not take them for its own.
OF_WEIGHTS = (
    *(SAMPLE, WANDB_ID, ORIGIN, PRUNED, AVERAGED, CALIBRATION, SKIP_CURVE, SKIP_CURVE_PLOT),
    *(MAP, MAP_DATA, DIAGNOSIS, DIAGNOSIS_DATA, TASKS, *TOKENIZER_FILES),
)

# Every file that a run may have written, apart from its checkpoints and its lock: what `--fresh` removes.
FILES = (CONFIG, CORPUS, IDENTITY, INFO, METRICS, SKIPPED, STACKS, *OF_WEIGHTS)
FOLDERS = (TENSORBOARD, WANDB)
