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


# counters of a group: issued, then ended
NUMBERS = (
    r"last\s*enqueued\s*(?:NCCL\s*)?work:\s*(-?\d+),\s*"
    r"(?:last\s*started\s*(?:NCCL\s*)?work:\s*-?\d+,[^:]*?\s*)?"
    r"last\s*completed\s*(?:NCCL\s*)?work:\s*(-?\d+)"
)
# a call as torch's own check prints it
_PRINT = r"CollectiveFingerPrint\(.*?\)(?=, but|\.?\s*Collectives|\.|$)|\w+"

LINES = (
    # -- torch's watchdogs
    _line(
        says=Says.CALL,
        word="WorkNCCL(",
        pattern=(
            r"aught collective operation timeout:\s*WorkNCCL\((?P<body>"
            r"(?:(?!ran for|WorkNCCL).)*)(?:ran for (?P<ran_ms>\d+))?"
        ),
        source=(
            'NCCL checkTimeout, 1.9 on ("Caught" to 1.13); also inside "terminated with '
            'exception" (2.0 on) and "what():"; without NumelIn before 2.1'
        ),
        example=(
            "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, "
            "OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600007 "
            "milliseconds before timing out."
        ),
    ),
    _line(
        says=Says.COUNTS,
        word="enqueued",
        pattern=NUMBERS,
        source=(
            "NCCL watchdogHandler: 2.2 (Timeout at NCCL work), 2.3 to 2.5 (detected by watchdog at "
            "work), 2.6 on (PG status, last started since 2.13); HeartbeatMonitor's dump signal"
        ),
        example=(
            "[PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog at work sequence "
            "id: 77 PG status: last enqueued work: 78, last completed work: 76"
        ),
        flags=re.IGNORECASE,
    ),
    _line(
        says=Says.FAILED,
        word="work",
        pattern=r"(?:at\s*work\s*sequence\s*id|at\s*NCCL\s*work|at\s*work):\s*(\d+)",
        source="NCCL watchdogHandler, as COUNTS",
        example=(
            "Exception (either an error or timeout) detected by watchdog at work: 808, last "
            "enqueued NCCL work: 811, last completed NCCL work: 807."
        ),
    ),
    _line(
        says=Says.CALL,
        word="async exception",
        pattern=(
            r"Collective WorkNCCL\((?P<body>(?:(?!raised the).)*)raised the following async "
            r"exception"
        ),
        source="NCCL checkAndSetException, 2.1 on; OpenRLHF/OpenRLHF#621",
        example=(
            "[Rank 12] Collective WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=8, NumelOut=8, "
            "Timeout(ms)=1800000) raised the following async exception: NCCL error: remote process "
            "exited or there was a network error, NCCL version 2.21.5"
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="async exception",
        pattern=r"raised the following async exception: (?P<own>NCCL error: [^\n]*)",
        source="NCCL checkAndSetException, 2.1 on; OpenRLHF/OpenRLHF#621",
        example=(
            "[Rank 12] Collective WorkNCCL(SeqNum=1, OpType=BROADCAST) raised the following async "
            "exception: NCCL error: remote process exited or there was a network error, NCCL "
            "version 2.21.5"
        ),
    ),
    _line(
        says=Says.FIRED,
        word="Some NCCL operations",
        pattern=r"Some NCCL operations have failed or timed out",
        source="NCCL handleException, 1.9 on; with the rank's number since 2.1",
        example=(
            "[rank0]:[E307 05:30:18.27 ProcessGroupNCCL.cpp:744] [Rank 0] Some NCCL operations "
            "have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent "
            "GPU operations might run on corrupted/incomplete data."
        ),
    ),
    _line(
        says=Says.NATIVE_STACK,
        word="Stack trace of the failed",
        pattern=r"Stack trace of the failed collective:",
        source="NCCL printTraceback, 2.5 on; its frames follow without a prefix",
        example=(
            "[rank2]:[E816 00:34:01.14 ProcessGroupNCCL.cpp:667] Stack trace of the failed "
            "collective:"
        ),
    ),
    _line(
        says=Says.DEVICE,
        word="thread terminated with exception",
        pattern=r"thread terminated with exception: ((?:CUDA|HIP) error: .*)",
        source="NCCL ncclCommWatchdog, 2.0 on; of ROCm HIP, vllm-project/vllm#31259",
        example=(
            "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with "
            "exception: CUDA error: an illegal memory access was encountered"
        ),
    ),
    _line(
        says=Says.PEER_GONE,
        word="remote process exited",
        pattern=r"thread terminated with exception: (NCCL error: remote process exited[^,\n]*)",
        source="NCCL ncclCommWatchdog and getNcclErrorDetailStr (NCCLUtils.cpp), 2.0 on",
        example=(
            "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with "
            "exception: NCCL error: remote process exited or there was a network error, NCCL "
            "version 2.21.5"
        ),
    ),
    _line(
        says=Says.JOINED,
        word="clients joined",
        pattern=r"waiting for clients\. \d+/(\d+) clients joined",
        source="TCPStore.cpp waitForWorkers, 1.9 on",
        example=(
            "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. "
            "7/8 clients joined."
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="watchdog got stuck",
        pattern=(
            r"ProcessGroupNCCL's watchdog got stuck for \d+ "
            r"seconds"
        ),
        source="NCCL HeartbeatMonitor, 2.2 on",
        example="ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress",
    ),
    _line(
        says=Says.EVIDENCE,
        word="dump signal",
        pattern=r"dump signal due to a (?P<late>collective timeout from\s+rank \d+)",
        source="NCCL HeartbeatMonitor, 2.4 on; lsdefine/simple_GRPO#46",
        example=(
            "[PG ID 0 PG GUID 0(default_pg) Rank 5] Received a dump signal due to a collective "
            "timeout from  rank 2 and we will try our best to dump the debug info."
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="store based barrier",
        pattern=(
            r"Timed out initializing process group in store based barrier on rank: \d+, for key: "
            r"\S+ \(world_size=\d+, worker_count=\d+"
        ),
        source="distributed_c10d.py _store_based_barrier; facebookresearch/metaseq#52",
        example=(
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 3, "
            "for key: store_based_barrier_key:5 (world_size=8, worker_count=7, timeout=0:30:00)"
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="nccl",
        pattern=(
            r"(?P<own>nccl(?:SystemError|UnhandledCudaError|InternalError|InvalidUsage|"
            r"InvalidArgument): .*)"
        ),
        source="NCCLUtils.cpp getNcclErrorDetailStr; hiyouga/LlamaFactory#6161",
        example=(
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
            "device error."
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="ncclUniqueId",
        pattern=(
            r"\[\d+\] is setting up NCCL communicator and retrieving "
            r"ncclUniqueId from \[\d+\]"
        ),
        source="NCCL broadcastUniqueNCCLID",
        example=(
            "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
            "key-value store by key '0'"
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="didn't",
        pattern=(
            r"(?:desync report: )?\[[\d, ]+\] (?:finished|joined|got|never)"
            r"[^\n]*?didn't (?:join|finish) collective #\d+"
        ),
        source="TraceUtils.h, 1.12 on",
        example="[1] finished collective #5, but didn't join collective #6 (count from 1)",
    ),
    _line(
        says=Says.EVIDENCE,
        word="server socket has failed to bind",
        pattern=r"server socket has failed to bind to .*",
        source="torch's socket.cpp, 1.12 on; huggingface/accelerate#2246",
        example=(
            "[W socket.cpp:436] [c10d] The server socket has failed to bind to [::]:12211 (errno: "
            "98 - Address already in use)."
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="connectFullMesh failed",
        pattern=r"(?P<own>Gloo connectFullMesh failed with \[[^\]]*\][\w ]*)",
        source="ProcessGroupGloo.cpp, 2.0 on: a member of the group ended, or cannot be reached",
        example=(
            "[rank4]:[E421 02:05:38.764490322 ProcessGroupGloo.cpp:143] Gloo connectFullMesh "
            "failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="what():",
        pattern=r"what\(\):\s+(?P<own>(?:CUDA|HIP) error: .*)",
        source="std::terminate, behind an exception of c10; open-mmlab/mmdetection#1445",
        example="  what():  CUDA error: the launch timed out and was terminated",
    ),
    # -- Ascend: an error of HCCL, or of a device that ran out of time, is one of a rank that waits
    _line(
        says=Says.EVIDENCE,
        word="times out. Reason:",
        pattern=(
            r"(?P<own>(?:The wait execution of the Notify register|Getting socket) times out\. "
            r"Reason: .*)"
        ),
        source="CANN, EI0002 and EI0006; hiyouga/LlamaFactory#975, vllm-project/vllm-ascend#486",
        example=(
            "EI0006: [PID: 1292] 2025-04-08-18:07:20 Getting socket times out. Reason: Remote Rank "
            "did not send the data in time."
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="HCCP process",
        pattern=r"(?P<own>Failed to initialize the HCCP process\..*)",
        source="CANN, EJ0001; hiyouga/LlamaFactory#3839",
        example=(
            "EJ0001: 2024-05-21-11:57:54 Failed to initialize the HCCP process. Reason: Maybe the "
            "last training process is running."
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="execute failed, reason=",
        pattern=r"rt\w+ execute failed, reason=\[[^\]]*\]",
        source="CANN, EE1002 and EH9999; Ascend/pytorch#43, hiyouga/LlamaFactory#5551",
        example="        rtDeviceSynchronize execute failed, reason=[task timeout][FUNC:FuncErr]",
    ),
    _line(
        says=Says.EVIDENCE,
        word="NPU function error",
        pattern=r"NPU function error: (?P<own>\w+, error code is \d+)",
        source="torch_npu, NPU_CHECK_ERROR; Ascend/pytorch#62",
        example=(
            "RuntimeError: npuSynchronizeDevice:torch_npu/csrc/core/npu/NPUStream.cpp:435 NPU "
            "function error: aclrtSynchronizeDevice, error code is 507046"
        ),
    ),
    # -- torch's own checks
    _line(
        says=Says.DIFFER,
        word="running",
        pattern=(
            r"Rank (?P<rank>\d+) is running (?:inconsistent )?collective: ?"
            rf"(?P<call>{_PRINT})(?:, but Rank (?P<other>\d+) is running collective: ?"
            rf"(?P<others>{_PRINT}))?"
        ),
        source=(
            "ProcessGroupWrapper.cpp verify_tensors (TORCH_DISTRIBUTED_DEBUG=DETAIL): 1.9 to 1.12 "
            '"inconsistent", 1.13 the other\'s kind alone, 2.0 on both'
        ),
        example=(
            "Detected mismatch between collectives on ranks. Rank 2 is running collective: "
            "CollectiveFingerPrint(SequenceNumber=32, OpType=ALLREDUCE), but Rank 3 is running "
            "collective: CollectiveFingerPrint(SequenceNumber=0OpType=GATHER)."
        ),
    ),
    _line(
        says=Says.ABSENT,
        word="monitoredBarrier",
        pattern=(
            r"Ranks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass "
            r"monitoredBarrier"
        ),
        source="ProcessGroupGloo.cpp monitoredBarrier, 1.9 on: rank 0 says it",
        example="RuntimeError: Rank 3 failed to pass monitoredBarrier in 60000 ms",
    ),
    # -- launchers
    _line(
        says=Says.REPORT,
        word=" : ",
        pattern=(
            r"^\s*(?:(?P<name>rank|exitcode)\s*: (?P<value>-?\d+)(?![\d-])"
            r"|time\s*: (?P<time>\d[\d_:-]*))"
        ),
        source="torch/distributed/elastic/multiprocessing/errors, ChildFailedError; lzhxmu/CPPO#6",
        example="  exitcode  : -9 (pid: 14750)",
    ),
    _line(
        says=Says.ROOT_CAUSE,
        word="Root Cause",
        pattern=r"Root Cause \(first observed failure\)",
        source="torch/distributed/elastic/multiprocessing/errors, ChildFailedError",
        example="Root Cause (first observed failure):",
    ),
    _line(
        says=Says.EVIDENCE,
        word="exitcode:",
        pattern=r"failed \(exitcode: -?\d+\) local_rank: \d+",
        source="torch/distributed/elastic/multiprocessing/api.py; hpcaitech/ColossalAI#3514",
        example=(
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) "
            "local_rank: 3 "
            "(pid: 812917) of binary: python"
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="return code",
        pattern=(
            r"(?:--local_rank=(?P<local>\d+).*)?"
            r"(?P<exits>exits with return code = -(?:9|11|7|4|8)\b.*)"
        ),
        source="deepspeed/launcher/launch.py sigkill_handler; deepspeedai/DeepSpeed#4890, #3160",
        example=(
            "[ERROR] [launch.py:321:sigkill_handler] ['python', '--local_rank=7'] exits with "
            "return "
            "code = -9"
        ),
    ),
    _line(
        says=Says.EXITED,
        word="composer.cli.launcher",
        pattern=(
            r"composer\.cli\.launcher:(?:Global rank|Rank) (?P<rank>\d+) "
            r"(?:\(PID \d+\) exited with code|crashed with exit code) (?P<code>-?\d+)"
        ),
        source="composer/cli/launcher.py; mosaicml/llm-foundry#1501, #258",
        example="ERROR:composer.cli.launcher:Global rank 0 (PID 208865) exited with code -11",
    ),
    _line(
        says=Says.EXITED,
        word="noticed that process rank",
        pattern=(
            r"noticed that process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal "
            r"(?P<signal>\d+)"
        ),
        source="Open MPI, mpirun; horovod/horovod#469",
        example="mpirun noticed that process rank 7 with PID 0 on node n1 exited on signal 9.",
    ),
    _line(
        says=Says.TASKS,
        word="srun: error:",
        pattern=(
            r"srun: error: \S+: tasks? (?P<tasks>\d[\d,-]*): "
            r"(?P<cause>Out Of Memory|Segmentation fault|Bus error|Illegal instruction|"
            r"Floating point exception|Killed)"
        ),
        source=(
            "Slurm, srun; nextflow-io/nextflow#5932, hafs-community/HAFS#101, "
            "chrisknewman/tusas#149"
        ),
        example="srun: error: nid001277: tasks 1-3: Out Of Memory",
    ),
    _line(
        says=Says.EVIDENCE,
        word="srun: error:",
        pattern=r"tasks? \d[\d,-]*: Exited with exit code \d+",
        source="Slurm, srun; facebookresearch/ParlAI#3084",
        example="srun: error: nid001277: tasks 2-7: Exited with exit code 1",
    ),
    _line(
        says=Says.EVIDENCE,
        word="Container rank",
        pattern=r"Container rank \d+ status failed",
        source="Paddle, distributed/launch/controllers; PaddlePaddle/PaddleDetection#7380",
        example="Container rank 0 status failed cmd ['python3', '-u', 'train.py'] code 1",
    ),
    _line(
        says=Says.EVIDENCE,
        word="heartbeat timeout",
        pattern=r"Task /job:\S+/task:\d+ heartbeat timeout",
        source="XLA's coordination_service.cc, of JAX; EleutherAI/architecture-objective#26",
        example=(
            "UNAVAILABLE: Task /job:jax_worker/replica:0/task:37 heartbeat timeout. This indicates "
            "that the remote task has failed, got preempted, or crashed unexpectedly."
        ),
    ),
    # who came to one tensor may be missing at another: no rank is named by it
    _line(
        says=Says.EVIDENCE,
        word=" ranks: ",
        pattern=r"\[(?P<horovod>(?:missing|ready) ranks: \d+(?:, \d+)*)\]",
        source="Horovod to 0.18, operations.cc; horovod/horovod#534, #334",
        example="HorovodBroadcast_fully_connected_weights_0 [missing ranks: 0]",
    ),
    _line(
        says=Says.LAUNCHER_ENDS,
        word="srun: ",
        pattern=(
            r"srun: (?:Terminating (?:job step|StepId)|Job step "
            r"aborted|Force Terminated|forcing job termination)"
        ),
        source="Slurm, srun; hafs-community/HAFS#101",
        example="srun: Terminating StepId=440575.0",
    ),
    _line(
        says=Says.LAUNCHER_ENDS,
        word="CANCELLED AT",
        pattern=r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT",
        source="Slurm, slurmstepd; chrisknewman/tusas#149",
        example=(
            "slurmstepd: error: *** STEP 440575.0 ON nid001277 CANCELLED AT 2023-12-05T07:16:01 ***"
        ),
    ),
    _line(
        says=Says.ACTOR_DIED,
        word="actor died unexpectedly",
        pattern=r"The actor died unexpectedly",
        source="Ray, ActorDiedError, RayActorError before 2.10; hkust-nlp/simpleRL-reason#25, #98",
        example=(
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
        ),
    ),
    _line(
        says=Says.PROCESS,
        word="pid: ",
        pattern=r"^\s*(?:\[[\d :.,-]+\]\s+)?pid: (?P<pid>\d+)$",
        source=(
            "Ray, in the lines behind ActorDiedError; hkust-nlp/simpleRL-reason#25, with times in "
            "verl-project/verl#1309"
        ),
        example="        pid: 71876",
    ),
    _line(
        says=Says.WORKER_DIED,
        word="Worker PID: ",
        pattern=r"A worker died or was killed .*Worker PID: (?P<pid>\d+)",
        source="Ray, raylet; verl-project/verl#2987, #4921",
        example=(
            "(raylet) A worker died or was killed while executing a task by an unexpected system "
            "error. Worker IP address: 10.0.0.5 Worker port: 43447 Worker PID: 87687 Worker exit "
            "type: SYSTEM_ERROR"
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="memory pressure",
        pattern=(
            r"\d+ Workers \(tasks / actors\) killed due to "
            r"memory pressure \(OOM\)"
        ),
        source="Ray, raylet's node_manager.cc; vllm-project/vllm#1160",
        example=(
            "(raylet) node_manager.cc:3049: 10 Workers (tasks / actors) killed due to memory "
            "pressure (OOM), 0 Workers crashed due to other reasons at node"
        ),
    ),
    _line(
        says=Says.DEDUPLICATED,
        word="across cluster",
        pattern=r"\[repeated \d+x across cluster\]",
        source="Ray's logs",
        example="(WorkerDict pid=123) step 3 [repeated 7x across cluster]",
    ),
    _line(
        says=Says.EVIDENCE,
        word="OOMKilled",
        pattern=r"(?:\S+\s+\d+/\d+\s+|Reason:\s+)OOMKilled",
        source="Kubernetes, kubectl get and describe; flyteorg/flyte#4704",
        example="llama-worker-3    0/1     OOMKilled    0          5m",
    ),
    _line(
        says=Says.EVIDENCE,
        word="RankMonitorServer",
        pattern=(
            r"\[RankMonitorServer:(?P<monitored>\d+)\] "
            r"(?P<text>Did not get \w+ heartbeat\. Waited [\d.]+)"
        ),
        source="nvidia-resiliency-ext",
        example="[RankMonitorServer:3] Did not get subsequent heartbeat. Waited 180.0",
    ),
    _line(
        says=Says.STARTS,
        word="using world size",
        pattern=r"using world size: \d+",
        source="Megatron's arguments.py",
        example="using world size: 8, data-parallel size: 2",
    ),
    _line(
        says=Says.STARTS,
        word="worker group",
        pattern=r"[Rr]estart(?:ing)? worker group",
        source="torch elastic, agent/server/api.py",
        example=("[default] Worker group FAILED. 2/3 attempts left; will restart worker group"),
    ),
    # -- kernel, drivers and NCCL
    _line(
        says=Says.KILLED,
        word="oom",
        pattern=r"oom[-_ ]kill",
        source="slurmstepd, kernel; lanl/PyBNF#118",
        example="slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0.",
        flags=re.IGNORECASE,
    ),
    # a process of the node, of whatever rank
    _line(
        says=Says.EVIDENCE,
        word="Killed process",
        pattern=r"out of memory: Killed process .*",
        source="kernel: dmesg",
        example="Memory cgroup out of memory: Killed process 4711 (python) total-vm:8kB",
        flags=re.IGNORECASE,
    ),
    _line(
        says=Says.EVIDENCE,
        word="NVRM",
        pattern=r"NVRM: Xid .*",
        source="kernel: dmesg, NVIDIA's driver",
        example="[1234.5] NVRM: Xid (PCI:0000:5e:00): 79, pid=4711, GPU has fallen off the bus.",
    ),
    _line(
        says=Says.EVIDENCE,
        word="fallen off the bus",
        pattern=r"NVRM: fallen off the bus.*",
        source="kernel: dmesg, NVIDIA's driver, in three lines; NVIDIA/NVSentinel#155",
        example="               NVRM: fallen off the bus and is not responding to commands.",
    ),
    _line(
        says=Says.EVIDENCE,
        word=" by GPU node-",
        pattern=r"(?:HW Exception|Memory access fault) by GPU node-\d+.*",
        source="ROCm's runtime; ROCm/legacy-rocm-build#4021, deepspeedai/DeepSpeed#6725",
        example="HW Exception by GPU node-9 (Agent handle: 0x631351bb5a20) reason :GPU Hang",
    ),
    _line(
        says=Says.EVIDENCE,
        word="NCCL WARN Cuda failure",
        pattern=r"NCCL WARN Cuda failure .*",
        source="NCCL; huggingface/finetrainers#344",
        example="n1:2852:3596 [0] include/alloc.h:112 NCCL WARN Cuda failure 999 'unknown error'",
    ),
    _line(
        says=Says.EVIDENCE,
        word="Mismatched collective",
        pattern=r"NCCL WARN (?P<warned>Mismatched collective detected, .* at and around rank \d+)",
        source="NCCL 2.4, init.cc; NVIDIA/nccl#296",
        example=(
            "n1:112:500 [3] init.cc:1247 NCCL WARN Mismatched collective detected, please check "
            "your collective calls at and around rank 39."
        ),
    ),
    _line(
        says=Says.EVIDENCE,
        word="NET/",
        pattern=r"NET/\w+ ?: ?.*(?:status=|error|timed out|refused).*",
        source="NCCL",
        example="NCCL WARN NET/IB : Got completion from peer 10.0.0.1<4711> with status=12",
    ),
)


# training logs and progress bars; what W&B prints at the end of a process is none
_ITERATION = re.compile(
    r"^(?!.*wandb:).*?"
    r"(?:\b(?:iteration|iter|global_step|step|epoch)\b[\s:=\[]{0,12}\d|"
    r"\blm loss\b|\d+/\d+ \[|\bloss ?[:=] ?\d)",
    re.IGNORECASE,
)


def is_iteration(text: str) -> bool:
    """Tell whether a line says that an iteration is over."""
    return _ITERATION.search(text) is not None


def statements(text: str) -> Iterator[tuple[Says, re.Match[str]]]:
    """Yield what a line says, with the match of its row."""
    for line in LINES:
        if line.word in text:
            match = line.pattern.search(text)
            if match is not None:
                yield line.says, match
