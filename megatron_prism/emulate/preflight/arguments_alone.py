"""Stands for a script of Megatron that is not on this machine, while its arguments are checked.

The Megatron that is installed here parses and validates the arguments; no model is built and
nothing trains.  It has the arguments of ``pretrain_gpt.py`` and of no other script.
"""

from __future__ import annotations

from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)

# what a first look searches for in the text of a script: it makes the model's configuration of the
# arguments, and reads data with get_blend_and_blend_per_split
_USED_BY_THE_SCRIPT = core_transformer_config_from_args

if __name__ == "__main__":
    # as pretrain_gpt.py calls pretrain(), :306 @0.19.0
    validate_args(parse_args(), {"tokenizer_type": "GPT2BPETokenizer"})
