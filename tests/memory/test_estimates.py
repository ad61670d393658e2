"""What is not known of a job's memory is said by name."""

import pytest

from megatron_prism.core.jobs import job_settings
from megatron_prism.memory.estimates import described, estimates
from megatron_prism.memory.job_peaks import MemoryReport

DENSE = {"--num-layers": "4", "--attention-backend": "unfused"}
ROUTED = {**DENSE, "--num-experts": "8"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (DENSE, []),
        ({"num_experts": "8"}, ["routing"]),
        (ROUTED, ["routing"]),
        ({**ROUTED, "--moe-pad-expert-input-to-capacity": ""}, []),
        # a rank has all experts, whose tokens are in one tensor
        ({**ROUTED, "--moe-grouped-gemm": ""}, []),
        ({**ROUTED, "--moe-grouped-gemm": "", "--expert-model-parallel-size": "2"}, ["routing"]),
        ({**DENSE, "--cross-entropy-loss-fusion": ""}, []),
        ({**DENSE, "--sft": ""}, ["unfused attention"]),
        ({**DENSE, "--cuda-graph-impl": "local"}, ["CUDA graphs"]),
        ({**DENSE, "--cuda-graph-impl": "none"}, []),
        ({**DENSE, "--exp-avg-dtype": "bfloat16"}, []),
        ({**DENSE, "--fp8-recipe": "mxfp8"}, ["mxfp8"]),
        ({**DENSE, "fp8": "hybrid", "fp8_recipe": "mxfp8"}, ["mxfp8"]),
        ({**DENSE, "--fp8-recipe": "blockwise"}, []),
        ({**DENSE, "--tp-comm-overlap": ""}, ["--tp-comm-overlap"]),
        ({**DENSE, "--enable-cuda-graph": ""}, ["CUDA graphs"]),
    ],
)
def test_what_is_estimated_of_a_job(settings, words):
    found = estimates(job_settings.as_text(settings))
    assert [one.what.startswith(word) for one, word in zip(found, words, strict=True)] == [
        True
    ] * len(words)
    assert all(one.low < one.high for one in found)


def test_a_baseline_says_what_of_it_is_estimated():
    made = MemoryReport({"arguments": job_settings.as_text(ROUTED)}, {})
    assert made.provenance["peak_allocated"].startswith("estimated, -15 to +10 % (routing")
    exact = MemoryReport({"arguments": job_settings.as_text(DENSE)}, {})
    assert exact.provenance["peak_allocated"].startswith("modelled")
    assert described("as it is", estimates(None)) == "as it is"
