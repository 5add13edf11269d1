"""Finds classes by the name of their file or through entry points of other packages, and suggests names to a user who
named something unknown."""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from nagjax.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ELSEWHERE = {  # other libraries' names of options: the names here
    **{
        "learning_rate": "lr",
        "peak_lr": "lr",
        "wd": "weight_decay",
        "warmup_steps": "warmup",
        "warmup_ratio": "warmup",
    },
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "layers", "num_hidden_layers", "blocks"), "depth"),
    **dict.fromkeys(("d_model", "dim", "n_embd", "embed_dim", "hidden_size", "hidden_dim", "emb_dim"), "width"),
    **dict.fromkeys(("seq_len", "seq_length", "sequence_length", "block_size", "max_seq_len"), "context"),
    **dict.fromkeys(("n_heads", "n_head", "num_heads", "num_attention_heads"), "heads"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("intermediate_size", "d_ff", "mlp_dim", "ffn_dim"), "hidden"),
    **dict.fromkeys(("max_steps", "num_steps", "n_steps", "train_steps", "total_steps", "max_iters"), "steps"),
    **dict.fromkeys(("batch_size", "global_batch_size", "train_batch_size"), "batch"),
    **dict.fromkeys(("out_dir", "output_dir", "run_dir", "folder", "dir", "workdir"), "out"),
    **dict.fromkeys(("gradient_accumulation", "grad_accum", "gradient_accumulation_steps"), "accumulate"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_grad_norm", "gradient_clip"), "clip"),
    **dict.fromkeys(("optim", "optimizer_name"), "optimizer"),
    **dict.fromkeys(("random_seed", "rng_seed"), "seed"),
    **dict.fromkeys(("model", "architecture", "residual"), "scheme"),
    **dict.fromkeys(("max_tokens", "max_new_tokens", "num_tokens", "n_tokens"), "tokens"),
}
SCHEME_GROUP = "nagjax.schemes"  # the group of entry points that are residual schemes


def classes_by_file[T](package: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """The subclasses of `base` in a package's modules whose `name` is the name of their module, sorted by name."""
    found = {}
    for module in sorted(name for _, name, _ in pkgutil.iter_modules(package.__path__)):
        for value in vars(importlib.import_module(f"{package.__name__}.{module}")).values():
            if isinstance(value, type) and issubclass(value, base) and value.name == module:
                found[module] = value
    return found


def installed(group: str) -> "dict[str, EntryPoint]":
    """The entry points that installed packages have in this group, by name."""
    from importlib.metadata import entry_points  # takes 50 ms, and few commands need it

    return {point.name: point for point in entry_points(group=group)}


def pick[T](field: str, name: str, known: Mapping[str, T], plural: str) -> T:
    """`known[name]`. Raises UserError for `field` if there is no such name; the message has the nearest name and all
    names."""
    if not isinstance(name, str) or name not in known:
        raise UserError(field, name, f"{nearest(str(name), known)}known {plural}: {', '.join(known)}")
    return known[name]


def nearest(name: str, known: Iterable[str]) -> str:
    """The question "did you mean ...? " with the nearest known name, or "" if none is near. For a name with a group
    (`mod.rate`) the last part may match, too."""
    plain = lambda text: text.lower().lstrip("-").replace("-", "_")  # noqa: E731
    whole = {plain(own): own for own in known}
    ends = {own.rpartition(".")[2]: own for own in reversed(whole)}
    asked = ELSEWHERE.get(plain(name), "")
    asked = asked if asked in whole else plain(name)
    for names, cutoff in ((whole, 1.0), (ends, 1.0), (whole, 0.65), (ends, 0.8)):
        if near := difflib.get_close_matches(asked, names, n=1, cutoff=cutoff):
            found = near[0] if names is whole else ends[near[0]]
            return f"did you mean {whole[found]!r}? "
    return ""
