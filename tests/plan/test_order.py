"""How `auto` is resolved, which options are filled in, and what is refused before any compiler starts."""

import dataclasses
import shlex

import pytest

from nagjax import arguments
from nagjax.errors import UserError
from nagjax.layers import flash
from nagjax.layers.config import BlockConfig, OtherBlocks
from nagjax.mod.config import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.options import read_options, run_options
from nagjax.plan.order import choose, filled, mesh_shape, options
from nagjax.plan.topology import parse
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig
from nagjax.train.distributed.mesh import batch_parts


def run(mesh=None, batch=16, accumulate=1, **model):
    model = ModelConfig(**{"depth": 4, "width": 256, "context": 1024} | model)
    train = TrainConfig(batch=batch, accumulate=accumulate)
    return RunConfig(find_scheme("nag")(), model, train=train, mesh=mesh or MeshConfig())


@pytest.mark.parametrize(
    "name, context, attention", [("v5e:2x2", 1024, "splash"), ("v5e:2x2", 1000, "xla"), ("h200x8", 1024, "xla")]
)
def test_the_platform_chooses(name, context, attention):
    config, choices = choose(run(context=context), parse(name))
    assert (choices.attention, choices.dtype) == (attention, "bfloat16")
    assert config.model.attention in ("auto", attention) and config.model.dtype == "bfloat16"


@pytest.mark.parametrize(
    "model", [{"block": BlockConfig(softcap=30.0)}, {"causal": False}], ids=("softcap", "both ways")
)
def test_what_only_xla_computes_is_planned_with_it(model):
    assert choose(run(**model), parse("v5e:2x2"))[1].attention == "xla"


def test_a_window_for_which_splash_would_need_too_much_is_planned_with_xla():
    block = BlockConfig(window=1024, others=OtherBlocks(places=(1,)))
    config = run(context=131072, batch=4, block=block)
    assert choose(config, parse("v5p:2x2x1"))[1].attention == "xla"
    assert choose(run(context=131072, batch=4), parse("v5p:2x2x1"))[1].attention == "splash"


@pytest.mark.parametrize(
    "name, model, message",
    [
        ("h200x8", {"attention": "splash"}, "attention = 'splash': runs on tpu only"),
        ("v5e:2x2", {"attention": "cudnn"}, "attention = 'cudnn': runs on gpu only"),
        ("v5e:2x2", {"kernels": "pallas_triton"}, "kernels = 'pallas_triton': runs on gpu only"),
    ],
)
def test_what_training_there_refuses_is_not_planned(name, model, message):
    with pytest.raises(UserError, match=message):
        filled(run(**model), parse(name), 257, True, True)


def test_the_program_with_a_softcap_is_the_one_that_a_gpu_runs():
    assert not choose(run(block=BlockConfig(softcap=30.0)), parse("h200x8"))[1].notes


@pytest.mark.parametrize("model", [{"dtype": "float32"}, {"block": BlockConfig(softcap=30.0)}])
def test_cudnn_that_the_run_refuses_is_not_planned(model):
    with pytest.raises(UserError, match="attention = 'cudnn': (takes bfloat16|does not support block.softcap)"):
        choose(run(attention="cudnn", **model), parse("h200x8"))


def test_attention_of_skipping_tokens_is_said():
    def attention(**mod):
        config = dataclasses.replace(run(), model=dataclasses.replace(run().model, mod=ModConfig(**mod)))
        return choose(config, parse("v5e:2x2"))[1].attention

    assert attention(rate=(0.6,)) == attention(rate=(0.5,), kv="selected") == "splash"
    assert "xla where selected keys" in attention(rate=(0.6,), kv="selected")


def test_attention_that_cannot_be_compiled_here_is_said():
    assert "cuDNN" in choose(run(), parse("h200x8"))[1].notes[0]
    assert not choose(run(attention="xla"), parse("h200x8"))[1].notes
    config, choices = choose(run(attention="tokamax"), parse("h200x8"))
    assert config.model.attention == choices.attention == "tokamax" and not choices.notes
    assert not choose(run(dtype="float32"), parse("h200x8"))[1].notes
    assert not choose(run(), parse("v5e:2x2"))[1].notes


def test_what_is_counted_in_full_is_said():
    """A window that a kernel's blocks leave out, and the sizes of adaptive capacity."""

    def notes(machine="v5e:2x2", **model):
        return " ".join(choose(run(**model), parse(machine))[1].notes)

    windowed = BlockConfig(window=64)
    assert "see a window" in notes(block=windowed) and "see a window" not in notes(block=BlockConfig(window=4096))
    assert "see a window" not in notes(block=windowed, attention="xla")
    assert "see a window" not in notes("h200x8", block=windowed) and "tokamax" not in notes(block=windowed)
    assert "adaptive capacity" in notes(mod=ModConfig(rate=(0.5,), capacity="adaptive"))
    assert not notes(mod=ModConfig(rate=(0.5,)))


