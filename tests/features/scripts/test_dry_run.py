"""Shell scripts that start a job: which line they would start, and that nothing else happens."""

import shlex
import sys

import pytest

from megatron_prism.core import messages
from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line import job_line
from megatron_prism.emulate.preflight.obstacles import Obstacles
from megatron_prism.features.scripts import batch_script, confine
from megatron_prism.features.scripts.dry_commands import rewritten

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs Bash under Linux")
CONFINED = pytest.mark.skipif(not confine.available(), reason="this kernel has no Landlock")
TRAIN = "pretrain_gpt.py --num-layers 4"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write ``train.sh``; returns what reads the job that it starts."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "NNODES", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "weights").write_text("dear")
    (tmp_path / "old.log").write_text("dear")

    def write(text, *words, line="bash train.sh", given=(), obstacles=None):
        (tmp_path / "train.sh").write_text(text)
        return job_line.job_of([*line.split(), *words], given, obstacles)

    yield write
    assert (tmp_path / "save" / "weights").read_text() == "dear"
    assert (tmp_path / "old.log").read_text() == "dear"


BATCH = """#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
set -euo pipefail
module load cuda
source /no/conda.sh
cd /no/Megatron-LM
mkdir -p logs /no/where
HOSTS=($(scontrol show hostnames $SLURM_JOB_NODELIST))
IP=$(srun -N1 -n1 -w ${HOSTS[0]} hostname --ip-address)
GPUS=$(nvidia-smi -L | wc -l)
python tools/preprocess_data.py --input a --output-prefix b > old.log
export NVTE_FLASH_ATTN=1 WANDB_API_KEY=secret
cat > blend.json <<EOF
{"hosts": "${#HOSTS[@]}"}
EOF
ARGS=(
  --num-layers 4
  --global-batch-size $((GPUS * 4))
)
srun -l bash -c "torchrun --nnodes $SLURM_NNODES --nproc-per-node $GPUS --rdzv_endpoint $IP:1 \\
  pretrain_gpt.py ${ARGS[*]}" > old.log 2>&1 &
wait
"""


def test_a_batch_script_is_read_as_the_line_that_it_starts(script, tmp_path, capsys):
    ours, job = script(BATCH, line="sbatch train.sh")
    assert ours == ["--prism-world-size", "32", "--prism-gpus-per-node", "8"]
    assert job == "pretrain_gpt.py --num-layers 4 --global-batch-size 32".split()
    said = capsys.readouterr().err
    assert "env NVTE_FLASH_ATTN=1 srun -l torchrun --nnodes 4 --nproc-per-node 8" in said
    assert "SLURM_NNODES=4: #SBATCH --nodes=4" in said
    assert "python tools/preprocess_data.py" in said
    assert "mkdir /no/where" in said
    assert "secret" not in said
    assert (tmp_path / "blend.json").read_text() == '{"hosts": "4"}\n'
    assert (tmp_path / "logs").is_dir()


@pytest.mark.parametrize(
    "harm",
    [
        "rm -rf $SAVE",
        "/bin/rm -rf $SAVE",
        "command rm -rf $SAVE; \\rm -rf $SAVE",
        'RM="/bin/rm -rf"; $RM "$SAVE"',
        "find $SAVE | xargs rm -rf",
        "mv save /tmp; cp /dev/null save/weights; truncate -s 0 old.log",
        "echo lost > old.log; echo lost > save/weights; exec > old.log",
        "for f in save/*; do :> $f; done",
        "env rm -rf $SAVE; timeout 5 rm -rf $SAVE; sudo rm -rf $SAVE; ssh node1 'rm -rf $SAVE'",
        "bash -c 'rm -rf $SAVE'; sh -c 'rm -rf $SAVE'",
        pytest.param("perl -e 'unlink \"save/weights\"'; find $SAVE -delete", marks=CONFINED),
        pytest.param("{ echo lost; } > old.log; env -i /bin/rm -rf $SAVE", marks=CONFINED),
        pytest.param('python -c \'open("old.log", "w")\'', marks=CONFINED),
    ],
)
def test_what_would_do_harm_does_none(script, harm):
    """The fixture looks at the files."""
    _, job = script(f"export SAVE=$PWD/save\n{harm}\ntorchrun --nproc-per-node 2 {TRAIN}\n")
    assert job == TRAIN.split()


