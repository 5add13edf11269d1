"""The cases listed for compilation, and the checks of compiled programs for faults. Needs no compiler wheels."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.aot import cases as listing
from pallas_kernels.aot import ptx
from pallas_kernels.aot.__main__ import main
from pallas_kernels.aot.cases import EDGES, TABLE, Case, cases, measure, program, quickest
from pallas_kernels.aot.report import facts, inserted, markdown, outdated, resident
from pallas_kernels.aot.step import training_step
from pallas_kernels.aot.targets import TARGETS, abstract_mesh, missing
from pallas_kernels.dispatch import choose
from pallas_kernels.launch import Launch
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_op_and_every_kernel_of_the_platform_is_listed(target):
    listed = {(c.op, c.implementation) for c in cases(target) if c.verb != "step"}
    for name, op in all_ops().items():
        for implementation, way in op.implementations.items():
            with use_abstract_mesh(abstract_mesh(target)):
                runs = way.platforms and target.platform in way.platforms and not way.unavailable(target.platform)
            here = runs or way.platforms is None and target.platform != "rocm"
            of = [sample(name, *shape) for shape in TABLE + EDGES]
            taken = any(way.refusal(*s.args, **s.constants) is None for s in of)
            assert ((name, implementation) in listed) == (here and taken), (name, implementation)
            if implementation == target.best and way.platforms and not way.reserve(*of[0].args, **of[0].constants):
                assert choose(op, None, *of[0].args, **of[0].constants).on(target.platform) == implementation
    assert len(listed) >= len(all_ops())


def test_the_quick_cases_have_every_op_in_every_implementation_and_whole_lines_of_the_tables():
    target = TARGETS["h200"]
    whole, quick = cases(target), quickest(cases(target))
    assert len(quick) < len(whole) / 2
    assert {(c.op, c.implementation, c.verb) for c in quick if c.verb != "step"} == {
        (c.op, c.implementation, c.verb) for c in whole if c.verb != "step"
    }
    results = {(target.name, c): {"bytes": 1_000_000_000, "registers": 1, "spilled": 0} for c in whole}
    few = {(target.name, c): results[target.name, c] for c in quick}
    page = inserted("".join(f"<!-- aot: {name} -->\n<!-- end -->\n" for name in ("bytes", "facts")), results)
    assert outdated(page, few) == [] and outdated(page.replace("1000 | 1000", "1900 | 1000"), few) != []


def test_reference_program_has_the_sizes_of_its_case():
    fn, args = program(Case("add_rms_norm", "reference", "forward", 16, 64, "bfloat16"))
    total, normed = jax.eval_shape(fn, *args)
    assert total.shape == normed.shape == (16, 64) and total.dtype == jnp.bfloat16


def test_shared_gradient_is_one_output():
    fn, args = program(Case("add_rms_norm", "xla", "backward", 16, 64, "bfloat16"))
    assert [x.shape for x in jax.eval_shape(fn, *args)] == [(16, 64), (64,)]


CALL = 'custom-call(%p), custom_call_target="tpu_custom_call"'


def text(*lines):
    body = "\n".join(f"  %{name} = f32[{size}]{{0}} {rest}" for name, size, rest in lines)
    return f"HloModule m\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def test_faults_of_a_program_are_found(monkeypatch):
    case = Case("add_rms_norm", "mosaic_tpu", "forward", *TABLE[0])
    monkeypatch.setattr(listing, "expected_bytes", lambda case: 2 * 4 * 100_000)
    p, kernel = ("p", 100_000, "parameter(0)"), ("k", 100_000, CALL)

    assert measure(case, text(p, kernel), 800_000)["problems"] == []
    (problem,) = measure(case, text(p, kernel), 700_000)["problems"]
    assert "CostEstimate says 700000" in problem
    (problem,) = measure(case, text(p, kernel, ("c", 100_000, "copy(%k)")), 800_000)["problems"]
    assert "a second pass" in problem
    (problem,) = measure(case, text(p, ("k", 120_000, CALL)), 800_000)["problems"][:1]
    assert "the kernel reads and writes 880000 bytes" in problem
    gather = text(p, kernel, ("g", 10, "all-gather(%p), dimensions={0}"))
    assert any("all-gather" in problem for problem in measure(case, gather, 800_000)["problems"])
    assert "no tpu_custom_call in the program" in measure(case, text(p), None)["problems"]


def test_a_step_may_sum_gradients_and_nothing_else():
    case = Case("module:function", "mosaic_tpu", "step")
    p, kernel = ("p", 4, "parameter(0)"), ("k", 4, CALL)
    assert measure(case, text(p, kernel, ("r", 4, "all-reduce(%k)")), None)["problems"] == []
    problems = measure(case, text(p, kernel, ("r", 4, "all-to-all(%k)")), None)["problems"]
    assert problems == ["unexpected collectives: ['all-to-all']", "no gradient is summed over the devices"]


def test_table_gives_ratios_to_the_reference():
    shape = TABLE[0]
    figures = {("reference", "forward"): 400, ("reference", "saving"): 600, ("reference", "backward"): 400}
    figures |= {("mosaic_tpu", "forward"): 200, ("mosaic_tpu", "backward"): 300}
    results = {
        ("v5e", Case("add_rms_norm", name, verb, *shape)): {"bytes": mega * 10**6}
        for (name, verb), mega in figures.items()
    }
    line = markdown(results).splitlines()[-1]
    assert line == ("| add_rms_norm | 16384 x 2048 bfloat16 | v5e | 400 | 200 | 0.50 | 1000 | - | 500 | 0.50 |")


def test_a_training_step_is_made_for_every_op_by_its_sample_alone():
    for name in {case.op for case in cases(TARGETS["v5e"]) if case.verb == "step"}:
        step, args, _ = training_step(name, jax.devices()[:1], "best")
        parameters, loss = jax.eval_shape(step, *args)
        assert [x.shape for x in parameters] == [x.shape for x in args[0]] and loss.shape == ()


def test_bad_options_are_refused_before_anything_is_compiled(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--op", "nag_updte"])
    assert "invalid choice: 'nag_updte'" in capsys.readouterr().err
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(ValueError, match="the page has 0 marks <!-- aot: bytes -->"):
        main(["--readme", str(tmp_path / "page.md")])
    with pytest.raises(ValueError, match="the page has 0 marks <!-- aot: bytes -->"):
        main(["--check", str(tmp_path / "page.md")])


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr("pallas_kernels.aot.targets._installed", lambda module: False)
    for name, words in {"v5e": "libtpu", "h200": "CUDA plugin", "mi300": "triton"}.items():
        assert words in missing(TARGETS[name])


def test_a_gpu_that_is_left_to_xla_must_not_have_a_kernel():
    case = Case("module:function", "best", "step")
    r, kernel = ("r", 4, "all-reduce(%p)"), ("k", 4, 'custom-call(%p), custom_call_target="__gpu$xla.gpu.triton"')
    p = ("p", 4, "parameter(0)")
    assert measure(case, text(p, r), None, "xla")["problems"] == []
    assert "left to XLA" in measure(case, text(p, r, kernel), None, "xla")["problems"][0]
    assert measure(case, text(p, r, kernel), None, "pallas_triton")["problems"] == []
    assert "no gpu.triton" in measure(case, text(p, r), None, "pallas_triton")["problems"][0]


def test_facts_of_the_assembler_by_backend():
    """A block of 20 KB and 2 warps of 64 registers: 16 programs of a multiprocessor by registers."""
    said = "Compiling entry function 'add_rms_norm_backward' for 'sm_90a'\n 0 bytes spill stores\nUsed 64 registers"
    found = ptx.figures(said + said.replace("add_rms_norm", "fusion").replace("64", "99"), "add_rms_norm")
    assert found == {"registers": 64, "spilled": 0} and ptx.figures(said, "nag_update") == {}
    assert resident(64, Launch(1000, 64, 0, 20480)) == 8 and resident(64, Launch(10**6, 64, 0, 20480)) == 16
    results = {("h200", Case("add_rms_norm", "pallas_triton", "backward", *TABLE[0])): found}
    (line,) = facts(results).splitlines()[2:]
    assert line.startswith("| add_rms_norm | backward | 2048 | 64 | 0 | ")
    page = "before\n<!-- aot: bytes -->\nold\n<!-- end -->\n<!-- aot: facts -->\nold\n<!-- end -->\nafter\n"
    assert inserted(page, results) == page.replace("old", markdown({}), 1).replace("old", facts(results))
    assert facts(results) != facts({})


def test_figures_that_a_page_has_otherwise_are_outdated():
    results = {("h200", Case("add_rms_norm", "pallas_triton", "backward", *TABLE[0])): {"registers": 64, "spilled": 0}}
    (line,) = facts(results).splitlines()[2:]
    assert outdated(line, results) == [] and outdated(line.replace("| 64 |", "| 65 |"), results) == []
    assert outdated(line.replace("| 64 |", "| 70 |"), results) == [line] and outdated("a page", results) == [line]
