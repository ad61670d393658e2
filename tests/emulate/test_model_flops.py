"""Model flops: as Megatron's own log counts them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.needs import TRAINING

from megatron_prism.core.jobs import model_flops
from megatron_prism.core.jobs import recipe as recipes

SETTINGS = {
    "tiny-gpt_1cpu": "",
    "llama3-70b_1024gpu_tp8pp4vp5_h200": "",
    "llama3-405b_8192gpu_tp8pp16vp8_h200": "swiglu=false",
    "llama3-8b_64gpu_tp4cp2_h200": "kv_channels=256",
    "mixtral-8x7b_256gpu_pp4vp8ep8_h200": "moe_layer_freq=2"
    " moe_shared_expert_intermediate_size=1024 moe_ffn_hidden_size=512",
    "guard-gpt_16gpu_tp2pp2vp2_h200": "",
}


def arguments(recipe):
    """What Megatron's arguments say of the same model."""
    m = recipe
    absent = """mtp_num_layers moe_latent_size experimental_attention_variant
    linear_attention_type hybrid_override_pattern hybrid_layer_pattern"""
    off = "is_hybrid_model multi_latent_attention attention_output_gate"
    return SimpleNamespace(
        **dict.fromkeys(absent.split()),
        **dict.fromkeys(off.split(), False),
        group_query_attention=True,
        num_query_groups=recipe.groups,
        kv_channels=recipe.head_size,
        padded_vocab_size=recipe.padded_vocab_size,
        ffn_hidden_size=m.ffn_hidden_size or 4 * m.hidden_size,
        **{name: getattr(m, name) for name in (
            "num_layers", "hidden_size", "num_attention_heads", "seq_length", "swiglu",
            "num_experts", "moe_layer_freq", "moe_router_topk", "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size")},
    )  # fmt: skip


@pytest.mark.megatron
@TRAINING
@pytest.mark.parametrize(("name", "settings"), SETTINGS.items())
def test_recipes_count_as_megatron_does(name, settings):
    from megatron.training import training

    recipe = recipes.load(name, settings.split())
    found = model_flops.of_recipe(recipe)
    wanted = training.num_floating_point_operations(arguments(recipe), recipe.global_batch_size)
    assert int(found["model_flops_per_iteration"]) == pytest.approx(wanted, rel=1e-12)


def test_models_that_recipes_do_not_name_have_no_flops():
    for setting in ("attention_output_gate=true", "mtp_num_layers=1"):
        recipe = recipes.load("tiny-gpt_1cpu", [setting])
        assert set(model_flops.of_recipe(recipe)) == {"tokens_per_iteration"}


@pytest.mark.megatron
@TRAINING
def test_slices_of_a_stock_job_say_its_flops(tmp_path, capsys):
    from helpers import stock_jobs

    from megatron_prism.cli import main as cli
    from megatron_prism.core.programs import slices

    script = Path(__file__).parents[1] / "helpers" / "pretrain_tiny.py"
    job = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 2
    --lr 1e-3 --mock-data --vocab-size 1000 --bf16 --use-distributed-optimizer --num-workers 0
    --eval-iters 0 --eval-interval 10 --log-interval 1
    --transformer-impl transformer_engine --prism-world-size 8 --prism-ranks 3
    --prism-tier meta --prism-capture"""
    folder = tmp_path / "s"
    ((status, said),) = stock_jobs.run([["--", script, *job.split(), folder]])
    assert status == 0, said[-2000:]
    source = slices.open_programs(folder).source
    per_token = 2 * (64 * 4 * 64 + 32 * 64 + 2 * 64 * 256) + 64 * 1024
    assert source["tokens_per_iteration"] == str(8 * 32)
    assert source["model_flops_per_iteration"] == str(6 * 8 * 32 * per_token)
    assert cli.main(["replay", str(folder), "--machine", "h100"]) == 0
    assert "of 989 TFLOP/s dense bf16" in capsys.readouterr().out