def test_uploads_are_left_out_and_named(script, capsys):
    uploads = ["aws s3 cp save s3://x", "wandb sync save", "curl -T old.log http://h", "git push",
               "scp old.log h:", "rsync -a save h:"]  # fmt: skip
    script("\n".join([*uploads, f"torchrun --nproc-per-node 2 {TRAIN}"]))
    said = capsys.readouterr().err
    assert [one for one in uploads if one not in said] == []


def test_a_file_of_an_earlier_dry_run_is_not_written_again_and_named(script, capsys):
    """The script may have changed since: whoever reads the answer has to know."""
    lines = "printf 'torchrun --nproc-per-node %s {train}\\n' {ranks} > made.sh\nbash made.sh\n"
    for ranks in (2, 4):
        assert script(lines.format(train=TRAIN, ranks=ranks))[1] == TRAIN.split()
        said = capsys.readouterr().err
        assert ("not written, for it is there" in said and "made.sh" in said) == (ranks == 4)


@CONFINED
@pytest.mark.parametrize("version", [1, 3])
def test_older_kernels_confine_what_they_can(script, version, monkeypatch):
    monkeypatch.setattr(confine, "_version", lambda: version)
    remove = "perl -e 'unlink \"save/weights\"'; find $PWD/save -delete; echo x > new"
    assert script(f"{remove}\ntorchrun --nproc-per-node 2 {TRAIN}")[1] == TRAIN.split()


def test_line_ends_of_windows_are_named(script):
    with pytest.raises(UsageError, match="line ends of Windows"):
        script(f"torchrun --nproc-per-node 8 {TRAIN}\r\n")


@CONFINED
def test_nothing_connects(script, capsys):
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    with pytest.raises(UsageError, match="Permission denied"):
        script(f'python -c "{code}"\n')


@pytest.mark.parametrize(
    "loop", ["while true; do sleep 60; done", "until nc -z h 1; do :; done; while :; do :; done"]
)
def test_a_script_that_waits_for_ever_is_stopped_and_says_where(script, loop, monkeypatch, capsys):
    monkeypatch.setattr(messages, "EVERY_S", 0.1)
    with pytest.raises(
        UsageError, match="ran for 0.6 s, at last: .* without a command that trains"
    ):
        script(f"{loop}\ntorchrun {TRAIN}", given=["--prism-dry-run-limit", "0.6"])
    err = capsys.readouterr().err
    assert err.count("dry run") >= 1


@pytest.mark.parametrize(
    ("text", "launchers", "ranks"),
    [
        (f"exec torchrun --nproc-per-node 2 {TRAIN} $@", "torchrun", 2),
        (f"set -x; /no/bin/torchrun --nproc-per-node 2 {TRAIN}", "torchrun", 2),
        (f'PY="/no/env/bin/python -u"; mpirun -np 4 $PY {TRAIN}', "mpirun", 4),
        (f"deepspeed --num_gpus 8 --num_nodes 2 {TRAIN} | tee old.log", "deepspeed", 16),
        (f"A=1 B=2 nohup python -m torch.distributed.run --nproc-per-node 2 {TRAIN} &",
         "nohup torch.distributed.run", 2),
        (f'docker run --rm img bash -c "cd /w; torchrun --nproc-per-node 2 {TRAIN}"',
         "docker torchrun", 2),
        (f"set -eo pipefail; A=$(getent hosts x | awk '{{print $1}}'); srun -n 2 python {TRAIN}",
         "srun", 2),
        (f"N=$(python -c 'import torch; print(torch.cuda.device_count())'); "
         f"[ $N = 0 ] && exit 1; torchrun --nproc-per-node $N {TRAIN}", "torchrun", 4),
        (f"f() {{ torchrun --nproc-per-node $1 {TRAIN}; }}; if true; then f 2; fi", "torchrun", 2),
        (f"echo '{TRAIN}' > cmd; eval torchrun --nproc-per-node 2 $(cat cmd)", "torchrun", 2),
        (f'pdsh -w h1,h2 "cd /w && torchrun --nnodes 2 --nproc-per-node 2 {TRAIN}"',
         "pdsh torchrun", 4),
    ],
)  # fmt: skip
def test_the_first_command_that_trains_is_the_job(script, text, launchers, ranks, capsys):
    ours, job = script(text, given=["--prism-gpus-per-node", "4"] * ("device_count" in text))
    assert ours[:2] == ["--prism-world-size", str(ranks)]
    assert job == TRAIN.split()
    assert f"{launchers.replace(' ', ', ')} " in capsys.readouterr().err


