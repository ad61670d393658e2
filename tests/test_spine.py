"""One function per answer: who may call the parts below ``price``, ``replay`` and ``predict``."""

import ast
import pathlib
import subprocess
import sys

import pytest

import megatron_prism as prism

ROOT = pathlib.Path(prism.__file__).parent
CHECKOUT = ROOT.parent
# a part below the public functions -> the modules that are made of it
PARTS = {
    "megatron_prism.replay.costs.price_ops": {"replay/priced_graph.py", "replay/whatif.py"},
    "megatron_prism.replay.costs.prices.price_ops": {"replay/costs/__init__.py"},
    "megatron_prism.replay.timeline.build_timeline": {"replay/overlap.py"},
    "megatron_prism.replay.overlap.replay_with_overlap": {"replay/priced_graph.py"},
    "megatron_prism.replay.timeline.evaluate": {
        "replay/timeline.py", "replay/overlap.py", "features/predict/sampler.py",
        "features/traces/programs.py", "features/uneven/step_times.py",
    },
    "megatron_prism.features.predict.sampler.Sampler": {
        "features/predict/predict.py", "features/predict/step_draws.py",
    },
    "megatron_prism.features.hang.analyze.diagnose_dumps": {
        "features/hang/diagnose.py", "features/hang/command.py", "features/hang/confirm.py",
    },
}  # fmt: skip


def used(tree):
    """Full names of all that a module takes from this package, also as attributes of modules."""
    names, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_prism"):
            for alias in node.names:
                names[alias.asname or alias.name] = full = f"{node.module}.{alias.name}"
                found.add(full)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{names.get(node.value.id, node.value.id)}.{node.attr}")
    return found


def callers(root):
    """(file, part) of every use of a part outside the modules that are made of it."""
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        for name in used(ast.parse(path.read_text(encoding="utf-8"))) & PARTS.keys():
            if file not in PARTS[name]:
                yield file, name


def test_nobody_else_puts_the_parts_together():
    assert list(callers(ROOT)) == []
    if (CHECKOUT / "benchmarks").is_dir():
        assert list(callers(CHECKOUT / "benchmarks")) == []


@pytest.mark.parametrize(
    "code",
    [
        "from megatron_prism.replay.costs import price_ops",
        "from megatron_prism.replay import timeline\ntimeline.build_timeline(1, 2)",
        "def f():\n    from megatron_prism.replay import overlap as p\n    p.replay_with_overlap()",
        "from megatron_prism.features.predict import sampler\nsampler.Sampler(1)",
    ],
)
def test_a_planted_caller_is_found(tmp_path, code):
    (tmp_path / "new.py").write_text(code)
    assert [file for file, _ in callers(tmp_path)] == ["new.py"]


def test_public_functions_keep_their_names():
    """``megatron_prism.replay`` is the function, also where the package of that name came first."""
    code = (
        "from megatron_prism.replay.timeline import Timeline; import megatron_prism as prism; "
        "import megatron_prism.replay.network; from megatron_prism import replay; "
        "assert callable(prism.replay) and prism.replay is replay"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_is_light():
    code = (
        "import time; start = time.process_time(); import megatron_prism, sys; "
        "took = time.process_time() - start; "
        "heavy = {'torch', 'numpy', 'megatron'} & sys.modules.keys(); assert not heavy, heavy; "
        "assert took < 0.1, took"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=CHECKOUT)


def test_every_answer_in_python(tmp_path):
    """The functions of the README's first page, on programs that a person wrote."""
    path = tmp_path / "two.txt"
    path.write_text(
        "prism-program 1\nworld size=4 tp=2\nprogram ranks=0-3\n0F compute ns=10ms\n"
        "0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum\n"
    )
    programs = prism.load(path)
    assert programs.path == str(path)
    timeline = prism.replay(programs, machine="h200", what_if=prism.WhatIf(slow={3: 1.5}))
    assert timeline.to_json()["iteration_ns"] == timeline.iteration_ns > 15_000_000
    assert timeline.to_html().startswith("<!doctype html>")
    assert "traceEvents" in timeline.to_chrome_trace()
    forecast = prism.predict(programs, samples=200, seed=3)
    assert forecast.to_json()["seed"] == 3
    assert "prism predict" in forecast.to_html()
    verdict = prism.hang(programs=programs)
    assert verdict.to_json()["verdict"] == "healthy"
    with pytest.raises(prism.PrismError, match="recorded no memory|optimizer step"):
        prism.peak_memory(programs)
    two = {"a": prism.price(programs), "b": prism.price(programs, machine="b200")}
    assert prism.compare(two["a"], two["b"], names=("a", "b")).names == ("a", "b")
