"""What a line of a job's log says: the grammar, one row for each kind of line.

In : a line.  Out: what it says (``Says``), as the match of its row in ``LINES``.  Each row has a
line as somebody printed it, so that a test can hold the row against it, and its source.

Sources: ``NCCL`` is torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, by the releases of torch that
print it so; ``owner/name#1`` is a public report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_prism.features.hang.log_kinds import LogLine, Says


def _line(
    says: Says, word: str, pattern: str, source: str, example: str, flags: int = 0
) -> LogLine:
    return LogLine(says, word, re.compile(pattern, flags), source, example)


NUMBERS = r"last\s*enqueued\s*(?:NCCL\s*)?work:\s*(-?\d+),\s*(?:last\s*started\s*(?:NCCL\s*)?work:"
NUMBERS += r"\s*-?\d+,[^:]*?\s*)?last\s*completed\s*(?:NCCL\s*)?work:\s*(-?\d+)"
_PRINT = r"CollectiveFingerPrint\(.*?\)(?=, but|\.?\s*Collectives|\.|$)|\w+"

LINES = (
    # -- torch's watchdogs
    _line(Says.CALL, "WorkNCCL(", r"aught collective operation timeout:\s*WorkNCCL\((?P<body>"
          r"(?:(?!ran for|WorkNCCL).)*)(?:ran for (?P<ran_ms>\d+))?",
          "NCCL checkTimeout, 1.9 on (\"Caught\" to 1.13); also inside \"terminated with "
          "exception\" (2.0 on) and \"what():\"; without NumelIn before 2.1",
          "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, "
          "OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600007 "
          "milliseconds before timing out."),
    _line(Says.COUNTS, "enqueued", NUMBERS,
          "NCCL watchdogHandler: 2.2 (Timeout at NCCL work), 2.3 to 2.5 (detected by watchdog at "
          "work), 2.6 on (PG status, last started since 2.13); HeartbeatMonitor's dump signal",
          "[PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog at work sequence "
          "id: 77 PG status: last enqueued work: 78, last completed work: 76", re.IGNORECASE),
    _line(Says.FAILED, "work", r"(?:at\s*work\s*sequence\s*id|at\s*NCCL\s*work|at\s*work):\s*(\d+)",
          "NCCL watchdogHandler, as COUNTS",
          "Exception (either an error or timeout) detected by watchdog at work: 808, last "
          "enqueued NCCL work: 811, last completed NCCL work: 807."),
    _line(Says.NATIVE_STACK, "Stack trace of the failed", r"Stack trace of the failed collective:",
          "NCCL printTraceback, 2.5 on; its frames follow without a prefix",
          "[rank2]:[E816 00:34:01.14 ProcessGroupNCCL.cpp:667] Stack trace of the failed "
          "collective:"),
    _line(Says.DEVICE, "CUDA error", r"thread terminated with exception: (CUDA error: .*)",
          "NCCL ncclCommWatchdog, 2.0 on",
          "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with "
          "exception: CUDA error: an illegal memory access was encountered"),
    _line(Says.EVIDENCE, "watchdog got stuck", r"ProcessGroupNCCL's watchdog got stuck for \d+ "
          r"seconds", "NCCL HeartbeatMonitor, 2.2 on",
          "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"),
    _line(Says.EVIDENCE, "ncclUniqueId", r"\[\d+\] is setting up NCCL communicator and retrieving "
          r"ncclUniqueId from \[\d+\]", "NCCL broadcastUniqueNCCLID",
          "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
          "key-value store by key '0'"),
    _line(Says.EVIDENCE, "didn't", r"(?:desync report: )?\[[\d, ]+\] (?:finished|joined|got|never)"
          r"[^\n]*?didn't (?:join|finish) collective #\d+", "TraceUtils.h, 1.12 on",
          "[1] finished collective #5, but didn't join collective #6 (count from 1)"),

    # -- torch's own checks
    _line(Says.DIFFER, "running", r"Rank (?P<rank>\d+) is running (?:inconsistent )?collective: ?"
          rf"(?P<call>{_PRINT})(?:, but Rank (?P<other>\d+) is running collective: ?"
          rf"(?P<others>{_PRINT}))?",
          "ProcessGroupWrapper.cpp verify_tensors (TORCH_DISTRIBUTED_DEBUG=DETAIL): 1.9 to 1.12 "
          "\"inconsistent\", 1.13 the other's kind alone, 2.0 on both",
          "Detected mismatch between collectives on ranks. Rank 2 is running collective: "
          "CollectiveFingerPrint(SequenceNumber=32, OpType=ALLREDUCE), but Rank 3 is running "
          "collective: CollectiveFingerPrint(SequenceNumber=0OpType=GATHER)."),
    _line(Says.ABSENT, "monitoredBarrier", r"Ranks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass "
          r"monitoredBarrier", "ProcessGroupGloo.cpp monitoredBarrier, 1.9 on: rank 0 says it",
          "RuntimeError: Rank 3 failed to pass monitoredBarrier in 60000 ms"),

    # -- launchers
    _line(Says.REPORT, " : ", r"^\s*(?P<name>rank|exitcode)\s*: (?P<number>-?\d+)",
          "torch/distributed/elastic/multiprocessing/errors, ChildFailedError; lzhxmu/CPPO#6",
          "  exitcode  : -9 (pid: 14750)"),
    _line(Says.EVIDENCE, "exitcode:", r"failed \(exitcode: -?\d+\) local_rank: \d+",
          "torch/distributed/elastic/multiprocessing/api.py; hpcaitech/ColossalAI#3514",
          "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 "
          "(pid: 812917) of binary: python"),
    _line(Says.EVIDENCE, "return code", r"exits with return code = -(?:9|11|7|4|8)\b.*",
          "deepspeed/launcher/launch.py sigkill_handler; deepspeedai/DeepSpeed#4890",
          "[ERROR] [launch.py:321:sigkill_handler] ['python', '--local_rank=7'] exits with return "
          "code = -9"),
    _line(Says.TASKS, "srun: error:", r"srun: error: \S+: tasks? (?P<tasks>\d[\d,-]*): "
          r"(?P<cause>Out Of Memory|Segmentation fault|Bus error|Illegal instruction|"
          r"Floating point exception|Killed)",
          "Slurm, srun; nextflow-io/nextflow#5932, hafs-community/HAFS#101, "
          "chrisknewman/tusas#149",
          "srun: error: nid001277: tasks 1-3: Out Of Memory"),
    _line(Says.LAUNCHER_ENDS, "srun: ", r"srun: (?:Terminating (?:job step|StepId)|Job step "
          r"aborted|Force Terminated|forcing job termination)",
          "Slurm, srun; hafs-community/HAFS#101", "srun: Terminating StepId=440575.0"),
    _line(Says.LAUNCHER_ENDS, "CANCELLED AT", r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT",
          "Slurm, slurmstepd; chrisknewman/tusas#149",
          "slurmstepd: error: *** STEP 440575.0 ON nid001277 CANCELLED AT 2023-12-05T07:16:01 ***"),
    _line(Says.ACTOR_DIED, "actor died unexpectedly", r"The actor died unexpectedly",
          "Ray, ActorDiedError, RayActorError before 2.10; hkust-nlp/simpleRL-reason#25, #98",
          "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
    _line(Says.PROCESS, "pid: ", r"^\s*pid: (?P<pid>\d+)$",
          "Ray, in the lines behind ActorDiedError; hkust-nlp/simpleRL-reason#25",
          "        pid: 71876"),
    _line(Says.EVIDENCE, "memory pressure", r"\d+ Workers \(tasks / actors\) killed due to "
          r"memory pressure \(OOM\)", "Ray, raylet's node_manager.cc; vllm-project/vllm#1160",
          "(raylet) node_manager.cc:3049: 10 Workers (tasks / actors) killed due to memory "
          "pressure (OOM), 0 Workers crashed due to other reasons at node"),
    _line(Says.DEDUPLICATED, "across cluster", r"\[repeated \d+x across cluster\]", "Ray's logs",
          "(WorkerDict pid=123) step 3 [repeated 7x across cluster]"),
    _line(Says.EVIDENCE, "OOMKilled", r"(?:\S+\s+\d+/\d+\s+|Reason:\s+)OOMKilled",
          "Kubernetes, kubectl get and describe; flyteorg/flyte#4704",
          "llama-worker-3    0/1     OOMKilled    0          5m"),
    _line(Says.EVIDENCE, "RankMonitorServer", r"\[RankMonitorServer:(?P<monitored>\d+)\] "
          r"(?P<text>Did not get \w+ heartbeat\. Waited [\d.]+)", "nvidia-resiliency-ext",
          "[RankMonitorServer:3] Did not get subsequent heartbeat. Waited 180.0"),
    _line(Says.STARTS, "using world size", r"using world size: \d+", "Megatron's arguments.py",
          "using world size: 8, data-parallel size: 2"),
    _line(Says.STARTS, "worker group", r"[Rr]estart(?:ing)? worker group",
          "torch elastic, agent/server/api.py", "[default] Worker group FAILED. 2/3 attempts left; "
          "will restart worker group"),

    # -- kernel, drivers and NCCL
    _line(Says.KILLED, "oom", r"oom[-_ ]kill", "slurmstepd, kernel; lanl/PyBNF#118",
          "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0.", re.IGNORECASE),
    # a process of the node, of whatever rank
    _line(Says.EVIDENCE, "Killed process", r"out of memory: Killed process .*", "kernel: dmesg",
          "Memory cgroup out of memory: Killed process 4711 (python) total-vm:8kB", re.IGNORECASE),
    _line(Says.EVIDENCE, "NVRM", r"NVRM: Xid .*", "kernel: dmesg, NVIDIA's driver",
          "[1234.5] NVRM: Xid (PCI:0000:5e:00): 79, pid=4711, GPU has fallen off the bus."),
    _line(Says.EVIDENCE, "NET/", r"NET/\w+ ?: .*(?:status=|error|timed out|refused).*", "NCCL",
          "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<4711> with status=12"),
)  # fmt: skip


# training logs and progress bars; what W&B prints at the end of a process is none
_ITERATION = re.compile(
    r"^(?!.*wandb:).*?(?:\b(?:iteration|iter|global_step|step|epoch)\b[\s:=\[]{0,12}\d|"
    r"\blm loss\b|\d+/\d+ \[|\bloss ?[:=] ?\d)", re.IGNORECASE
)  # fmt: skip


def is_iteration(text: str) -> bool:
    """Whether a line says that an iteration is over."""
    return _ITERATION.search(text) is not None


def statements(text: str) -> Iterator[tuple[Says, re.Match[str]]]:
    """Yield what a line says, with the match of its row."""
    for line in LINES:
        if line.word in text:
            match = line.pattern.search(text)
            if match is not None:
                yield line.says, match