def test_a_wrapper_of_the_training_command_is_run_too(script, tmp_path):
    (tmp_path / "wrap.sh").write_text('#!/bin/sh\nexport LOCAL=1\nexec "$@"\n')
    (tmp_path / "wrap.sh").chmod(0o755)
    ours, job = script(f"srun -n 8 ./wrap.sh python {TRAIN}")
    assert (ours, job) == (["--prism-world-size", "8"], TRAIN.split())


WRAPPER = """import subprocess, sys
words = ["--nnodes", sys.argv[1], "--nproc-per-node", "4", "pretrain_gpt.py", "--num-layers", "4"]
START
"""


@CONFINED
@pytest.mark.parametrize(
    "start",
    [
        'subprocess.run(["torchrun", *words], check=True)',
        'subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True)',
    ],
)
def test_a_script_of_python_that_starts_a_launcher_is_run_dry(start, script, tmp_path):
    (tmp_path / "launch.py").write_text(WRAPPER.replace("START", start))
    ours, job = script("", line="python launch.py 2")
    assert ours == ["--prism-world-size", "8", "--prism-gpus-per-node", "4"]
    assert job == TRAIN.split()


MANIFEST = """kind: PyTorchJob
spec:
  nprocPerNode: "4"
  pytorchReplicaSpecs:
    Master:
      template:
        spec:
          containers:
          - command: [bash, -c]
            args: ["cd /no/where; torchrun --nnodes $PET_NNODES pretrain_gpt.py --num-layers $N"]
            env: [{name: N, value: 4}]
    Worker: {replicas: 3}
"""


def test_a_manifest_of_kubernetes_is_its_containers_command(script, tmp_path):
    (tmp_path / "job.yaml").write_text(MANIFEST)
    ours, job = script("", line="kubectl apply -f job.yaml")
    assert ours == ["--prism-world-size", "16", "--prism-gpus-per-node", "4"]
    assert job == TRAIN.split()
    ours, _ = script("sed 's/replicas: 3/replicas: 1/' job.yaml | kubectl apply -f -")
    assert ours[1] == "8"
    (tmp_path / "job.yaml").write_text("kind: Pod\n")
    with pytest.raises(UsageError, match="no job"):
        script("", line="kubectl apply -f job.yaml")


TRAINER = """kind: TrainJob
spec: {trainer: {numNodes: 2, numProcPerNode: 4, command: [bash, -c, torchrun @]}}
"""
INDEXED = """kind: JobSet
spec:
  replicatedJobs:
  - {replicas: 1, template: {spec: {parallelism: 2, template: {spec: {containers: [
      {env: [{name: N, value: "2"}], command: [bash, -c, torchrun --nnodes $N --nproc-per-node 4 @]}
    ]}}}}}
"""
MPI = """kind: MPIJob
spec:
  mpiReplicaSpecs:
    Launcher: {template: {spec: {containers: [{command: [bash, -c, mpirun -np 8 python @]}]}}}
    Worker: {replicas: 2}
"""
RAY = "kind: RayJob\nspec: {entrypoint: torchrun --nnodes 2 --nproc-per-node 4 @}"


@pytest.mark.parametrize("manifest", [TRAINER, INDEXED, MPI, RAY])
def test_manifests_of_other_operators(manifest, script, tmp_path):
    (tmp_path / "job.yaml").write_text(manifest.replace("@", "pretrain_gpt.py --num-layers=4"))
    assert script("", line="kubectl create -f job.yaml") == (
        ["--prism-world-size", "8", *["--prism-gpus-per-node", "4"] * (manifest != MPI)],
        ["pretrain_gpt.py", "--num-layers=4"],
    )


QUEUED = f"#SBATCH --ntasks-per-node=4\nsrun -n $SLURM_NTASKS python {TRAIN} --lr $LR\n"


