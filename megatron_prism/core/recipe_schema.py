"""What does a recipe say?  The sections of one training job, as plain dataclasses.

In : numbers under Megatron's own names.  Out: the same, checked against each other, and what
follows from them (dp, microbatches, layers per chunk).  Defaults are Megatron's.  It reads no files
(``recipe.py`` does) and starts nothing.

The dataclasses are not frozen because OmegaConf 2.3 refuses to merge into frozen ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_prism.core import recipe_checks, recipe_layers
from megatron_prism.core.world import DEFAULT_ORDER, World

__all__ = ["Hardware", "Model", "Parallel", "Prism", "Recipe", "Train"]


@dataclass
class Model:
    """The GPT model, by the names of Megatron's arguments (training/arguments.py @core_v0.16.1)."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int  # tokens of one sample
    vocab_size: int  # before padding
    ffn_hidden_size: int | None = None  # None: 4 x hidden_size, as Megatron
    num_query_groups: int | None = None  # None: one key/value head per attention head
    kv_channels: int | None = None  # None: hidden_size / num_attention_heads
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int | None = None  # None: seq_length
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    swiglu: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02

    num_experts: int | None = None  # None: a dense model
    moe_ffn_hidden_size: int | None = None  # None: ffn_hidden_size
    moe_layer_freq: Any = 1  # every n-th layer, or a list of 0 and 1 per layer
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str = "aux_loss"
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_dtype: str | None = None
    moe_router_force_load_balancing: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_grouped_gemm: bool = False
    moe_token_dispatcher_type: str = "alltoall"
    moe_permute_fusion: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_shared_expert_intermediate_size: int | None = None

    extra: dict[str, Any] = field(default_factory=dict)  # verbatim to TransformerConfig


@dataclass
class Parallel:
    """How the job is split over its ranks."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None  # model chunks per stage; None: no interleaving
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # None: tp
    sequence_parallel: bool = False
    order: str = DEFAULT_ORDER
    # which stages get more or fewer layers (transformer_block.py get_num_layers_to_build
    # @core_v0.16.1)
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False


@dataclass
class Train:
    """One training run: batches, precision, optimizer, overlap, recomputation."""

    micro_batch_size: int = 1  # sequences
    global_batch_size: int = 1  # sequences
    iterations: int = 3
    bf16: bool = True
    fp8: str | None = None  # recipe: delayed, tensorwise, blockwise or mxfp8; None: no FP8
    optimizer: str = "adam"
    lr: float = 1e-4
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True
    recompute_granularity: str | None = None  # full or selective
    recompute_method: str | None = None  # uniform or block, with full only
    recompute_num_layers: int | None = None
    seed: int = 1234
    data: str = "mock"  # or the path of a text file, read as bytes


@dataclass
class Prism:
    """What to emulate, and where: the same as the --prism-* flags."""

    ranks: str | None = None  # a selector; None: one representative rank per stage
    tier: str = "auto"
    values: str = "mirror"
    out: str | None = None  # artefact folder
    # local: Megatron's own layers; local_flash: the same, on meta without the s x s scores
    transformer_impl: str = "transformer_engine"


@dataclass
class Hardware:
    """What the job is meant for; a free name that only appears in titles."""

    name: str = ""


@dataclass
class Recipe:
    """One job.  Building it checks it: RecipeError or WorldError, with arithmetic and fix."""

    model: Model
    parallel: Parallel
    train: Train = field(default_factory=Train)
    prism: Prism = field(default_factory=Prism)
    hardware: Hardware = field(default_factory=Hardware)
    name: str = ""  # empty: the name of the file

    def __post_init__(self) -> None:
        recipe_checks.check(self)

    @property
    def world(self) -> World:
        """The job's ranks.  WorldError when the sizes do not fit."""
        p = self.parallel
        return World(p.world_size, p.tp, p.cp, p.pp, p.ep, p.etp, p.vpp, p.order)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one rank in one iteration."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.world.dp)

    @property
    def ffn_hidden_size(self) -> int:
        return self.model.ffn_hidden_size or 4 * self.model.hidden_size

    @property
    def kv_channels(self) -> int:
        return self.model.kv_channels or self.model.hidden_size // self.model.num_attention_heads

    @property
    def num_query_groups(self) -> int:
        return self.model.num_query_groups or self.model.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding (training/tokenizer/tokenizer.py _vocab_size_with_padding)."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tp
        return -(-self.model.vocab_size // multiple) * multiple

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """Transformer layers of each chunk of a stage, as Megatron will split them."""
        return recipe_layers.layers_of(self, stage)

    def derived(self) -> dict[str, str]:
        """What follows from the recipe, each with its arithmetic, for people."""
        m, p, t, world = self.model, self.parallel, self.train, self.world
        rows = {"dp": f"{world.dp} = {world.size} / (tp {p.tp} x cp {p.cp} x pp {p.pp})"}
        if m.num_experts:
            rows["expert dp"] = (
                f"{world.edp} = {world.size} / (etp {world.etp} x ep {p.ep} x pp {p.pp})"
            )
        rows["microbatches"] = (
            f"{self.num_microbatches} = {t.global_batch_size} / "
            f"(micro batch {t.micro_batch_size} x dp {world.dp})"
        )
        rows["layers per chunk"] = recipe_layers.describe(self)
        rows["vocabulary"] = f"{self.padded_vocab_size:,} (padded from {m.vocab_size:,})"
        rows["tokens per iteration"] = (
            f"{t.global_batch_size * m.seq_length:,} = {t.global_batch_size} x {m.seq_length}"
        )
        return rows
