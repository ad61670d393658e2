"""The names that Megatron gives a model's tensors in a checkpoint, without writing one."""

from __future__ import annotations

from typing import Any

State = dict[str, object]  # name -> what a checkpoint has of it
_TIE = "tie_embeddings_and_output_weights_state_dict"


def sharded_state(model: Any, metadata: State) -> State:
    """Return ``model.sharded_state_dict``, also where Megatron's own ends at an unread weight.

    A last stage with multi-token prediction has the embedding and, if embeddings are tied, reads
    its logits from there.  It allocates an output weight nevertheless, and Megatron asserts that it
    has none (language_module.py:343 @0.16.1, :497 @0.19.0): such a job trains and cannot save.
    Here that weight has no name.
    """
    tie = getattr(model, _TIE, None)
    if tie is None:
        return model.sharded_state_dict(metadata=metadata)
    has_embedding = getattr(model, "mtp_process", False) and not model.pre_process

    def tie_what_is_read(state: State, output_key: str, *args: object, **kwargs: object) -> None:
        if has_embedding:
            state.pop(output_key, None)
        tie(state, output_key, *args, **kwargs)

    setattr(model, _TIE, tie_what_is_read)  # of this model alone, in front of its class's
    try:
        return model.sharded_state_dict(metadata=metadata)
    finally:
        delattr(model, _TIE)