@pytest.mark.parametrize(
    "text",
    [
        "sbatch --nodes 4 --export=ALL,LR=2 job.sbatch",
        "sed s/4/4/ job.sbatch | sbatch -N4 --export LR=2",
        "export LR=2; sed 's/^#/#SBATCH -N 4\\n#/' job.sbatch > new.sbatch; sbatch new.sbatch",
        "qdel 1; LR=2 bash -lc 'export LR; sbatch -N 4 job.sbatch'",
    ],
)
def test_a_script_that_queues_another_is_that_one(text, script, tmp_path):
    (tmp_path / "job.sbatch").write_text(QUEUED)
    ours, job = script(text)
    assert ours == ["--prism-world-size", "16", "--prism-gpus-per-node", "4"]
    assert job == [*TRAIN.split(), "--lr", "2"]


def test_a_job_that_queues_itself_again_is_no_other(script):
    again = f"#SBATCH -N 2\nsbatch $0\nsrun --ntasks-per-node 4 python {TRAIN}\n"
    assert script(again, line="sbatch train.sh")[0][1] == "8"


def test_numbers_that_are_empty_are_asked_for(script):
    with pytest.raises(UsageError, match="the empty --nnodes of torchrun"):
        script(f"torchrun --nnodes $NOBODY --nproc-per-node 4 {TRAIN}")


def test_slots_of_a_file_of_hosts_are_ranks(script):
    hosts = "printf '# two\\nh1 slots=4\\nh2 slots=4\\n' > hosts\n"
    for launcher in ("deepspeed --hostfile hosts", "mpirun -hostfile hosts python"):
        assert script(f"{hosts}{launcher} {TRAIN}")[0][1] == "8"


def test_gpus_that_change_nothing_are_not_asked_for(script):
    check = "nvidia-smi; [ $(nvidia-smi -L | wc -l) = 8 ] || exit 1\n"
    assert script(f"{check}torchrun --nproc-per-node 2 {TRAIN}")[0][1] == "2"


def test_a_pipe_into_a_new_file_keeps_what_it_reads(script, tmp_path):
    script(
        f"echo a | sed s/a/b/ > made; echo c | cat > old.log\ntorchrun --nproc-per-node 2 {TRAIN}"
    )
    assert (tmp_path / "made").read_text() == "b\n"


@pytest.mark.parametrize("path", ["sizes.env", '"$(dirname "$0")/sizes.env"', "./sizes.env; :"])
def test_variables_of_a_sourced_file_are_not_asked_for(path, script, tmp_path):
    (tmp_path / "sizes.env").write_text("NNODES=2\n")
    text = f"set -a; source {path}; set +a\ntorchrun --nnodes $NNODES --nproc-per-node 2 {TRAIN}"
    assert script(text)[0][1] == "4"


@CONFINED
def test_new_files_elsewhere_are_made_on_request_alone(script, tmp_path_factory):
    place = tmp_path_factory.mktemp("elsewhere")
    text = f"mkdir {place}/a; cat > {place}/b <<EOF\nx\nEOF\ntorchrun {TRAIN}"
    script(text)
    assert not list(place.iterdir())
    script(text, given=["--prism-allow-writes"])
    assert sorted(one.name for one in place.iterdir()) == ["a", "b"]


def test_what_nobody_can_know_is_asked_for_in_one_list(script, monkeypatch):
    text = f"torchrun --nnodes $NNODES --nproc-per-node $GPUS_PER_NODE {TRAIN}"
    with pytest.raises(UsageError, match="reads NNODES, GPUS_PER_NODE") as caught:
        script(text)
    assert caught.value.fix == "NNODES=N GPUS_PER_NODE=N before prism"
    monkeypatch.setenv("NNODES", "2")
    assert script("GPUS_PER_NODE=${GPUS_PER_NODE:-4}\n" + text)[0][1] == "8"
    assert script(text, line="env NNODES=2 GPUS_PER_NODE=2 bash train.sh")[0][1] == "4"
    words = 'for word in "$@"; do export "$word"; done\n' + text
    assert script(words, line="bash train.sh NNODES=2 GPUS_PER_NODE=2")[0][1] == "4"
    with pytest.raises(UsageError, match="how many GPUs"):
        script(f"torchrun --nproc-per-node $(nvidia-smi -L | wc -l) {TRAIN}")
    with pytest.raises(UsageError, match="no script gone.sh"):
        script("", line="bash gone.sh")


