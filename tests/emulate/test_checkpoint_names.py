"""Names of a model's tensors where Megatron's own checkpoint ends; the models are fakes."""

import pytest

from megatron_prism.emulate.checkpoint_names import sharded_state


class FakeStage:
    """A stage that names its tensors and ties its embedding as Megatron's LanguageModule does."""

    def __init__(self, pre_process, mtp_process, owns_output):
        self.pre_process, self.mtp_process = pre_process, mtp_process
        self.owns_output = owns_output

    def sharded_state_dict(self, metadata):
        state = {"embedding.weight": 1, **metadata}
        if self.owns_output:
            state["output_layer.weight"] = 2
        self.tie_embeddings_and_output_weights_state_dict(state, "output_layer.weight", "embedding")
        return state

    def tie_embeddings_and_output_weights_state_dict(self, state, output_key, embedding_key):
        if self.mtp_process and not self.pre_process:
            assert output_key not in state, state.keys()


def test_an_output_weight_that_nobody_reads_has_no_name():
    stage = FakeStage(pre_process=False, mtp_process=True, owns_output=True)
    assert sharded_state(stage, {"of": 3}) == {"embedding.weight": 1, "of": 3}
    # a checkpoint of the job itself still ends there
    with pytest.raises(AssertionError, match="output_layer"):
        stage.sharded_state_dict({})


@pytest.mark.parametrize(("pre_process", "mtp_process"), [(True, True), (False, False)])
def test_an_output_weight_that_is_read_keeps_its_name(pre_process, mtp_process):
    stage = FakeStage(pre_process, mtp_process, owns_output=True)
    assert sharded_state(stage, {})["output_layer.weight"] == 2


def test_a_model_that_ties_nothing_is_asked_as_it_is():
    class FakeModel:
        def sharded_state_dict(self, metadata):
            return dict(metadata)

    assert sharded_state(FakeModel(), {"of": 3}) == {"of": 3}
