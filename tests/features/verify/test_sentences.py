"""What a rank that fails says in one line."""

import pytest

from megatron_prism.features.verify.ranks import sentence


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [AssertionError({"a.weight": 1, "b.weight": 2}.keys()), AssertionError(), AssertionError([1]),
     KeyError("decoder.weight"), AssertionError((4, 6))],
    ids=str,
)  # fmt: skip
def test_a_value_alone_is_said_with_the_line_that_asked(error):
    said = sentence(raised(error))
    assert said.startswith(type(error).__name__)
    assert "test_sentences.py:" in said
    assert said.endswith("in raised: raise error")


def test_a_long_value_is_cut():
    said = sentence(raised(AssertionError([f"layers.{i}.weight" for i in range(99)])))
    assert "layers.0.weight" in said
    assert "layers.98.weight" not in said
    assert len(said) < 400


@pytest.mark.parametrize("text", ["sequence parallelism needs tp > 1", "Can not use etp\nmore"])
def test_a_sentence_stays_as_it_is(text):
    assert sentence(raised(ValueError(text))) == text.partition("\n")[0]
