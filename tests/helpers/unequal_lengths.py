"""Eight real processes over gloo of which each reads samples of its own lengths.

``gloo_ranks`` with batches that are cut: a pickled list of (recipe, {dp rank: lengths}) on stdin, a
JSON line for each.  The recipe's ``seq_length`` is the longest; a batch is cut before the model, so
all that follows from a length is Megatron's.
"""

import json
import pickle
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import forks, gloo_ranks


def cut(lengths):
    """Make ``batches`` of a recipe give microbatch after microbatch of these lengths."""
    from megatron.core import parallel_state

    from megatron_prism.emulate.jobs import recipe_script

    whole = recipe_script.batches

    def shorter(recipe, device):
        own = lengths[parallel_state.get_data_parallel_rank()]
        for number, batch in enumerate(whole(recipe, device)):
            length = own[number % len(own)]
            yield {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}

    recipe_script.batches = shorter


def run(recipe, lengths, rank, store_file):
    """The calls of a rank in the last iteration."""
    cut(lengths)
    return gloo_ranks.run(recipe, rank, store_file)


def main():
    jobs = pickle.load(sys.stdin.buffer)
    gloo_ranks.wrap()
    forks.prepare("cpu")
    for recipe, lengths in jobs:
        with tempfile.TemporaryDirectory() as folder:
            started = [
                forks.fork(lambda rank=rank: run(recipe, lengths, rank, f"{folder}/store"))  # noqa: B023
                for rank in range(recipe.world.size)
            ]
            print(json.dumps([forks.wait(*child) for child in started]), flush=True)


if __name__ == "__main__":
    main()
