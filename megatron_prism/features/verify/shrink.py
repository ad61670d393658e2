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
    job, copy, here : the job's world, the copy's, this run's
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
    here: World
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
    if sizes["pp"] > 1 and not world.order.endswith("pp"):  # etp x ep = tp x cp, as in the job
        while (apart := sizes["etp"] * sizes["ep"] - sizes["tp"] * sizes["cp"]) != 0:
            sizes["tp" if apart > 0 else "etp"] *= 2
    model = sizes["tp"] * sizes["pp"] * sizes["cp"]
    dp = 2 if world.dp > 1 or not dp_known else 1
    experts = sizes["etp"] * sizes["ep"]
    replicas = world.edp > 1 or not dp_known
    while model * dp // sizes["pp"] % experts or (
        replicas
        and sizes["ep"] > 1
        and model * dp // sizes["pp"] // experts < 2
        and model * dp * 2 <= USUAL_RANKS
    ):
        dp *= 2
    if model * dp > MOST_RANKS:
        raise UsageError(
            f"the smallest world of this composition has {model * dp} ranks of {MOST_RANKS}",
            fix="leave one dimension out: --context-parallel-size 1, for example",
        )
    return World(size=model * dp, order=world.order, **sizes)


# a dimension -> what is 1 without it
_WITHOUT = {"tp": ("tp", "etp"), "pp": ("pp",), "cp": ("cp",), "dp": ("ep",), "ep": ("ep",)}


def without(world: World, part: str) -> World | None:
    """``world`` with the dimension ``part`` (``tp``, ``dp`` …) at 1; None where it is not above."""
    if part not in _WITHOUT or getattr(world, part) == 1:
        return None
    size = world.size // (1 if part == "ep" else getattr(world, part))
    try:
        return replace(world, size=size, **dict.fromkeys(_WITHOUT[part], 1))  # type: ignore[arg-type]
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
        if not hasattr(self.args, name):
            return
        before = getattr(self.args, name)
        if before != value:
            setattr(self.args, name, value)
            texts = (str(getattr(one, "name", one)) for one in (before, value))
            self.changes.append([name, *texts, why])


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
    if small.get("moe_token_dispatcher_type") == "flex":
        small.set("moe_token_dispatcher_type", "alltoall", _KERNELS)
    balancing = small.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balancing or ()):  # over the tokens of a rank
        none = "none" if isinstance(balancing, str) else ["none"]
        small.set("moe_router_load_balancing_type", none, _LAYOUT)
        if small.get("moe_router_topk") == 1:  # Megatron asks for it without sinkhorn
            small.set("moe_router_pre_softmax", True, _LAYOUT)
    optimizer = small.get("optimizer") or "adam"
    if optimizer not in ("adam", "sgd"):  # distributed in bf16 alone: layer_wise_optimizer.py @main
        small.set("optimizer", optimizer.removeprefix("dist_"), _FORMATS)
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            small.set(name, False, _FORMATS)
    backend = small.get("attention_backend")
    if getattr(backend, "name", "") in ("flash", "fused"):
        small.set("attention_backend", type(backend)["auto"], _KERNELS)
    patterns = [
        name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if small.get(name)
    ]
    for name in patterns:
        _shorten(small, name, job, copy, layers)
    if not patterns:
        _interleave(small, job, copy, layers)
    _resize(small, job, copy)
    samples = max(SAMPLES, copy.dp * copy.pp)  # of one microbatch each, in every layout the same
    for name, value in {
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
    }.items():
        small.set(name, value, _QUIET)
    return small.changes


