"""Megatron's flags that several answers read, by what they mean, with the names of all releases.

A flag that Megatron renames gets its new name here.  What recipes may set stands in ``recipe.py``,
when a flag went in ``emulate/preflight/removed_flags.json``.
"""

# the kinds of layers of a hybrid model; the second is the older name, which 0.19 still takes
HYBRID_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
# with these, a job itself says which stage has which layers
LAYERS_BY_HAND = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    *HYBRID_PATTERNS,
)
# with these, stages have unequal numbers of layers
UNEVEN_STAGES = (
    *LAYERS_BY_HAND,
    # as the model's configuration names what the decoder's two flags say
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    # the embedding or the loss counts as a layer
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "encoder_num_layers",
)
# files that a job trains on
TRAINING_DATA = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
DATA_FILES = (*TRAINING_DATA, "valid_data_path", "test_data_path")
