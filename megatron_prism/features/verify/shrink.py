"""The small copy of a job: Megatron's parsed arguments, changed before Megatron validates them.

In : the namespace of ``parse_args``, the small world, and which optional parts of the composition
to leave out.  Out: the same namespace, and a line for each change.  What a job computes follows
from its sizes, which are the same with every part left out: the reference has none of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_prism.core.errors import UsageError, WorldError
from megatron_prism.core.jobs.megatron_flags import HYBRID_PATTERNS
from megatron_prism.core.world import World

HIDDEN, SEQUENCE, VOCABULARY, EXPERTS, SAMPLES = 64, 32, 256, 4, 8
MOST_RANKS, USUAL_RANKS = 16, 8
ITERATIONS = 3
SEVERAL_BUCKETS = 12_000  # parameters of a bucket of gradients: a small stage has several
Off = dict[str, object]  # arguments -> what they are without a part

# Parts of a composition that change how a job is computed and not what, innermost first: without
# the last ones, the first ones may be refused.  --cross-entropy-loss-fusion is none: Megatron's own
# rounds the logits' gradient to bf16 in every format (fusions/fused_cross_entropy.py:82 @main).
_STEP: Off = {"overlap_param_gather_with_optimizer_step": False}
_GATHER: Off = {"overlap_param_gather": False, **_STEP}
_INSTANCES: Off = {"num_distributed_optimizer_instances": 1}
_SHARED: Off = {"moe_shared_expert_overlap": False}
PARTS: dict[str, Off] = {
    "--overlap-param-gather-with-optimizer-step": _STEP,
    "--overlap-param-gather": _GATHER,
    "--moe-shared-expert-overlap": _SHARED,
    "--moe-permute-fusion": {"moe_permute_fusion": False},
    "--moe-router-fusion": {"moe_router_fusion": False},
    "--moe-token-dispatcher-type": {"moe_token_dispatcher_type": "allgather", **_SHARED},
    "--defer-embedding-wgrad-compute": {"defer_embedding_wgrad_compute": False},
    "recomputation": {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_activations": False,
    },
    "--overlap-grad-reduce": {"overlap_grad_reduce": False, **_GATHER},
    "--ddp-average-in-collective": {"ddp_average_in_collective": False},
    "--num-distributed-optimizer-instances": _INSTANCES,
    "--use-distributed-optimizer": {"use_distributed_optimizer": False, **_GATHER, **_INSTANCES},
    "interleaving": {
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "pipeline_model_parallel_layout": None,
        **_STEP,
    },
    "--sequence-parallel": {"sequence_parallel": False},
}
_OF_PIPELINES: Off = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
_OF_CONTEXTS: Off = {"cp_comm_type": ["p2p"], "hierarchical_context_parallel_sizes": None}

_FORMATS, _KERNELS = "number formats", "kernels of a GPU"
_QUIET = "files, logs and lengths of the real run"
_LAYOUT = "what depends on the layout by its definition"
NOT_CHECKED = (_FORMATS, _KERNELS)
# What the copy does without, and why; the reasons are printed.
_DROPPED: dict[str, Off] = {
    _FORMATS: {
        "fp16": False,
        "bf16": False,
        "fp8": None,
        "fp4": None,
        "fp8_param_gather": False,
        "fp4_param": False,
        "first_last_layers_bf16": False,
        "fp32_residual_connection": False,
        "use_precision_aware_optimizer": False,
        "main_grads_dtype": "fp32",
        "main_params_dtype": "fp32",
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
        "grad_reduce_in_bf16": False,
        "reuse_grad_buf_for_mxfp8_param_ag": False,
        "moe_router_padding_for_fp8": False,
        "moe_router_padding_for_quantization": False,
        "loss_scale": None,
        "fp16_lm_cross_entropy": False,
        # Megatron takes these with bf16 and fp16 alone
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
        "dsa_indexer_rotate_activation": False,
    },
    _KERNELS: {
        "use_flash_attn": False,
        "tp_comm_overlap": False,
        "cuda_graph_impl": "none",
        "enable_cuda_graph": False,
        "external_cuda_graph": False,
        "nccl_ub": False,
        "use_sharp": False,
        "moe_enable_deepep": False,
        "use_transformer_engine_op_fuser": False,
        "use_te_rng_tracker": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "optimizer_cpu_offload": False,
        "use_mem_efficient_jit": False,
        "disable_jit_fuser": True,
        "cpu_offloading": False,
        "cpu_offloading_num_layers": 0,
        "fine_grained_activation_offloading": False,
    },
    "random numbers": {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "moe_input_jitter_eps": None,
        "moe_router_force_load_balancing": False,
        "dataloader_type": "single",
    },
    _LAYOUT: {
        "moe_expert_capacity_factor": None,
        "moe_pad_expert_input_to_capacity": False,
    },
    _QUIET: {
        "load": None,
        "save": None,
        "pretrained_checkpoint": None,
        "use_checkpoint_args": False,
        "finetune": False,
        "async_save": False,
        "save_interval": None,
        "non_persistent_ckpt_type": None,
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "data_args_path": None,
        "per_split_data_args_path": None,
        "data_cache_path": None,
        "split": None,
        "vocab_file": None,
        "merge_file": None,
        "tokenizer_model": None,
        "tensorboard_dir": None,
        "wandb_project": "",
        "enable_one_logger": False,
        "profile": False,
        "use_pytorch_profiler": False,
        "record_memory_history": False,
        "exit_interval": None,
        "exit_duration_in_mins": None,
        "train_samples": None,
        "rampup_batch_size": None,
        "lr_decay_iters": None,
        "lr_decay_samples": None,
        "lr_warmup_iters": 0,
        "lr_warmup_samples": 0,
        "lr_warmup_fraction": None,
        "lr_decay_style": "constant",
        "inprocess_restart": False,
        "check_weight_hash_across_dp_replicas_interval": None,
        "moe_routing_trace_path": None,
        "logits_save_dir": None,
        "ckpt_pg_tensors_cache_path": None,
        "dump_param_to_param_group_map": None,
        "dist_ckpt_optim_fully_reshardable": True,
        "no_save_optim": None,
        "no_load_optim": None,
        "no_save_rng": None,
        "no_load_rng": None,
        "save_wgrads_interval": None,
        "save_dgrads_interval": None,
        "tensorboard_log_interval": 1,
        "log_memory_to_tensorboard": False,
        "log_timers_to_tensorboard": False,
        "log_progress": False,
        "manual_gc": False,
        "decrease_batch_size_if_needed": False,
        "phase_transition_iterations": None,
        "override_opt_param_scheduler": False,
        "use_checkpoint_opt_param_scheduler": False,
        "full_validation": False,
    },
}

# Sizes: the largest that the copy has; None stays None.
_AT_MOST = {
    "mtp_num_layers": 1,
    "micro_batch_size": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_topk": 2,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "wgrad_deferral_limit": 2,
    "recompute_num_layers": 1,
    "moe_latent_size": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 16,
    "mamba_state_dim": 16,
    "mamba_head_dim": 16,
    "mamba_num_heads": 8,
}
_WITHOUT_FSDP = (
    "leave it out, with its own flags, to verify the rest; FSDP shards, reduces and updates by "
    "code of its own, of which that says nothing"
)
_REFUSED = {
    "use_megatron_fsdp": _WITHOUT_FSDP,
    "use_torch_fsdp2": _WITHOUT_FSDP,
    "use_legacy_models": "leave it out",
    "heterogeneous_layers_config_path": "leave it out: all layers alike are shrunk",
}


@dataclass(frozen=True)
class SmallRun:
    """One run of a small copy.

    folder   : for what its ranks keep; made here
    words    : script and arguments of the job
    job, copy, world : the job's world, the copy's, this run's
    left_out : of ``shrink.PARTS``
    layers   : that it has at least
    rounded  : whether every parameter starts one rounding away, to measure what roundings do
    precise  : whether it computes in float64
    saves    : whether it saves a checkpoint in its folder after each iteration
    resumed  : the folder of a run that has done so, and the iteration to go on from
    """

    folder: Path
    words: Sequence[str]
    job: World
    copy: World
    world: World
    left_out: Sequence[str] = ()
    iterations: int = ITERATIONS
    layers: int = 2
    rounded: bool = False
    precise: bool = False
    saves: bool = False
    resumed: tuple[str, int] | None = None


def small_world(world: World, dp_known: bool, wide_pipeline: bool = False) -> World:
    """The same composition, smallest: dimensions above 1 are 2, and experts keep replicas.

    Args:
        world: of the job.
        dp_known: whether the job says how many ranks it has; else it is taken to have replicas.
        wide_pipeline: interleaved stages without overlap need three or more.
    """
    sizes = {name: min(2, getattr(world, name)) for name in ("tp", "pp", "cp", "ep", "etp")}
    if wide_pipeline and world.pp > 2:
        sizes["pp"] = 4
    # stages that are not outermost lie at places that depend on both grids
    if sizes["pp"] > 1 and not world.order.endswith("pp"):
        _equal_experts_and_dense(sizes)
    model = sizes["tp"] * sizes["pp"] * sizes["cp"]
    dense_ranks = sizes["tp"] * sizes["cp"]  # of a stage and a replica
    expert_ranks = sizes["etp"] * sizes["ep"]
    # a fault of experts' replicas shows only where there are two; with a grid of their own they
    # have other replicas than the rest (Megatron-LM 5916: only where ep is 1 and etp is not tp)
    has_expert_grid = sizes["ep"] > 1 or sizes["etp"] != sizes["tp"]
    wants_expert_replicas = has_expert_grid and (world.edp > 1 or not dp_known)
    dp = 2 if world.dp > 1 or not dp_known else 1
    while True:
        # experts must divide the ranks of a stage: more replicas until they do
        stage_ranks = dense_ranks * dp
        if stage_ranks % expert_ranks == 0:
            has_replicas = stage_ranks // expert_ranks >= 2
            too_large = model * dp * 2 > USUAL_RANKS
            if has_replicas or too_large or not wants_expert_replicas:
                break
        dp *= 2
    ranks = model * dp
    if ranks > MOST_RANKS:
        raise UsageError(
            f"the smallest world of this composition has {ranks} ranks of {MOST_RANKS}",
            fix="leave one dimension out: --context-parallel-size 1, for example",
        )
    return World(size=ranks, order=world.order, **sizes)


def _equal_experts_and_dense(sizes: dict[str, int]) -> None:
    """Raise tp or etp until etp x ep = tp x cp, as in the job whose stages are not outermost."""
    while True:
        surplus_of_experts = sizes["etp"] * sizes["ep"] - sizes["tp"] * sizes["cp"]
        if surplus_of_experts == 0:
            return
        sizes["tp" if surplus_of_experts > 0 else "etp"] *= 2


# a dimension -> what is 1 without it
_WITHOUT = {"tp": ("tp", "etp"), "pp": ("pp",), "cp": ("cp",), "dp": ("ep",), "ep": ("ep",)}


def without(world: World, part: str) -> World | None:
    """Return ``world`` without a dimension.

    Args:
        world: of the copy.
        part: ``tp``, ``dp`` …, which becomes 1; ``etp``, which becomes tp.

    Returns:
        The smaller world; None where there is nothing to leave out, or no world without it.
    """
    if part == "etp":
        return _without_expert_tensor_parallel(world)
    # nothing to leave out
    if part not in _WITHOUT or getattr(world, part) == 1:
        return None
    size = world.size
    if part != "ep":  # experts take no ranks of their own
        size //= getattr(world, part)
    try:
        return replace(world, size=size, **dict.fromkeys(_WITHOUT[part], 1))  # type: ignore[arg-type]
    except WorldError:
        return None


def _without_expert_tensor_parallel(world: World) -> World | None:
    """Return the world whose experts have the tensor parallel size of the rest."""
    if world.etp == world.tp:
        return None
    try:
        return replace(world, etp=world.tp)
    # the order of the ranks, or ep, needs the experts' own size
    except WorldError:
        return None


class _Shrinking:
    """Changes arguments and remembers which."""

    def __init__(self, args: object) -> None:
        self.args = args
        self.changes: list[list[str]] = []

    def get(self, name: str) -> Any:
        return getattr(self.args, name, None)

    def set(self, name: str, value: object, why: str) -> None:
        # a release without the argument is as if it were off
        if not hasattr(self.args, name):
            return
        before = getattr(self.args, name)
        if before != value:
            setattr(self.args, name, value)
            self.changes.append([name, _text(before), _text(value), why])


def _text(value: object) -> str:
    """A value as a change shows it: a member of an enumeration by its name."""
    return str(getattr(value, "name", value))


def shrink(args: object, job: World, copy: World, iterations: int, layers: int) -> list[list[str]]:
    """Change the parsed arguments of a job into those of its small copy.

    Args:
        args: of the job; they are changed.
        job: the job's world.
        copy: the copy's world, from which its sizes follow.
        iterations: that the copy trains.
        layers: that the copy has at least.

    Returns:
        [argument, before, after, why] of each change: a size, or the reason in ``_DROPPED``.

    Raises:
        UsageError: the job cannot be shrunk.
    """
    small = _Shrinking(args)
    for name, fix in _REFUSED.items():
        if small.get(name):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"prism verify does not know {option}", fix=fix)
    for why, values in _DROPPED.items():
        for name, off in values.items():
            small.set(name, off, why)
    _simplify(small)
    # a hybrid model says its layers in a pattern
    patterns_of_job = [name for name in HYBRID_PATTERNS if small.get(name)]
    for name in patterns_of_job:
        _shorten(small, name, job, copy, layers)
    if not patterns_of_job:
        _interleave(small, job, copy, layers)
    _resize(small, job, copy)
    samples = max(SAMPLES, copy.dp * copy.pp)  # of one microbatch each, in every layout the same
    settings: Off = {
        "global_batch_size": samples * small.get("micro_batch_size"),
        "train_iters": ITERATIONS,  # data sets are made for these
        "exit_interval": iterations if iterations < ITERATIONS else None,
        "eval_iters": 1,
        "eval_interval": 1000,
        "log_interval": 1,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY - 1,
        "make_vocab_size_divisible_by": 16,
        "num_workers": 0,
        "lr": 1e-3,
        "min_lr": 0.0,
        "rerun_mode": "disabled",
        "use_cpu_initialization": True,
    }
    for name, value in settings.items():
        small.set(name, value, _QUIET)
    return small.changes


def _simplify(small: _Shrinking) -> None:
    """Replace kernels, formats and balancing that a small copy on one host cannot have."""
    if small.get("moe_token_dispatcher_type") == "flex":
        small.set("moe_token_dispatcher_type", "alltoall", _KERNELS)
    balancing = small.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing or ()):  # over the tokens of a rank
        without_balancing = "none" if isinstance(balancing, str) else ["none"]
        small.set("moe_router_load_balancing_type", without_balancing, _LAYOUT)
        if small.get("moe_router_topk") == 1:  # Megatron asks for it without sinkhorn
            small.set("moe_router_pre_softmax", True, _LAYOUT)
    optimizer = small.get("optimizer") or "adam"
    if optimizer not in ("adam", "sgd"):  # distributed in bf16 alone: layer_wise_optimizer.py @main
        small.set("optimizer", optimizer.removeprefix("dist_"), _FORMATS)
        small.set("use_distributed_optimizer", False, _FORMATS)
        small.set("overlap_param_gather", False, _FORMATS)
    backend = small.get("attention_backend")
    if getattr(backend, "name", "") in ("flash", "fused"):
        small.set("attention_backend", type(backend)["auto"], _KERNELS)


_CHUNKS = "num_virtual_stages_per_pipeline_rank"


def _interleave(small: _Shrinking, job: World, copy: World, least_layers: int) -> None:
    """Settle chunks and layers: as few as the stages admit."""
    pp = copy.pp
    chunks = _chunks(small, job, copy)
    has_layout = pp > 1 and bool(small.get("pipeline_model_parallel_layout"))
    if has_layout:
        # E embedding, t layer, m multi-token prediction, L loss: a stage between | each
        mtp = "m" if small.get("mtp_num_layers") else ""
        middle_stages = ["t"] * (pp * chunks - 2)
        layout = "|".join(["Et", *middle_stages, f"t{mtp}L"])
        small.set("pipeline_model_parallel_layout", layout, "sizes")
    layers_of_uneven_stages = _uneven_layers(small, pp, chunks)
    # the embedding and the loss stand for a layer each, where they count in the split
    counted = 0
    if pp > 1:
        counted += bool(small.get("account_for_embedding_in_pipeline_split"))
        counted += bool(small.get("account_for_loss_in_pipeline_split"))
    if counted:
        layers = 2 * pp * chunks - counted
    elif layers_of_uneven_stages:
        layers = layers_of_uneven_stages
    else:
        # rounded up to a layer more in each chunk
        whole_chunks = least_layers + -least_layers % (pp * chunks)
        layers = max(pp * chunks, whole_chunks)
    _set_dense_and_expert_layers(small, layers)
    small.set("num_layers", layers, "sizes")
    if small.get("num_layers_per_virtual_pipeline_stage"):
        layers_of_stage = (layers + counted) // pp
        layers_of_chunk = max(layers_of_stage // chunks, 1)
        small.set("num_layers_per_virtual_pipeline_stage", layers_of_chunk, "sizes")
    if small.get(_CHUNKS):
        small.set(_CHUNKS, chunks, "sizes")


def _chunks(small: _Shrinking, job: World, copy: World) -> int:
    """Chunks of a stage of the copy: two where the job's stages are interleaved."""
    if copy.pp == 1:
        return 1
    layout = small.get("pipeline_model_parallel_layout")
    if layout:
        # (tt|)*3 is written out before stages are counted
        repeated = re.sub(r"\(([^)]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout)
        chunks_of_job = repeated.count("|") + 1
        return 2 if chunks_of_job > job.pp else 1
    if small.get(_CHUNKS):
        return min(2, int(small.get(_CHUNKS)))
    return 2 if small.get("num_layers_per_virtual_pipeline_stage") else 1


def _uneven_layers(small: _Shrinking, pp: int, chunks: int) -> int:
    """Set the layers of a first and a last stage that have a number of their own.

    Returns:
        Layers in all; 0 without such a stage.
    """
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    uneven = [name for name in names if pp > 1 and small.get(name) is not None]
    if not uneven:
        return 0
    has_even_stages = pp > len(uneven)
    shares = (1, 1 if has_even_stages else 2)  # two stages that are both uneven differ
    for name, share in zip(uneven, shares, strict=False):
        small.set(name, share * chunks, "sizes")
    if has_even_stages:  # the stages between have two layers of each chunk
        return chunks * (2 * pp - len(uneven))
    return chunks * 3


def _set_dense_and_expert_layers(small: _Shrinking, layers: int) -> None:
    """Shorten the pattern of layers with experts: dense layers first, if there are some."""
    frequency = small.get("moe_layer_freq")
    if isinstance(frequency, list):
        # a list says of each layer whether it has experts
        dense = 1 if 0 in frequency else 0
        small.set("moe_layer_freq", [0] * dense + [1] * (layers - dense), "sizes")
    # every second layer has experts
    elif isinstance(frequency, int) and frequency > 1:
        small.set("moe_layer_freq", 2, "sizes")


def _shorten(small: _Shrinking, name: str, job: World, copy: World, least_layers: int) -> None:
    """Shorten a pattern of a hybrid model: each stage has one layer of each kind."""
    main, *mtp_patterns = small.get(name).split("/")
    is_cut = "|" in main
    chunks_of_job = main.count("|") + 1
    stages = copy.pp
    if chunks_of_job > job.pp > 1:  # interleaved
        stages *= 2
    kinds = _kinds(main)
    # as often as gives the wanted layers
    kinds *= math.ceil(least_layers / len(kinds) / stages)
    pattern = ("|" if is_cut else "").join([kinds] * stages)
    if mtp_patterns:  # one layer of multi-token prediction is enough
        pattern += "/" + _kinds(mtp_patterns[0])
    small.set(name, pattern, "sizes")
    if small.get("num_layers") is not None:
        small.set("num_layers", len(kinds) * stages, "sizes")


def _kinds(pattern: str) -> str:
    """Each kind of layer of a pattern once, in their order."""
    return "".join(dict.fromkeys(pattern.replace("|", "")))


def _resize(small: _Shrinking, job: World, copy: World) -> None:
    """Narrow the model and its samples."""
    for name, largest in _AT_MOST.items():
        value = small.get(name)
        if value is not None and value > largest:
            small.set(name, largest, "sizes")
    groups = max(2, copy.tp * copy.cp)  # ranks exchange heads for parts of sequences
    sizes: Off = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 2 * groups,
        "seq_length": SEQUENCE,
        "encoder_seq_length": None,
        "max_position_embeddings": SEQUENCE,
    }
    if small.get("group_query_attention"):  # fewer groups than tp stay fewer
        few = small.get("num_query_groups") < job.tp
        sizes["num_query_groups"] = 1 if few else groups
    # groups of state-space layers are divided over tp
    if (small.get("mamba_num_groups") or 0) > groups:
        sizes["mamba_num_groups"] = groups
    if small.get("num_experts"):
        sizes["num_experts"] = EXPERTS
    if small.get("overlap_grad_reduce"):
        # overlap shows its faults between buckets
        sizes |= {"ddp_bucket_size": SEVERAL_BUCKETS, "ddp_num_buckets": None}
    # the product of the levels is cp
    if small.get("hierarchical_context_parallel_sizes"):
        sizes["hierarchical_context_parallel_sizes"] = [1, copy.cp]
    for name, value in sizes.items():
        small.set(name, value, "sizes")


