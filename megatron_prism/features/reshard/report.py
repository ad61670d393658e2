"""A planned reading of a checkpoint as text."""

from __future__ import annotations

from megatron_prism.core.columns import columns
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.core.world import format_ranks
from megatron_prism.features.reshard.plan import REFUSED_MATCHES, Reshard, Tensor

_MOST_TENSORS = 20  # of each kind that are listed
_MOST_RANKS = 12
_LONGEST_REFUSAL = 300  # letters


def render_text(plan: Reshard) -> str:
    """Write the verdict, then what does not fit, then what is read."""
    stored = plan.checkpoint
    size = format_bytes(sum(stored.file_bytes.values()))
    files = counted(len(stored.file_bytes), "file")
    tensors = counted(len(stored.tensors), "tensor")
    lines = [
        f"{stored.folder}: {tensors}, {size} in {files}",
        f"into {plan.world}",
        "",
        *_verdict(plan),
        *_states(plan),
        *_shifted_states(plan),
        *_tensors(plan),
        *_reads(plan),
    ]
    # what was assumed of the job that saved it
    if plan.has_stand_in:
        lines.append(
            "the arguments of the checkpoint's job are not here (they are in common.pt or in the "
            "file of its first rank): tp, pp and the number of ranks are those of its objects' "
            "names, all else counts as unchanged"
        )
    return "\n".join(lines) + "\n"


def _verdict(plan: Reshard) -> list[str]:
    """Say whether Megatron loads it."""
    # names do not say in which optimizer states of experts are
    if plan.loads and plan.assumes_optimizers:
        return ["Megatron loads it, if both jobs have expert parallelism or neither has."]
    if plan.loads:
        return ["Megatron loads it."]
    refusal = plan.refusal.partition("\n")[0]
    if len(refusal) > _LONGEST_REFUSAL:
        refusal = refusal[:_LONGEST_REFUSAL] + " …"
    lines = [f"Megatron refuses it: {refusal}"]
    # the second try has shown whether the optimizer's states are the obstacle
    if plan.without_optimizer:
        lines.append("  fix: --no-load-optim --no-load-rng: without these states it loads")
    elif plan.without_optimizer is not None:
        lines.append("  it does without states of the optimizer, too")
    return lines


def _states(plan: Reshard) -> list[str]:
    """Say what becomes of the optimizer's states."""
    how = {
        "buckets": "kept by buckets (dp_reshardable): they fit the same tp and pp alone",
        "names": "kept by names of parameters: they fit layouts with as many optimizers",
        "": "not in the checkpoint",
    }[plan.checkpoint.optimizer_format]
    if plan.states_survive:
        outcome = "they go on"
    elif plan.loads:
        outcome = "they are not read"
    else:
        outcome = "they do not go on"
    lines = [f"optimizer states: {how}; {outcome}"]
    if plan.checkpoint.optimizer_format == "buckets" and not plan.loads:
        lines.append("  fix: save with --dist-ckpt-optim-fully-reshardable in the layout of before")
    return lines


def _shifted_states(plan: Reshard) -> list[str]:
    """Warn of states that the job would save in the wrong place."""
    if not plan.shifted_states:
        return []
    parameters = counted(len(plan.shifted_states), "parameter")
    lines = [f"saved again by this job, states of {parameters} are lost: Megatron before 0.20"]
    lines.append("  shifts all that is behind a padded bucket (NVIDIA/Megatron-LM#5077)")
    for name, elements in [*plan.shifted_states.items()][:_MOST_TENSORS]:
        lines.append(f"  {name}  by {counted(elements, 'element')}")
    if len(plan.shifted_states) > _MOST_TENSORS:
        hidden = len(plan.shifted_states) - _MOST_TENSORS
        lines.append(f"  … and {hidden:,} more: --json has all")
    lines.append("  fix: save without --dist-ckpt-optim-fully-reshardable, or Megatron 0.20")
    return lines


def _tensors(plan: Reshard) -> list[str]:
    """List the tensors that do not map as they are."""
    lines = [f"tensors that map as they are: {plan.num_same:,}"]
    by_match: dict[str, list[Tensor]] = {}
    for tensor in plan.tensors:
        by_match.setdefault(tensor.match, []).append(tensor)
    for match, tensors in by_match.items():
        is_refused = " (refused)" if match in REFUSED_MATCHES else ""
        lines.append(f"{match}{is_refused}: {len(tensors):,}")
        for tensor in tensors[:_MOST_TENSORS]:
            lines.append(f"  {tensor.key}  {_change(tensor)}")
        if len(tensors) > _MOST_TENSORS:
            lines.append(f"  … and {len(tensors) - _MOST_TENSORS:,} more: --json has all")
    # not all stages and expert-parallel ranks were planned
    if plan.unexpected is None:
        lines.append("in the checkpoint alone: unknown, ranks that may ask were not planned")
    elif plan.unexpected:
        lines.append(f"in the checkpoint alone: {len(plan.unexpected):,}")
        for key in plan.unexpected[:_MOST_TENSORS]:
            lines.append(f"  {key}")
        if len(plan.unexpected) > _MOST_TENSORS:
            lines.append(f"  … and {len(plan.unexpected) - _MOST_TENSORS:,} more: --json has all")
    return lines


def _change(tensor: Tensor) -> str:
    """Write a tensor's shape and type, stored and in the job."""
    wanted = f"{tensor.dtype}{list(tensor.shape)}"
    # the checkpoint has no such tensor
    if not tensor.stored_dtype:
        return wanted
    return f"{tensor.stored_dtype}{list(tensor.stored_shape)} -> {wanted}"


def _reads(plan: Reshard) -> list[str]:
    """Write what each planned rank reads."""
    if not plan.loads:
        return []
    header = ["rank", "takes", "reads", "files", "host at once", "device peak"]
    rows = [header]
    for rank in plan.ranks[:_MOST_RANKS]:
        rows.append(
            [
                f"{rank.rank:,}",
                format_bytes(rank.taken_bytes),
                format_bytes(rank.read_bytes),
                f"{rank.num_files:,}",
                format_bytes(rank.host_bytes),
                format_bytes(rank.device_peak),
            ]
        )
    lines = ["", *columns(rows, left=0)]
    if len(plan.ranks) > _MOST_RANKS:
        lines.append(f"… and {len(plan.ranks) - _MOST_RANKS:,} more: --csv FILE or --json has all")
    total = f"all {plan.world.size:,} ranks read {format_bytes(plan.total_read_bytes)}"
    # planned ranks stand for the others
    if len(plan.ranks) < plan.world.size:
        planned = format_ranks(rank.rank for rank in plan.ranks)
        total += f", if the others read as ranks {planned} do"
    if plan.seconds is not None:
        total += f": {plan.seconds:,.1f} s"
    lines.append(total)
    return lines


@renders(Reshard)
class ReshardRenderer(Renderer):
    """Writes a planned reading."""

    text = staticmethod(render_text)
