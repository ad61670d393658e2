"""Changes of a job that only a new capture weighs: optimizer, offloading, stages, layers.

In : what the slices say of their job.  Out: ``Ladder``s of changes, of which each step frees more
than the one before, by more options of Megatron's.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_prism.core.jobs.megatron_flags import LAYERS_BY_HAND
from megatron_prism.core.units import counted

if TYPE_CHECKING:
    from megatron_prism.core.world import World

JOB_FLAGS = "--prism-job-flags"  # its value stands behind the job's own arguments
_FRACTIONS = 20  # steps of the part of the optimizer that is offloaded
# Transformer Engine's older way of offloading, without which Megatron refuses to (arguments.py:1856
# @0.19.0)
_OLDER_OFFLOADING = {"NVTE_CPU_OFFLOAD_V1": "1"}
# in the order in which they are taken: attn_proj is refused without core_attn
_OFFLOADED = ("core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear")
_OFFLOADED_OF_EXPERTS = ("moe_act", "expert_fc1")


@dataclass(frozen=True)
class LineChange:
    """Options that a job gets in addition, which win over those that it has.

    Args:
        options: name without dashes -> value; "" where the name alone says it.
        variables: of the environment -> value.
    """

    options: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def with_change(self, other: LineChange) -> LineChange:
        """Return both changes in one."""
        return LineChange(
            {**self.options, **other.options},
            {**self.variables, **other.variables},
        )

    def contradicts(self, other: LineChange) -> bool:
        """Return whether both give an option another value."""
        shared = self.options.keys() & other.options.keys()
        # the same value twice is harmless: the precise optimizer is in two ladders
        return any(self.options[name] != other.options[name] for name in shared)

    def words(self, is_recipe: bool) -> list[str]:
        """Return what to type behind the job's line, or behind a recipe's name."""
        words: list[str] = []
        for name, value in self.options.items():
            if is_recipe:
                words.append(f"{name.replace('-', '_')}={value or 'true'}")
            else:
                words += [f"--{name}", *value.split()]
        return words

    def text(self, is_recipe: bool) -> str:
        """Write the words as a shell takes them, behind the variables that they need."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        words = self.words(is_recipe)
        if is_recipe:
            return shlex.join([*variables, *words])
        return " ".join([*variables, *words])


@dataclass(frozen=True)
class Ladder:
    """Changes of one kind, of which each frees more than the one before.

    Args:
        name: of the kind.
        steps: the changes.
    """

    name: str
    steps: tuple[LineChange, ...]


def ladders(settings: Mapping[str, str], world: World) -> Iterator[Ladder]:
    """Yield the changes that may free memory of a job.

    Args:
        settings: of the job, by Megatron's names.
        world: of the job.
    """
    makers = (_precise_optimizer, _offloaded_optimizer, _offloaded_activations, _recomputed_layers)
    for make in makers:
        ladder = make(settings, world)
        if ladder.steps:
            yield ladder
    for virtual_stages in _numbers_of_virtual_stages(settings, world):
        change = LineChange(_with_virtual_stages(settings, world, virtual_stages))
        yield Ladder(counted(virtual_stages, "virtual stage"), (change,))


def _has(settings: Mapping[str, str], name: str) -> bool:
    """Return whether a switch is on."""
    return settings.get(name, "").lower() == "true"


def _takes_precise_optimizer(settings: Mapping[str, str]) -> bool:
    """Return whether Megatron's precision-aware optimizer is one for the job."""
    # Megatron refuses others (optimizer_config.py:430-436 @0.19.0)
    is_adam = settings.get("optimizer", "adam") == "adam"
    return is_adam and _has(settings, "use_distributed_optimizer")