@pytest.mark.parametrize(
    ("directives", "words", "expected"),
    [
        ("#SBATCH -N 4\n#SBATCH --ntasks-per-node=8", "", (4, 32, 8, None)),
        ("#SBATCH --nodes=4 --gpus-per-node=h100:8", "", (4, 4, None, 8)),
        ("#SBATCH --nodes=4 --gpus-per-node=8", "-N 2", (2, 2, None, 8)),
        ("#SBATCH -n 16 --gpus 16 -N2 # two", "", (2, 16, None, 8)),
        ("#PBS -l select=4:ncpus=64:ngpus=8:mpiprocs=8", "", (4, 32, 8, 8)),
        ("#PBS -l nodes=2:ppn=4:gpus=4,walltime=1:0:0", "", (2, 8, 4, 4)),
        ('#BSUB -nnodes 4\n#BSUB -gpu "num=6"', "", (4, 4, None, 6)),
        ("#PJM -L node=2,elapse=1:00:00\n#PJM --mpi proc=8", "", (2, 8, None, None)),
        ("#$ -l rt_AF=2\n#$ -l h_rt=1:00:00", "", (2, 2, None, None)),
        (f"#SBATCH --nodes={5000 * '9'}", "", (None, None, None, None)),
        (f"#PBS -l select={5000 * '9'}", "", (None, None, None, None)),
        (f"#PBS -l select=1:ngpus={5000 * '9'}", "", (None, None, None, None)),
        (f"#PJM -L node={5000 * '9'}", "", (None, None, None, None)),
        ("# nothing", "", (None, None, None, None)),
    ],
)
def test_directives_of_schedulers(directives, words, expected):
    found = batch_script.allocation(directives, shlex.split(words))
    assert (found.nodes, found.ranks, found.per_host, found.gpus) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun a.py > log 2>&1", "torchrun a.py > /dev/null 2>&1"),
        ("A=1 /opt/x.py '>' b >> out", "A=1 __prism_run /opt/x.py '>' b >> /dev/null"),
        ('cat > c <<EOF\n{"a" > 1}\nEOF\n', 'cat > "$(__prism_place c)" <<EOF\n{"a" > 1}\nEOF\n'),
        ('"$PY" t.py ${A[@]} &> $L/$(date +%s)', '__prism_run "$PY" t.py ${A[@]} &> /dev/null'),
        ("exec > >(tee -a log) 2>&1", "exec > >(tee -a log) 2>&1"),
        ("A=(--a /b '>')", "A=(--a /b '>')"),
        ("[ 3 \\> 2 ]", "[ 3 \\> 2 ]"),
        ("echo hi 1>&2 2> /dev/null", "echo hi 1>&2 2> /dev/null"),
    ],
)
def test_commands_are_rewritten_where_they_name_files(command, expected):
    assert rewritten(command) == expected


def test_places_that_are_missing_neither_stop_a_script_nor_leave_folders(script, tmp_path, capsys):
    text = """set -euo pipefail
mkdir -p /outside/x
mkdir -m 755 -p logs
cd /outside/x
DATA=$(find /outside/data -name '*.bin' | head -n 1)
for shard in $(ls /outside/shards/*.bin); do echo $shard; done
"""
    _, job = script(f"{text}torchrun {TRAIN} --data-path $DATA")
    assert job[-2:] == ["--data-path", "/outside/data"]
    assert not (tmp_path / "-p").exists()
    assert not (tmp_path / "755").exists()
    assert (tmp_path / "logs").is_dir()
    assert "mkdir /outside/x" in capsys.readouterr().err


def test_files_that_are_here_are_listed(script, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").touch()
    _, job = script(f"torchrun {TRAIN} --data-path $(find data -name '*.bin') $(ls save)")
    assert job[-3:] == ["--data-path", "data/a.bin", "weights"]


def test_paths_of_a_script_are_mapped(script, tmp_path):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "pretrain_gpt.py").touch()
    (tmp_path / "job.env").write_text("LAYERS=4\n")
    text = """MEGATRON=/opt/Megatron-LM
cd "$(dirname "${BASH_SOURCE[0]}")"; source $(dirname $0)/job.env
[ -d $MEGATRON ] || exit 1
export HERE=/opt/Megatron-LM2
torchrun $MEGATRON/pretrain_gpt.py --num-layers $LAYERS --data-path /data/text "$1"
"""
    maps = ["--prism-map", f"/opt/Megatron-LM={tmp_path}/checkout", "--prism-map=/data/text=mine"]
    _, job = script(text, "/opt/Megatron-LM/x", given=maps)
    assert job == [f"{tmp_path}/checkout/pretrain_gpt.py", "--num-layers", "4", "--data-path",
                   "mine", f"{tmp_path}/checkout/x"]  # fmt: skip
    with pytest.raises(UsageError, match="does not say which path"):
        script(text, given=["--prism-map", "/opt"])