def parts_of(args: object, copy: World) -> list[str]:
    """Which ``PARTS`` a copy's arguments have, and its dimensions above 1."""
    parts = [name for name, off in PARTS.items() if _has_part(args, name, off)]
    dimensions = [name for name in ("cp", "ep", "tp", "pp", "dp") if getattr(copy, name) > 1]
    # of one size with tp it is no part of its own
    if copy.etp != copy.tp:
        dimensions.insert(0, "etp")
    return parts + dimensions


def _has_part(args: object, name: str, off: Off) -> bool:
    """Whether an argument that makes the part is not as it is without."""
    telling = 3 if name == "interleaving" else 1  # the rest are arguments of parts that need it
    for argument, value in list(off.items())[:telling]:
        if getattr(args, argument, value) not in (value, None):
            return True
    return False


def lay_out(args: object, world: World, left_out: Iterable[str]) -> None:
    """Leave out of a copy's arguments what is asked for and what cannot be without a dimension.

    Args:
        args: of the copy; they are changed.
        world: the copy's, a part of it, or one rank.
        left_out: of ``PARTS``.
    """
    # parts that need a dimension go with it
    parts_off = set(left_out)
    if world.tp == 1:
        parts_off.add("--sequence-parallel")
    if world.pp == 1:
        parts_off |= {"interleaving", "--defer-embedding-wgrad-compute"}
    # argument -> its value without the part
    off = dict[str, object]()
    for name in PARTS:
        if name in parts_off:
            off |= PARTS[name]
    if world.pp == 1:
        off |= _OF_PIPELINES
    if world.cp == 1:
        off |= _OF_CONTEXTS
    # "|" cuts a hybrid model into chunks
    for name in HYBRID_PATTERNS:
        pattern = getattr(args, name, None)
        if "interleaving" in parts_off and pattern:
            off[name] = pattern.replace("|", "")
    for name, value in off.items():
        if hasattr(args, name):
            setattr(args, name, value)


def sizes_as_words(world: World) -> list[str]:
    """A world's sizes as the last words of a command line."""
    return [
        "--tensor-model-parallel-size",
        str(world.tp),
        "--pipeline-model-parallel-size",
        str(world.pp),
        "--context-parallel-size",
        str(world.cp),
        "--expert-model-parallel-size",
        str(world.ep),
        "--expert-tensor-parallel-size",
        str(world.etp),
    ]


def one_rank(world: World) -> World:
    """The reference's world."""
    return replace(world, size=1, tp=1, pp=1, cp=1, ep=1, etp=1)
