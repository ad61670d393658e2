"""The process groups that Megatron itself asks for in a world of any size."""


def groups_of(monkeypatch, world, **more):
    """description -> the members of each of its groups, ascending, in Megatron's order; ``more``:
    arguments of ``initialize_model_parallel``."""
    import torch
    from megatron.core import parallel_state

    found = {}

    def create_group(ranks=None, *args, group_desc=None, **kwargs):
        found.setdefault(group_desc, []).append(tuple(sorted(map(int, ranks))))  # as torch does
        return object()

    monkeypatch.setattr(parallel_state, "create_group", create_group)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: world.size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args: 0)
    monkeypatch.setattr(parallel_state, "_set_global_memory_buffer", lambda: None)
    state = {
        k: v for k, v in vars(parallel_state).items() if k.startswith("_") and k[1:2].isupper()
    }
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=world.tp,
            pipeline_model_parallel_size=world.pp,
            context_parallel_size=world.cp,
            expert_model_parallel_size=world.ep,
            expert_tensor_parallel_size=world.etp,
            order=world.order,
            **more,
        )
    finally:
        vars(parallel_state).update(state)
    return found
