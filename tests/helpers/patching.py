"""Patches applied by hand, to stand-ins for Megatron's modules."""

from megatron_prism.emulate.patch import PatchContext
from megatron_prism.emulate.rank.monitor import TrainingMonitor


def context(meta=False, local=(0,), **more):
    return PatchContext(lambda: None, TrainingMonitor(), meta, tuple(local), local[0], **more)


def apply(name, module, context):
    """Apply the patch ``name`` to ``module``, as on tier meta or cpu."""
    from megatron_prism.emulate.patches import patches_for

    chosen = [one for one in patches_for("meta" if context.meta else "cpu") if one.name == name]
    for one in chosen:
        with context.applying(one):
            one.apply(module, context)
