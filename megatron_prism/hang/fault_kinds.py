"""Which kinds of faults are there, what do they take, and does a job hang of them?

The names are those of ``KIND@SELECTOR[:PARAM=VALUE,…]`` (``fault_plan``); NVRx's and Megatron's own
words are aliases.
"""

from __future__ import annotations

__all__ = ["ALIASES", "KINDS", "MESSAGES", "TENSORS", "VALUES", "WATCHDOG_MS"]

# kind -> (parameters it takes, what happens)
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "drop": ((), "the call is not made"),
    "skip_microbatch": ((), "the calls of a microbatch are not made"),
    "swap": (("with",), "the call changes places with group:op:nth"),
    "shape": (("n",), "n elements instead (default: half of them)"),
    "dtype": (("to",), "another dtype (default: fp32, or bf16)"),
    "splits": (("rows",), "an all-to-all sends rows more to one member, fewer to the next"),
    "root": (("to",), "another root (default: the next member)"),
    "reduce_op": (("to",), "another reduction (default: max, or sum)"),
    "op": (("to",), "another collective (default: broadcast, or all_reduce)"),
    "group": (("to",), "made in another group"),
    "p2p_lost": ((), "a message is not sent, or not received"),
    "p2p_dup": ((), "a message is sent, or received, twice"),
    "p2p_swap": ((), "a message goes to, or is awaited from, the other side"),
    "exception": (("code",), "the rank raises and leaves no dump"),
    "exit": (("code",), "the process ends"),
    "sigkill": ((), "the process is killed"),
    "segfault": ((), "the process is killed by itself"),
    "sigstop": ((), "the process stands still"),
    "gil": ((), "the host stands still, its watchdog does not"),
    "data_end": (("after",), "the data loader ends: the rank leaves"),
    "data_stall": (("after", "s"), "the data loader does not answer"),
    "gpu_hang": ((), "a kernel does not end"),
    "gpu_error": ((), "completions are not seen any more, a few calls later the host stops"),
    "nan": (("tensor",), "a value becomes NaN; the rank that checks raises"),
    "inf": (("tensor",), "a value becomes infinite"),
    "oom": (("at_bytes",), "an allocation beyond at_bytes, or in the phase, fails"),
    "bitflip": (("tensor", "bit"), "one bit of a value flips (default: its highest exponent bit)"),
    "delay": (("ms",), "the call is made later"),
    "slow": (("factor",), "the rank computes factor times as long"),
    "nic": (("bw_factor", "latency_us"), "calls between nodes take longer: modelled time only"),
    "env": (("NAME",), "an environment variable that the other ranks do not have"),
}
MESSAGES = ("p2p_lost", "p2p_dup", "p2p_swap")
# NVRx (shared_utils/inject_fault.py) and Megatron's --fault-injector-fault-types
ALIASES = {"gpu_error": "gpu_error", "gpu_sleep": "gpu_hang", "workload_exc": "exception",
            "async_exc": "exception", "signal_exc": "exception", "os_abort": "segfault",
            "lock_gil": "gil", "sigint": "exception", "sigterm": "exit"}  # fmt: skip
VALUES = ("nan", "inf", "bitflip")  # of data: programs have none
TENSORS = ("loss", "act", "grad")  # what of a rank they happen to; without, what a call gives
WATCHDOG_MS = 600_000  # Megatron's --distributed-timeout-minutes; who is later than that is lost
