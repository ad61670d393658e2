"""Every parser of foreign files, fed with damaged ones: an answer or an error of ours, soon.

A row of ``helpers.fuzz.PARSERS`` is a parser, tried with ``PRISM_FUZZ`` damaged files.  What once
failed is kept in ``corpus``, in a folder per parser, and tried first.
"""

import os

import pytest
from helpers.fuzz import CORPUS, PARSERS, attempt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FOLDERS = {name.replace(", ", "-").replace(" ", "-"): name for name in PARSERS}
KEPT = sorted(path for path in CORPUS.glob("*/*"))


@pytest.mark.parametrize("file", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_failed(file, tmp_path):
    attempt(PARSERS[FOLDERS[file.parent.name]], file.read_bytes(), tmp_path)


@pytest.mark.parametrize("name", PARSERS)
def test_good_examples_are_read(name, tmp_path):
    """What is damaged below is good: else nothing but the first check would be tried."""
    said = [attempt(PARSERS[name], data, tmp_path) for data in PARSERS[name].examples]
    assert set(said) == {"read"}


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    parser, folder = PARSERS[name], tmp_path

    @settings(max_examples=int(os.environ.get("PRISM_FUZZ", "25")), derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.sampled_from(parser.examples), st.randoms(use_true_random=False))
    def holds(data, rng):
        attempt(parser, parser.damage(rng, data), folder)

    holds()