def _interleave(small: _Shrinking, job: World, copy: World, least: int) -> None:
    """Settle chunks and layers: as few as the stages admit."""
    pp, each = copy.pp, "num_virtual_stages_per_pipeline_rank"
    layout = small.get("pipeline_model_parallel_layout") if pp > 1 else None
    by_layers = small.get("num_layers_per_virtual_pipeline_stage")
    chunks = min(2, small.get(each) or (2 if by_layers else 1)) if pp > 1 else 1
    if layout:
        repeated = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout)
        chunks = 2 if repeated.count("|") + 1 > job.pp else 1
    layers = pp * chunks
    if layout:
        mtp = "m" if small.get("mtp_num_layers") else ""
        text = "|".join(["Et", *["t"] * (layers - 2), f"t{mtp}L"])
        small.set("pipeline_model_parallel_layout", text, "sizes")
    ends = [f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")]
    ends = [name for name in ends if pp > 1 and small.get(name) is not None]
    for name, share in zip(ends, (1, 1 if pp > len(ends) else 2), strict=False):
        small.set(name, share * chunks, "sizes")  # the stages between have two of each chunk
    if ends:
        layers = chunks * (2 * pp - len(ends) if pp > len(ends) else 3)
    extra = [f"account_for_{what}_in_pipeline_split" for what in ("embedding", "loss")]
    if taken := sum(bool(small.get(name)) for name in extra if pp > 1):
        layers = 2 * pp * chunks - taken
    least += -least % (pp * chunks)
    layers = layers if ends or taken else max(layers, least)
    frequency = small.get("moe_layer_freq")
    if isinstance(frequency, list):  # dense layers first, if there are some
        dense = int(0 in frequency)
        small.set("moe_layer_freq", [0] * dense + [1] * (layers - dense), "sizes")
    elif isinstance(frequency, int) and frequency > 1:
        small.set("moe_layer_freq", 2, "sizes")
    small.set("num_layers", layers, "sizes")
    if by_layers:
        per_stage = (layers + taken) // pp
        small.set("num_layers_per_virtual_pipeline_stage", max(per_stage // chunks, 1), "sizes")
    if small.get(each):
        small.set(each, chunks, "sizes")


def _shorten(small: _Shrinking, name: str, job: World, copy: World, least: int) -> None:
    """Shorten a pattern of a hybrid model: each stage has one layer of each kind."""
    main, *mtp = small.get(name).split("/")
    kinds, *after = ("".join(dict.fromkeys(one.replace("|", ""))) for one in (main, *mtp[:1]))
    stages = copy.pp * (2 if main.count("|") + 1 > job.pp > 1 else 1)
    kinds *= math.ceil(least / len(kinds) / stages)
    pattern = ("|" * ("|" in main)).join([kinds] * stages)
    small.set(name, "/".join([pattern, *after]), "sizes")
    if small.get("num_layers") is not None:
        small.set("num_layers", len(kinds) * stages, "sizes")


def _resize(small: _Shrinking, job: World, copy: World) -> None:
    """Narrow the model and its samples."""
    for name, most in _AT_MOST.items():
        if (value := small.get(name)) is not None and value > most:
            small.set(name, most, "sizes")
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
    if (small.get("mamba_num_groups") or 0) > groups:
        sizes["mamba_num_groups"] = groups
    if small.get("num_experts"):
        sizes["num_experts"] = EXPERTS
    if small.get("overlap_grad_reduce"):
        sizes |= {"ddp_bucket_size": SEVERAL_BUCKETS, "ddp_num_buckets": None}
    if small.get("hierarchical_context_parallel_sizes"):
        sizes["hierarchical_context_parallel_sizes"] = [1, copy.cp]
    for name, value in sizes.items():
        small.set(name, value, "sizes")


def parts_of(args: object, copy: World) -> list[str]:
    """Which ``PARTS`` a copy's arguments have, and its dimensions above 1."""
    found = [
        name
        for name, off in PARTS.items()
        if any(
            getattr(args, key, value) not in (value, None)
            for key, value in list(off.items())[: 3 if name == "interleaving" else 1]
        )
    ]
    return found + [name for name in ("cp", "ep", "tp", "pp", "dp") if getattr(copy, name) > 1]


def lay_out(args: object, here: World, left_out: Iterable[str]) -> None:
    """Leave out of a copy's arguments what is asked for and what cannot be without a dimension.

    Args:
        args: of the copy; they are changed.
        here: the copy's world, a part of it, or one rank.
        left_out: of ``PARTS``.
    """
    off = dict[str, object]()
    asked = {*left_out, *(["--sequence-parallel"] if here.tp == 1 else [])}
    asked |= {"interleaving", "--defer-embedding-wgrad-compute"} if here.pp == 1 else set()
    for name in PARTS:
        off |= PARTS[name] if name in asked else {}
    off |= _OF_PIPELINES if here.pp == 1 else {}
    off |= _OF_CONTEXTS if here.cp == 1 else {}
    if "interleaving" in asked and (pattern := getattr(args, "hybrid_layer_pattern", None)):
        off["hybrid_layer_pattern"] = pattern.replace("|", "")
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