def test_what_nobody_says_is_noted_and_the_script_goes_on(script):
    obstacles = Obstacles()
    text = f"torchrun --nnodes $NNODES --nproc-per-node $(nvidia-smi -L | wc -l) {TRAIN}"
    _, job = script(text, obstacles=obstacles)
    assert job == TRAIN.split()
    assert [obstacle.fix for obstacle in obstacles] == [
        "NNODES=N before prism",
        "--prism-gpus-per-node 8",
    ]
    assert obstacles.world_is_guessed


LAUNCHER = """import subprocess, sys
subprocess.run(["torchrun", "--nnodes=4", "--nproc-per-node=8", *sys.argv[1:]])
"""


@CONFINED
def test_a_script_that_starts_a_launcher_of_python_is_the_launcher_s_job(script, tmp_path):
    """The launcher's words are those of the job."""
    (tmp_path / "start.py").write_text(LAUNCHER)
    ours, job = script(f"python3 start.py {TRAIN}")
    assert (ours[1], job) == ("32", TRAIN.split())


STRICT = """set -eu
name=${1:?name of the run}
: "${API_KEY:?set it}"
[[ -d $DATA_ROOT ]] || { echo no data; exit 1; }
[ -f "$DATA_ROOT/x.idx" ] || exit 1
ulimit -n 99999999
trap 'kill 0' EXIT
echo $HEAD
torchrun --nnodes $NODES --nproc-per-node 8 --master-addr $HEAD pretrain_gpt.py \
  --num-layers $LAYERS --save $OUT/$name --data-path $DATA_ROOT/x
"""