def test_the_attention_of_a_long_context_on_a_gpu_is_the_one_that_runs(monkeypatch):
    """One row of 32k tokens on each of two GPUs: cuDNN's mask would take 2 GiB, and half of that with four of 16k."""
    monkeypatch.setattr(flash, "tokamax_installed", lambda: True)

    def attention(context, batch, **mod):
        model = dataclasses.replace(run().model, context=context, mod=ModConfig(**mod))
        config = dataclasses.replace(run(), model=model, train=dataclasses.replace(run().train, batch=batch))
        return choose(config, parse("h200x2"))[1].attention

    assert attention(32768, 2) == "tokamax" and attention(16384, 4) == "xla" and attention(16384, 6) == "tokamax"
    assert attention(32768, 2, rate=(0.5,), kv="selected") == "xla"


def test_a_batch_and_a_mesh_that_are_not_given():
    topology = parse("v5e:4x4")
    config = filled(run(), topology, 500, batch_given=False, mesh_given=False)
    assert mesh_shape(config, topology) == {"data": 1, "fsdp": 16, "expert": 1, "tensor": 1, "sequence": 1}
    assert config.train.batch == 16 * 8 and config.model.vocab == 500
    kept = filled(run(), topology, 500, batch_given=True, mesh_given=True)
    assert mesh_shape(kept, topology)["data"] == 16 and kept.train.batch == 16
    parts = filled(run(accumulate=4), topology, 500, batch_given=False, mesh_given=False)
    assert parts.train.batch == 16 * 8 * 4


@pytest.mark.parametrize(
    "context, mesh, batch",
    [(1024, {"tensor": 4}, 32), (32768, {"sequence": 4}, 4), (32768, {"sequence": 16}, 4), (1024, {"tensor": 16}, 8)],
)
def test_each_chip_gets_as_many_tokens_however_the_model_is_split(context, mesh, batch):
    """8192, or a whole sequence's part where that is more."""
    topology, model = parse("v5e:4x4"), dataclasses.replace(run().model, context=context)
    config = dataclasses.replace(run(MeshConfig(**mesh)), model=model)
    found = filled(config, topology, 500, batch_given=False, mesh_given=True)
    shape = mesh_shape(found, topology)
    assert found.train.batch == batch
    assert batch // batch_parts(shape) * context // shape["sequence"] == 8192


@pytest.mark.parametrize(
    "config, words",
    [
        (run(MeshConfig(fsdp=3)), "mesh"),
        (run(MeshConfig(data=2, fsdp=4)), "must be 16"),
        (run(batch=24), "try 16"),
        (run(batch=32, accumulate=4), "try 64"),
        (run(MeshConfig(sequence=16), batch=1, context=1000), "divisible by mesh.sequence = 16; try 992"),
    ],
)
def test_what_does_not_divide_is_refused(config, words):
    with pytest.raises(UserError, match=words):
        mesh_shape(config, parse("v5e:4x4"))


def config_of(words):
    return read_options(arguments.parse(run_options(), words, "nagjax train")).config()


def test_the_command_line_gives_the_same_run():
    topology = parse("v5e:4x4")
    given = "--depth 6 --width 128 --context 256 --batch 64 --remat block --mod.rate 0.5 --no-qk-norm --scheme.ramp 0.2"
    given += " --mlp gelu --positions learned"
    config = config_of([*given.split(), "--mesh.fsdp", "8"])
    again = config_of(options(config, mesh_shape(config, topology)).split())
    assert mesh_shape(again, topology) == mesh_shape(config, topology)
    assert (again.model, again.train, again.scheme) == (config.model, config.train, config.scheme)


@pytest.mark.parametrize(
    "given", ["--width 256 --moe.experts 4", "--width 7 --block.head-width 8", "--width 384 --heads 8 --kv-heads 8"]
)
def test_the_command_line_leaves_out_what_follows(given):
    config = config_of(given.split())
    said = options(config, mesh_shape(config, parse("v5e:2x2")))
    assert config_of(said.split()).model == config.model
    assert not {"--moe.hidden", "--hidden", "--kv-heads"} & {*said.split()}


def test_a_shell_reads_the_values_that_were_given():
    given = ["--data.path", "my texts/corpus", "--tasks", "a b.jsonl", "it's.jsonl", "--batch", "16"]
    config = config_of(given)
    again = config_of(shlex.split(options(config, mesh_shape(config, parse("v5e:4x4")))))
    assert again.data.path == "my texts/corpus" and again.train.tasks == config.train.tasks
