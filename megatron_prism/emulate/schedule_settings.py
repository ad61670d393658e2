"""Which schedule is meant?  ``ScheduleSettings``: sizes and Megatron's own switches, checked.

In : keyword arguments.  Out: a frozen value, or a UsageError that says what to type instead.  It
knows the rules of Megatron's arguments (training/arguments.py:573 @core_v0.16.1) and of its
interleaved schedule (core/pipeline_parallel/schedules.py:1006), and no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_prism.core.errors import UsageError

__all__ = ["ScheduleSettings"]

_COUNTS = ("pp", "vpp", "microbatches", "group_size", "layers", "first_layers", "last_layers")
_TYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class ScheduleSettings:
    """A schedule to record.

    pp, vpp, microbatches : stages, chunks of a stage (None or 1: not interleaved), microbatches
    group_size        : microbatch_group_size_per_vp_stage; None: pp, as in Megatron
    overlap_p2p       : overlap_p2p_comm; None: on if interleaved, as in Megatron's arguments
    warmup_flush      : overlap_p2p_comm_warmup_flush
    forward_only      : evaluation
    align_grad_reduce : chunks reduce their gradients when the schedule says so; False: as soon as
                        the last backward makes them
    layers, layout, first_layers, last_layers, mtp : what the chunks are made of (num_layers,
                        pipeline_model_parallel_layout, num_layers_in_first/last_pipeline_stage,
                        mtp_num_layers); only an MTP layer on a stage of its own changes the order
    ep_overlap, delay_wgrad : overlap_moe_expert_parallel_comm, delay_wgrad_compute
    variable_lengths  : variable_seq_lengths: shapes are sent before tensors
    shape, dtype      : [tokens, micro-batch, hidden] that stages exchange; None: unknown
    """

    pp: int
    vpp: int | None = None
    microbatches: int = 1
    group_size: int | None = None
    overlap_p2p: bool | None = None
    warmup_flush: bool = False
    forward_only: bool = False
    align_grad_reduce: bool = True
    layers: int | None = None
    layout: str | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    mtp: int = 0
    ep_overlap: bool = False
    delay_wgrad: bool = False
    variable_lengths: bool = False
    shape: tuple[int, int, int] | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name not in ("pp", "microbatches")):
                raise UsageError(f"{name}={value}: a number of at least 1", fix=f"{name}=1")
        if self.mtp < 0:
            raise UsageError(f"mtp={self.mtp}: a number of layers", fix="mtp=1, or leave it out")
        if self.dtype not in _TYPES:
            raise UsageError(f"dtype={self.dtype} is not sent", fix=f"use {', '.join(_TYPES)}")
        self._take_layout()
        if self.vpp == 1:  # Megatron's arguments take one chunk for not interleaved as well
            object.__setattr__(self, "vpp", None)
        if self.vpp is not None and self.pp == 1:
            raise UsageError(
                f"vpp={self.vpp} without a pipeline: there is nothing to interleave",
                fix="pp=2 or more, or leave vpp out",
            )
        if self.overlap_p2p is None:
            object.__setattr__(self, "overlap_p2p", self.vpp is not None)
        self._check_switches()
        if self.vpp is not None:
            self._check_groups()

    def _take_layout(self) -> None:
        """A layout says how many chunks there are: stages and chunks, separated by ``|``."""
        if self.layout is None:
            return
        from megatron_prism.emulate.schedule_model import layout_chunks

        chunks = layout_chunks(self.layout)
        if chunks % self.pp:
            raise UsageError(
                f"layout {self.layout} has {chunks} chunks, which {self.pp} stages cannot share",
                fix=f"a layout of {self.pp} or {2 * self.pp} chunks, or another pp",
            )
        if self.vpp not in (None, chunks // self.pp):
            raise UsageError(
                f"layout {self.layout} has {chunks // self.pp} chunks a stage, not vpp={self.vpp}",
                fix=f"vpp={chunks // self.pp}, or leave vpp out",
            )
        object.__setattr__(self, "vpp", chunks // self.pp)

    def _check_switches(self) -> None:
        if self.overlap_p2p and self.vpp is None:
            raise UsageError(
                "sends and receives overlap only in the interleaved schedule",
                fix="vpp=2 or more, or overlap=false",
            )
        if self.vpp is not None and self.pp == 2 and not self.overlap_p2p:
            raise UsageError(
                "pp=2 interleaved without overlap: Megatron refuses two sends between the same "
                "ranks in one batch",
                fix="overlap=true, or pp=4",
            )
        if self.warmup_flush and not self.overlap_p2p:
            raise UsageError("warmup_flush needs overlapping p2p", fix="overlap=true")
        if self.ep_overlap and self.pp > 1 and self.vpp is None:
            raise UsageError("ep_overlap on a pipeline needs chunks", fix="vpp=2 or more")
        if self.delay_wgrad and not self.ep_overlap:
            raise UsageError("delay_wgrad needs ep_overlap", fix="ep_overlap=true")
        if self.group_size is not None and self.vpp is None:
            raise UsageError("group_size belongs to the interleaved schedule", fix="vpp=2")

    def _check_groups(self) -> None:
        """The last group of microbatches must be whole or at least as long as the pipeline."""
        group, m = self.group_size or self.pp, self.microbatches
        if group < self.pp:
            raise UsageError(
                f"group_size={group} is below pp={self.pp}: the pipeline would run dry",
                fix=f"group_size={self.pp}",
            )
        if not self._fits(m):
            low = next((n for n in range(m - 1, 0, -1) if self._fits(n)), None)
            high = next(n for n in range(m + 1, m + 2 * group) if self._fits(n))
            near = " or ".join(f"microbatches={n}" for n in (low, high) if n)
            raise UsageError(
                f"{m} microbatches do not divide into groups of {group} (pp={self.pp}): the last "
                f"group would have {m % group} of them",
                fix=near,
            )

    def _fits(self, m: int) -> bool:
        group = self.group_size or self.pp
        return m >= group and (m % group == 0 or m % group >= self.pp)

    @property
    def chunks(self) -> int:
        """Model chunks of one stage."""
        return self.vpp or 1

    @property
    def knows_layers(self) -> bool:
        """Whether it was said what the chunks are made of."""
        return bool(self.layers or self.layout or self.first_layers or self.last_layers or self.mtp)

    def described(self) -> dict[str, str]:
        """What differs from the defaults, as plain text for ``Programs.source``."""
        shown = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default or f.name in ("pp", "microbatches"):
                text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
                shown[f.name] = text
        return shown