@pytest.mark.ci
def test_all_that_a_strict_script_lacks_is_known_at_once(script, monkeypatch, capsys):
    names = ("API_KEY", "DATA_ROOT", "HEAD", "NODES", "LAYERS", "OUT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    obstacles = Obstacles()
    _, job = script(STRICT, obstacles=obstacles)
    assert job[:3] == ["pretrain_gpt.py", "--num-layers", "1"]
    messages = [obstacle.message for obstacle in obstacles]
    assert messages == [
        "train.sh takes an argument (name of the run), which the line lacks",
        "train.sh reads NODES, LAYERS, and nothing here says them",
    ]
    fixes = [obstacle.fix for obstacle in obstacles]
    assert fixes == ["train.sh VALUE", "NODES=VALUE LAYERS=VALUE before prism"]
    assert obstacles.world_is_guessed
    said = capsys.readouterr().err
    assert "API_KEY, DATA_ROOT, HEAD, OUT: not set here, which changes nothing" in said
    assert "count as there" in said

    # what the fixes say is enough, and a variable that is no number of the world leaves that known
    monkeypatch.setenv("NODES", "2")
    obstacles = Obstacles()
    ours, _ = script(STRICT, "mine", obstacles=obstacles)
    assert ours[1] == "16"
    assert [obstacle.fix for obstacle in obstacles] == ["LAYERS=VALUE before prism"]
    assert not obstacles.world_is_guessed
    monkeypatch.setenv("LAYERS", "4")
    _, job = script(STRICT, "mine")
    assert job[:3] == TRAIN.split()


def test_names_that_only_look_like_sizes_are_not_asked_for(script, tmp_path):
    (tmp_path / "prod.env").write_text("NNODES=4\n")
    obstacles = Obstacles()
    text = 'source ./${STAGE:-prod}.env\necho "$SLURM_PARTITION"\n'
    ours, _ = script(f"{text}torchrun --nnodes $NNODES {TRAIN}", obstacles=obstacles)
    assert (ours[1], list(obstacles)) == ("4", [])


def test_a_script_in_a_checkout_nearby_is_named_and_looked_at(script, tmp_path):
    (tmp_path / "pretrain_gpt.py").unlink()
    (tmp_path / "Megatron-LM" / "examples").mkdir(parents=True)
    (tmp_path / "Megatron-LM" / "pretrain_gpt.py").touch()
    (tmp_path / "Megatron-LM" / "examples" / "train.py").touch()
    obstacles = Obstacles()
    _, job = script(f"cd /their/checkout\ntorchrun {TRAIN}", obstacles=obstacles)
    assert job[0] == "Megatron-LM/pretrain_gpt.py"
    fixes = [obstacle.fix for obstacle in obstacles]
    assert fixes == ["--prism-map pretrain_gpt.py=Megatron-LM/pretrain_gpt.py"]
    _, job = script(f"cd /their/checkout\ntorchrun {TRAIN}", given=fixes[0].split())
    assert job[0] == "Megatron-LM/pretrain_gpt.py"
    with pytest.raises(UsageError) as caught:
        script("torchrun $MEGATRON/examples/train.py --num-layers 4")
    assert caught.value.fix == "--prism-map /examples/train.py=Megatron-LM/examples/train.py"
    with pytest.raises(UsageError) as caught:
        script("torchrun $MEGATRON/other.py --num-layers 4")
    assert caught.value.fix.startswith("--prism-map /other.py=CHECKOUT/other.py, or")


@pytest.mark.parametrize("program", ["pretrain_x.py", "core/train.py", "../../pretrain_x.py"])
def test_the_script_that_trains_is_found_from_the_folders_of_the_launch_script(
    program, script, tmp_path
):
    """As launch scripts of Megatron-LM's examples, Pai-Megatron-Patch and Primus are started."""
    folder = tmp_path / "checkout" / "examples" / "model"
    (tmp_path / "checkout" / "core").mkdir(parents=True)
    (tmp_path / "checkout" / "core" / "train.py").touch()
    (tmp_path / "checkout" / "pretrain_x.py").touch()
    folder.mkdir(parents=True)
    (folder / "train.sh").write_text(f"torchrun {program} --num-layers 4\n")
    there = (tmp_path / "checkout" / program.removeprefix("../../")).resolve()
    line = "bash checkout/examples/model/train.sh"
    obstacles = Obstacles()
    _, job = script("", line=line, obstacles=obstacles)
    assert job[0] == str(there)
    (fix,) = [obstacle.fix for obstacle in obstacles]
    assert fix == f"--prism-map {program}={there}"
    # the fix, typed as it stands, is enough
    assert script("", line=line, given=fix.split())[1][0] == str(there)


@CONFINED
def test_variables_that_a_script_asks_for_in_its_own_words_are_one_list(script, monkeypatch):
    """As examples/multimodal/pretrain_mistral_clip.sh @0.19.0 asks for WORKSPACE, LOAD_NAME."""
    for name in ("MY_LAYERS", "MY_WIDTH", "MY_PLACE"):
        monkeypatch.delenv(name, raising=False)
    tests = ""
    for name in ("MY_LAYERS", "MY_WIDTH", "MY_PLACE"):
        tests += f'if [ -z "${{{name}}}" ]; then echo "Please set {name}."; exit 1; fi\n'
    # one that has a default is none of them
    tests += "[[ -z $MY_DEPTH ]] && MY_DEPTH=4\n"
    start = "torchrun --nproc-per-node 8 pretrain_gpt.py --save $MY_PLACE --num-layers $MY_LAYERS"
    obstacles = Obstacles()
    _, job = script(f"{tests}{start} --hidden-size $MY_WIDTH", obstacles=obstacles)
    assert job[0] == "pretrain_gpt.py"
    (obstacle,) = obstacles
    assert obstacle.fix == "MY_LAYERS=VALUE MY_WIDTH=VALUE before prism"


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("megatron sft --model Q --packing true", "-m swift.cli._megatron.sft"),
        ("python3 -m verl.trainer.main_ppo trainer.nnodes=1", "torchrun --nproc-per-node 8 "),
    ],
)
def test_programs_that_start_their_ranks_themselves_are_named(command, fix, script):
    with pytest.raises(UsageError) as caught:
        script(f"set -e\n{command}\necho trained")
    assert "starts" in caught.value.message
    assert fix in caught.value.fix


def test_a_script_that_looks_for_files_where_it_is_started_says_where_that_is(script, tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "config.sh").write_text("LAYERS=4\n")
    (tmp_path / "jobs" / "job.sh").write_text("set -e\nbash `pwd`/config.sh\n")
    with pytest.raises(UsageError) as caught:
        script("", line="bash jobs/job.sh")
    assert caught.value.fix.startswith("cd jobs before prism")


