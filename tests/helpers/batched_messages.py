"""Jobs of recipes whose stages exchange messages in batches, whatever the schedule.

Megatron's arguments refuse that for two stages with chunks; frameworks that make their own
``TransformerConfig`` do not (NVIDIA/Megatron-LM pull request 1485).  The first word says what runs:
``captures`` is ``forks``, ``processes`` is ``unequal_lengths``; the rest and stdin are theirs.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_prism.emulate.jobs import recipe_script

SCRIPTS = {"captures": "forks", "processes": "unequal_lengths"}
config_of_recipe = recipe_script.transformer_config


def batched(recipe):
    """The config of a recipe, with batches of messages."""
    config = config_of_recipe(recipe)
    config.overlap_p2p_comm = False
    config.batch_p2p_comm = True
    return config


recipe_script.transformer_config = batched
_, name, *sys.argv[1:] = sys.argv
runpy.run_path(str(Path(__file__).with_name(f"{SCRIPTS[name]}.py")), run_name="__main__")
