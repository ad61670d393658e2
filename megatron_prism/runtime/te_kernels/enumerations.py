"""Enumerations of ``transformer_engine_torch`` (common/util/pybind_helper.h @v2.18).

Python compares members and prints their names, so that most are made as they are asked for, also
those of a later release.  Names and numbers are C++'s where Python stores them or, in 2.20, holds
C++'s list against its own.
"""

from __future__ import annotations

import enum
from typing import Any

from megatron_prism.core.megatron_source import Release

_CLOSED = {
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
                     "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
}  # fmt: skip
_DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7,
           "kFloat8E5M2": 8, "kFloat4E2M1": 10}  # fmt: skip
_BACK_ENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
_LAST_MAX512 = (2, 17)  # cuDNN's kernel of up to 512 rows went with 2.18
# the classes of userbuffers are asked for members, too, and never made
_OPEN = (
    "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_Softmax_Type", "NVTE_QKV_Format", "NVTE_QKV_Layout",
    "NVTEScalingMode", "Float8BlockScaleTensorFormat", "NVTERoutingMapFormat",
    "NVTEQBHistogramMode", "CommOverlapType", "CommOverlapAlgo", "CommOverlapHelper",
    "CommOverlap", "CommOverlapP2P", "CommOverlapCore",
)  # fmt: skip


class Member(int):
    """A member of an open enumeration ``kind``."""

    kind: str
    name: str

    @property
    def value(self) -> int:
        return int(self)

    def __repr__(self) -> str:
        return f"{self.kind}.{self.name}"


class _Open(type):
    members: dict[str, Member]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = Member(len(cls.members))
        member.kind, member.name = cls.__name__, name
        cls.members[name] = member
        setattr(cls, name, member)
        return member


def enumerations(release: Release) -> dict[str, type]:
    """Name -> enumeration, as ``release`` has them."""
    back_ends = dict(_BACK_ENDS)
    if release <= _LAST_MAX512:
        back_ends["NVTE_F16_max512_seqlen"] = 0
    numbered = {
        "DType": _DTYPES,
        "NVTE_Fused_Attn_Backend": back_ends,
        **{name: {m: i for i, m in enumerate(words.split())} for name, words in _CLOSED.items()},
    }
    closed: dict[str, Any] = {name: enum.IntEnum(name, of) for name, of in numbered.items()}
    return {**closed, **{name: _Open(name, (), {"members": {}}) for name in _OPEN}}