@CONFINED
def test_checks_of_this_machine_do_not_stop_a_script(script, capsys):
    checks = """set -e
python -c 'import no_such_module'
if ! python3 -c "import sys; sys.exit(3)"; then echo no GPU; exit 1; fi
TP=$(python -c 'print(2)')
python - <<EOF
raise SystemExit(1)
EOF
"""
    _, job = script(f"{checks}torchrun {TRAIN} --tensor-model-parallel-size $TP")
    assert job == [*TRAIN.split(), "--tensor-model-parallel-size", "2"]
    assert "count as there" in capsys.readouterr().err
    with pytest.raises(UsageError, match="it printed: enough"):
        script("echo enough; exit 1")


def test_what_the_line_lacks_is_said_also_where_its_script_is_missing(script, tmp_path):
    (tmp_path / "pretrain_gpt.py").unlink()
    obstacles = Obstacles()
    script(
        "torchrun --nproc-per-node $NONE --nnodes 2 other.py --num-layers 4", obstacles=obstacles
    )
    messages = [obstacle.message for obstacle in obstacles]
    assert len(messages) == 2
    assert messages[0].startswith("the empty --nproc-per-node of torchrun")
    assert messages[1] == "there is no script other.py"


@pytest.mark.parametrize(
    ("words", "lacking"), [([], "LAYERS GPUS"), (["4"], "GPUS"), (["4", "8"], "")]
)
def test_arguments_that_a_script_takes_are_named(words, lacking, script, capsys):
    """Also without ``set -u``; those with a default, and those that change nothing, are not."""
    text = "LAYERS=$1\nGPUS=${2}  # of a host\nPREC=${3:-bf16}\nNOTE=$4\n"
    text += "torchrun --nproc-per-node $GPUS pretrain_gpt.py --num-layers $LAYERS --$PREC\n"
    script(text, *words, obstacles=Obstacles())
    said = capsys.readouterr().err
    note = f"train.sh takes more arguments, which are empty: {lacking}\n"
    assert ("takes more arguments" in said, note in said) == (bool(lacking), bool(lacking))


def test_the_number_of_hosts_is_no_list_of_them(script, monkeypatch):
    monkeypatch.delenv("NHOSTS", raising=False)
    obstacles = Obstacles()
    script(f"mpirun -np $((NHOSTS * 4)) -npernode 4 {TRAIN}", obstacles=obstacles)
    assert [obstacle.fix for obstacle in obstacles] == ["NHOSTS=N before prism"]


def test_start_up_files_of_this_machine_are_left_out(script, tmp_path, monkeypatch, capsys):
    """They may take longer than the script, as those that set up versions of Python do."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".profile").write_text("while :; do :; done\n")
    (tmp_path / "sizes.env").write_text("LAYERS=7\n")
    text = "set -e\nsource ~/.profile\n. ./sizes.env\n"
    _, job = script(f"{text}torchrun pretrain_gpt.py --num-layers $LAYERS")
    assert job[-1] == "7"
    assert "left out: source ~/.profile" in capsys.readouterr().err


def test_a_flag_that_is_said_again_replaces_the_one_of_the_line(script):
    given = ["--prism-job-flags", "--tokenizer-type NullTokenizer --num-layers=8"]
    text = "torchrun pretrain_gpt.py --tokenizer-type Their Own --num-layers 4 --bf16"
    _, job = script(text, given=given)
    assert job[1:] == ["--bf16", "--tokenizer-type", "NullTokenizer", "--num-layers=8"]


@pytest.mark.parametrize(
    ("words", "flags", "left"),
    [
        ("--config-name x trainer.devices=8 model.tp=2", "--config-name y",
         "trainer.devices=8 model.tp=2 --config-name y"),
        ("--bf16 config.yaml", "--bf16", "config.yaml --bf16"),
        ("--set a=1 --set b=2", "--set c=3", "--set a=1 --set b=2 --set c=3"),
        ("--hidden-size=4 words", "--hidden-size 8", "words --hidden-size 8"),
    ],
)  # fmt: skip
def test_what_a_program_takes_beside_its_options_stays(words, flags, left, script):
    text = f"torchrun pretrain_gpt.py --num-layers 2 {words}"
    _, job = script(text, given=["--prism-job-flags", flags])
    assert job[1:] == ["--num-layers", "2", *left.split()]
