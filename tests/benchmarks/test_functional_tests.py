"""How many GPUs one of Megatron-LM's functional tests had, and whose failure it is."""

from dataclasses import replace

import pytest

from benchmarks.accuracy.functional_tests import Result, Trial, recipe_gpus, said, world_size

RECIPE = """
spec: {{model: gpt, nodes: {nodes}, gpus: {gpus}}}
products:
- test_case: [small]
  products: [{{scope: [mr]}}]
"""


def test_gpus_are_those_of_the_recipe_h100s_first(tmp_path):
    for name, nodes, gpus in (("gb200", 2, 4), ("h100", 1, 2)):
        file = tmp_path / f"tests/test_utils/recipes/{name}/gpt.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(RECIPE.format(nodes=nodes, gpus=gpus))
    assert recipe_gpus(tmp_path) == {"gpt/small": 2}
    tensor = {"MODEL_ARGS": {"--tensor-model-parallel-size": 4}}
    assert (world_size(tensor, 2), world_size(tensor, 8)) == (4, 8)


@pytest.mark.parametrize(
    ("real", "sharded", "found"),
    [(64, 1.0, 64), (8, 1.0, 8), (64, 0.0, 8)],
    ids=["", "base", "whole"],
)
def test_a_release_test_has_the_gpus_of_its_resident_bytes(real, sharded, found, monkeypatch):
    """``sharded``: of the optimizer's 12 bytes a parameter; beside them 6 are on every rank."""

    def held(gpus):
        return int(1e9 * (6 + 12 * (sharded / gpus + 1 - sharded)))

    result = Result("gpt/release", "works", golden_resident=held(real) if sharded else 10**9)
    trial = Trial(None, None, 2, 1, None, None, {})
    once = lambda self, test, gpus: replace(result, gpus=gpus or 8, resident=held(gpus or 8))  # noqa: E731
    monkeypatch.setattr(Trial, "once", once)
    assert trial.run("gpt/release").gpus == found


def test_a_failure_of_megatrons_own_is_no_crash(tmp_path):
    log = tmp_path / "log"
    error = 'File "/a/b.py", line 1, in f\nAttributeError: object has no attribute '
    for name, outcome in (("use_legacy_models", "Megatron's own"), ("other", "crashes")):
        log.write_text(f"Traceback (most recent call last)\n  {error}'{name}'\n")
        assert said(1, log)[0] == outcome