def _precise_optimizer(settings: Mapping[str, str], world: World) -> Ladder:
    """Moments in bf16, then gradients, too."""
    steps: list[LineChange] = []
    if _takes_precise_optimizer(settings) and not _has(settings, "optimizer_cpu_offload"):
        precise = {"use-precision-aware-optimizer": ""}
        moments = precise | {"exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}
        if settings.get("exp_avg_sq_dtype") != "bfloat16":
            steps.append(LineChange(moments))
        # gradients of fp32 stay so where the job insists on it
        if settings.get("main_grads_dtype") != "bfloat16":
            steps.append(LineChange(moments | {"main-grads-dtype": "bf16"}))
    return Ladder("precision-aware optimizer", tuple(steps))


def _offloaded_optimizer(settings: Mapping[str, str], world: World) -> Ladder:
    """More and more of the optimizer on the host."""
    steps = []
    offloaded = 0.0
    if _has(settings, "optimizer_cpu_offload"):
        offloaded = float(settings.get("optimizer_offload_fraction", "1.0"))
    if _takes_precise_optimizer(settings):
        for number in range(1, _FRACTIONS + 1):
            fraction = number / _FRACTIONS
            # a job that offloads half gets no step that brings state back to the device
            if fraction > offloaded:
                options = {
                    # Megatron refuses offloading without it (arguments.py:1803 @0.19.0)
                    "use-precision-aware-optimizer": "",
                    "optimizer-cpu-offload": "",
                    "optimizer-offload-fraction": f"{fraction:g}",
                }
                steps.append(LineChange(options))
    return Ladder("optimizer on the host", tuple(steps))


def _offloaded_activations(settings: Mapping[str, str], world: World) -> Ladder:
    """Inputs of more and more modules on the host."""
    # transformer_config.py:1848 and arguments.py:1854 @0.19.0 refuse both
    is_refused = _has(settings, "cpu_offloading") or settings.get("transformer_impl") == "local"
    has_layers_again = settings.get("recompute_granularity") == "full"
    names: tuple[str, ...] = _OFFLOADED
    # a model without experts has none of their modules
    if settings.get("num_experts", "none").lower() != "none":
        names = _OFFLOADED_OF_EXPERTS + _OFFLOADED
    steps: list[LineChange] = []
    known_modules = settings.get("offload_modules", "")
    if not is_refused and not has_layers_again:
        for number in range(1, len(names) + 1):
            modules = names[:number]
            # the job offloads these already
            if all(module in known_modules for module in modules):
                continue
            options = {
                "fine-grained-activation-offloading": "",
                "offload-modules": " ".join(modules),
            }
            steps.append(LineChange(options, _OLDER_OFFLOADING))
    return Ladder("activations on the host", tuple(steps))


def _recomputed_layers(settings: Mapping[str, str], world: World) -> Ladder:
    """More and more whole layers of each chunk again."""
    num_layers = int(settings.get("num_layers", "0"))
    layers_of_chunk = math.ceil(num_layers / (world.pp * (world.vpp or 1)))
    recomputed = 0
    if settings.get("recompute_granularity") == "full":
        recomputed = layers_of_chunk
        # uniform runs every layer again, so nothing is left to add; block only its first layers
        if settings.get("recompute_method") == "block":
            recomputed = int(settings.get("recompute_num_layers", recomputed))
    steps = []
    for number in range(recomputed + 1, layers_of_chunk + 1):
        options = {
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": str(number),
        }
        steps.append(LineChange(options))
    return Ladder("layers again", tuple(steps))


def _numbers_of_virtual_stages(settings: Mapping[str, str], world: World) -> list[int]:
    """Return one virtual stage a rank and twice those of the job, where these divide the layers."""
    num_layers = int(settings.get("num_layers", "0"))
    # layers placed by hand: their number does not say whether they divide
    if world.pp < 2 or any(settings.get(name, "none") != "none" for name in LAYERS_BY_HAND):
        return []
    numbers = []
    stages_now = world.vpp or 1
    for stages in (1, 2 * stages_now):
        # a command that Megatron refuses for chunks of unequal length is not worth a capture
        if stages != stages_now and num_layers % (world.pp * stages) == 0:
            numbers.append(stages)
    return numbers


def _with_virtual_stages(settings: Mapping[str, str], world: World, stages: int) -> dict[str, str]:
    """Return the option that gives a rank so many stages, the one of two that the job has."""
    by_layers = settings.get("num_layers_per_virtual_pipeline_stage", "none").lower()
    # Megatron takes only one of both at a time (arguments.py:896 @0.19.0)
    if by_layers == "none":
        return {"num-virtual-stages-per-pipeline-rank": str(stages)}
    layers = int(settings["num_layers"]) // (world.pp * stages)
    return {"num-layers-per-virtual-pipeline-stage": str(layers)}
