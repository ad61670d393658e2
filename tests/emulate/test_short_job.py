"""Which jobs an estimate from few layers is of, and what their arguments become."""

from types import SimpleNamespace

import pytest

from megatron_prism.emulate.jobs.short_job import (
    ChunkLayers,
    LayerCheck,
    chunk_layers,
    short_layers,
    shorten,
)


def job(**settings):
    usual = {
        "num_layers": 32,
        "encoder_num_layers": 32,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "moe_layer_freq": 1,
    }
    return SimpleNamespace(**{**usual, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ChunkLayers(1, 16)),
        ({"virtual_pipeline_model_parallel_size": 2}, ChunkLayers(1, 8)),
        # every second layer has experts
        ({"moe_layer_freq": 2}, ChunkLayers(2, 16)),
        ({"moe_layer_freq": [1] * 32}, ChunkLayers(1, 16)),
        ({"no_rope_freq": 2, "moe_layer_freq": 1}, ChunkLayers(2, 16)),
        ({"recompute_method": "uniform", "recompute_num_layers": 2}, ChunkLayers(2, 16)),
        ({"recompute_method": "block", "recompute_num_layers": 16}, ChunkLayers(1, 16)),
        # one layer alone ends in an assertion of Megatron's
        (
            {"fine_grained_activation_offloading": True, "pipeline_model_parallel_size": 1},
            ChunkLayers(1, 32, fewest=2),
        ),
    ],
)
def test_equal_layers_have_a_period(settings, expected):
    assert chunk_layers(job(**settings)) == expected


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_layers": None}, "does not say how many layers"),
        ({"decoder_first_pipeline_num_layers": 3}, "--decoder-first-pipeline-num-layers"),
        ({"hybrid_override_pattern": "M*M*"}, "--hybrid-override-pattern"),
        ({"num_layers": 33, "encoder_num_layers": 33}, "unequal numbers of layers"),
        ({"moe_layer_freq": [0] + [1] * 31}, "--moe-layer-freq lists layers of several kinds"),
        ({"recompute_method": "block", "recompute_num_layers": 3}, "recomputes some layers"),
        ({"virtual_pipeline_model_parallel_size": 8}, "2 layers, too few"),
        ({"fine_grained_activation_offloading": True}, "offloaded on several stages"),
        (
            {
                "fine_grained_activation_offloading": True,
                "num_layers": 5,
                "encoder_num_layers": 5,
                "pipeline_model_parallel_size": 1,
            },
            "5 layers, too few",
        ),
        ({"moe_layer_freq": 3}, "no whole number of 3 layers"),
    ],
)
def test_few_layers_say_nothing_of_unlike_ones(settings, reason):
    assert reason in chunk_layers(job(**settings)).reason


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(ChunkLayers(1, 16), [1, 2]), (ChunkLayers(2, 16), [2, 4]), (ChunkLayers(1, 16, 2), [2, 3])],
)
def test_the_next_short_job_has_a_period_more(layers, expected):
    assert [short_layers(layers, periods) for periods in (1, 2)] == expected


def test_a_short_job_has_so_many_layers_in_each_chunk():
    args = job(virtual_pipeline_model_parallel_size=4, moe_layer_freq=[1] * 32)
    shorten(args, 2)
    assert args.num_layers == args.encoder_num_layers == 16
    assert args.moe_layer_freq == [1] * 16


def test_what_was_made_of_the_arguments_is_short_too():
    args = job()
    config = SimpleNamespace(num_layers=32, moe_layer_freq=[1] * 32)
    of_another_model = SimpleNamespace(num_layers=3)
    shorten(args, 1, [config, of_another_model])
    assert (config.num_layers, len(config.moe_layer_freq)) == (2, 2)
    assert of_another_model.num_layers == 3


class Layers:
    def __init__(self, **counts):
        self._counts = counts

    def named_modules(self):
        return [(name.replace("_", "."), [None] * count) for name, count in self._counts.items()]


@pytest.mark.parametrize(
    ("model", "is_refused"),
    [
        ([Layers(module_decoder_layers=2)], False),
        ([Layers(decoder_layers=2), Layers(decoder_layers=2)], False),
        # a script that does not follow its arguments, or has its layers elsewhere
        ([Layers(decoder_layers=2), Layers(decoder_layers=32)], True),
        ([Layers(encoder_blocks=2)], True),
        (None, True),
    ],
)
def test_a_model_with_other_layers_has_no_estimate(model, is_refused):
    refused = []
    LayerCheck(2, refused.append).iteration_started(1, 4, model, None)
    assert bool(refused) == is_refused
