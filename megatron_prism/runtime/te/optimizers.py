"""FusedAdam and the multi-tensor kernels (pytorch/optimizers/ @v2.9).

State: exp_avg and exp_avg_sq per parameter, fp32 unless asked otherwise (fused_adam.py:379), and a
master copy if ``master_weights``, or its 16 low bits if ``store_param_remainders`` and it is fp32.
States of 16 bits are widened for the step, a whole group of parameters at once; fp16 is scaled.
From v2.13 on the kernel takes two moments in bf16 as they are (fused_adam.py:220 @v2.17).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.unsupported import refuse, since

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_R = TypeVar("_R")
Lists = Sequence[Sequence[torch.Tensor]]
_STATES = ("exp_avg", "exp_avg_sq", "master_param")
_HIGHEST = {  # that a scaled value takes; None: not scaled
    torch.float32: None,
    torch.bfloat16: None,
    torch.float16: torch.finfo(torch.float16).max / 2,
}


class MultiTensorApply:
    """Calls a multi-tensor kernel (multi_tensor_apply.py:15 @v2.9)."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., _R], flag: torch.Tensor, lists: Lists, *args: object
    ) -> _R:
        return op(self.chunk_size, flag, lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(
    chunk: int, flag: torch.Tensor, lists: Lists, scale: float | torch.Tensor
) -> None:
    """``lists[1] = lists[0] * scale``; ``flag`` is set where something is not finite."""
    for source, to in zip(*lists, strict=True):
        if source.is_meta or to.is_meta:
            fused("multi_tensor_scale", 0, source, to)
            continue
        if source is not to or not isinstance(scale, float) or scale != 1.0:
            to.copy_(source * scale)
        if not torch.isfinite(to).all():
            flag.fill_(1)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_l2norm(
    chunk: int, flag: torch.Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(norm of all of ``lists[0]``, norm of each or None)."""
    tensors = lists[0]
    if tensors and tensors[0].is_meta:
        fused("multi_tensor_l2norm", 0, *tensors)
        one = tensors[0].new_empty(1, dtype=torch.float32)
        each = tensors[0].new_empty(len(tensors), dtype=torch.float32) if per_tensor else None
        return one, each
    norms = [torch.linalg.vector_norm(t.detach(), dtype=torch.float32) for t in tensors]
    each = torch.stack(norms) if norms else torch.zeros(0, device=flag.device)
    return torch.linalg.vector_norm(each).reshape(1), each if per_tensor else None


def multi_tensor_unscale_l2norm(
    chunk: int, flag: torch.Tensor, lists: Lists, inv_scale: torch.Tensor, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norms after multiplication by ``inv_scale``."""
    total, each = multi_tensor_l2norm(chunk, flag, lists, per_tensor)
    if total.is_meta:
        return total, each
    return total * inv_scale, None if each is None else each * inv_scale


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW (fused_adam.py:33 @v2.9)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad or capturable:
            refuse("FusedAdam with amsgrad or capturable")
        dtypes = (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype)
        self.name_to_dtype_map = dict(zip(_STATES, dtypes, strict=True))
        if any(d not in _HIGHEST for d in dtypes):
            refuse("FusedAdam with fp8 state", fix="keep the state in fp32, fp16 or bf16")
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        self.adam_w_mode, self.capturable = int(adam_w_mode), capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        self._fuses = exp_avg_dtype == exp_avg_sq_dtype == torch.bfloat16 and since(2, 13)
        self._scales: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if set_to_none:
                    p.decoupled_grad = None
                else:
                    p.decoupled_grad.zero_()

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Zero moments, and the master copy if there is one."""
        for name in _STATES[:2]:
            self._make(param, name, self.name_to_dtype_map[name]).zero_()
        if self.master_weights and store_param_remainders:
            self._make(param, "master_param", torch.int16).zero_()
        elif self.master_weights:
            self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def _make(self, param: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        made = self.state[param][name] = torch.empty_like(param, dtype=dtype)
        if dtype in (torch.float16, torch.bfloat16):
            self._scales[param, name] = torch.ones(1, dtype=torch.float32, device=param.device)
        return made

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """The state as fp32 (remainders stay int16)."""
        value = self.state[param][state_name]
        if value.dtype in (torch.int16, torch.float32):
            return value
        wide = value.float()
        return wide if value.dtype == torch.bfloat16 else wide.mul_(self._scales[param, state_name])

    def _for_step(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """The state as the kernel takes it; with values ``_update`` is the kernel, in fp32."""
        if self._fuses and param.is_meta and name in _STATES[:2]:
            return self.state[param][name]
        return self.get_unscaled_state(param, name)

    def set_scaled_state(self, param: torch.Tensor, state_name: str, value: torch.Tensor) -> None:
        """Set one state, made first if there is none; of a scaled one ``value`` is used up."""
        if state_name not in self.state[param]:
            dtype = self.name_to_dtype_map[state_name]
            self._make(param, state_name, value.dtype if value.dtype == torch.int16 else dtype)
        to = self.state[param][state_name]
        if (highest := _HIGHEST.get(to.dtype)) is not None:
            scale = self._scales[param, state_name]
            low, high = torch.aminmax(value)
            torch.div(torch.maximum(-low, high), highest, out=scale[0])
            value.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
        to.copy_(value.bfloat16() if to.dtype == torch.bfloat16 else value)

    def step(  # type: ignore[override] # torch has it as two overloads, of which this is both
        self, closure: Callable[[], float] | None = None, grad_scaler: object = None
    ) -> float | None:
        """One update, in place."""
        loss = closure() if closure is not None else None
        before: list[dict[str, torch.Tensor]] = []  # a group's are there until the next one's are
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            wide: list[dict[str, torch.Tensor]] = []
            params = []
            for p in group["params"]:
                remainders = self.store_param_remainders and p.dtype == torch.bfloat16
                if not self.state[p]:
                    self.initialize_state(p, remainders)
                grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if grad is not None:
                    params.append((p, grad))
                    wide.append({name: self._for_step(p, name) for name in self.state[p]})
            before = wide
            for (p, grad), state in zip(params, wide, strict=True):
                if p.is_meta:  # reads four, writes three of them
                    fused("adam", 0, p, p, grad, *(2 * [*state.values()]))
                else:
                    with torch.no_grad():
                        self._update(p, grad, group, state)
            with torch.no_grad():
                for (p, _), state in zip(params, wide, strict=True):
                    for name, value in state.items():
                        if value is not self.state[p][name]:
                            self.set_scaled_state(p, name, value)
        del before
        return loss

    def _update(
        self,
        p: torch.Tensor,
        grad: torch.Tensor,
        group: dict[str, Any],
        state: dict[str, torch.Tensor],
    ) -> None:
        """``state`` in fp32, which changes in place."""
        beta1, beta2 = group["betas"]
        master = state.get("master_param")
        low = master if master is not None and master.dtype == torch.int16 else None
        x = p if master is None else master if low is None else _joined(p, low)
        wide, decay = x.float(), group["weight_decay"]
        g = grad.float()
        if not self.adam_w_mode:
            g = g + decay * wide
        m = state["exp_avg"].lerp_(g, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).add_(g * g, alpha=1 - beta2)
        correct = group["bias_correction"]
        c1 = 1 - beta1 ** group["step"] if correct else 1.0
        c2 = 1 - beta2 ** group["step"] if correct else 1.0
        change = (m / c1) / ((v / c2).sqrt() + group["eps"])
        if self.adam_w_mode:
            change = change + decay * wide
        wide = wide - group["lr"] * change
        if low is not None:
            _split_into(wide, p, low)
            return
        if master is not None:
            master.copy_(wide)
        p.copy_(wide)


def _joined(p: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """fp32 from bf16 and its 16 low bits."""
    high = p.detach().contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def _split_into(wide: torch.Tensor, p: torch.Tensor, low: torch.Tensor) -> None:
    """Write bf16 and remainder so that ``_joined`` gives ``wide`` again."""
    bits = wide.contiguous().view(torch.int32)
    rest = ((bits + 0x8000) & 0xFFFF) - 0x8000
    low.copy_(rest)
    p.copy_(((bits - rest) >> 16).to(torch.int16).view(torch.bfloat16))


class FusedSGD(torch.optim.SGD):
    """SGD with momentum; torch's own."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **rest: object,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
