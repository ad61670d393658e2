"""What launch lines say, of launchers in any order and depth."""

import os
import re
import shlex

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.cli.main import main
from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line import job_line
from megatron_prism.emulate.command_line.launch_line import read_line, split_line

LINES = [  # line, ranks, ranks on a host, the script and its words
    ("a.py x.py", None, None, "a.py x.py"),
    ("python -u -X dev a.py", None, None, "a.py"),
    ("python3 -m pkg.mod --lr 1", None, None, "-m pkg.mod --lr 1"),
    ("torchrun a.py", 1, 1, "a.py"),
    ("torchrun --nnodes 4 --nproc-per-node=8 a.py -- b", 32, 8, "a.py -- b"),
    ("torchrun --nnode=4 --nproc_per_n 8 a.py", 32, 8, "a.py"),
    ("/bin/torchrun --nnodes=1:4 --nproc_per_node 8 a.py", 32, 8, "a.py"),
    ("torchrun --nproc-per-node 2 -m pkg.mod --x", 2, 2, "-m pkg.mod --x"),
    ("python -m torch.distributed.run --nproc-per-node 2 a.py", 2, 2, "a.py"),
    ("srun -l --ntasks 64 python -u a.py", 64, None, "a.py"),
    ("srun -N4 --ntasks-per-node=8 --mpi=pmix python a.py", 32, 8, "a.py"),
    ("srun -N 4 -n 32 singularity exec --nv -B /x:/y i.sif python a.py", 32, 8, "a.py"),
    ("srun -N 4 --ntasks-per-node 1 torchrun --nnodes 4 --nproc-per-node 8 a.py", 32, 8, "a.py"),
    ("mpirun -np 64 --npernode 8 -x A=1 --mca btl self python a.py", 64, 8, "a.py"),
    ("mpirun -n 16 --map-by ppr:4:node python a.py", 16, 4, "a.py"),
    ("deepspeed --num_nodes 2 --num_gpus 8 a.py", 16, 8, "a.py"),
    ("deepspeed --hostfile h --num_gpus 8 a.py", None, None, "a.py"),
    ("accelerate launch --num_processes 16 --num_machines 2 a.py", 16, 8, "a.py"),
    ("python -m accelerate.commands.launch --num_processes 16 a.py", 16, None, "a.py"),
    ("numactl --membind=0-3 torchrun --nproc-per-node 8 a.py", 8, 8, "a.py"),
    ("env -u X A=1 torchrun --nproc-per-node 8 --nnodes 2 a.py", 16, 8, "a.py"),
    ("docker run --gpus all --rm -it -e A=1 nvcr.io/x:1 torchrun --nproc-per-node 8 a.py", 8, 8,
     "a.py"),
    ("nsys profile -t cuda -o rep --force-overwrite true torchrun --nproc-per-node 8 a.py", 8, 8,
     "a.py"),
    ("srun -n 8 shifter --image=x:1 --module gpu python a.py", 8, None, "a.py"),
    ("pdsh -R ssh -w h[1-2] torchrun --nnodes 2 --nproc-per-node 8 a.py", 16, 8, "a.py"),
    ("timeout 3h nohup taskset -c 0-3 python a.py", None, None, "a.py"),
    ("python elastic.py --nproc-per-node 8 --nnodes 2 -- python3 ./a.py --x", 16, 8, "./a.py --x"),
    ("python a.py --lr 1 -- b", None, None, "a.py --lr 1 -- b"),
    ("flux run -N 4 -n 32 -c 12 -g 1 -o mpi=none python a.py", 32, 8, "a.py"),
    ("flux run --nodes=4 --tasks-per-node=8 --gpus-per-task=1 python -u a.py", 32, 8, "a.py"),
    ("flux mini submit -n 8 python a.py", 8, None, "a.py"),
    ("flux alloc -N 4 flux run -N 4 --exclusive --tasks-per-node 1 torchrun --nnodes 4 "
     "--nproc-per-node 8 a.py", 32, 8, "a.py"),
    ("flux run -N 4 python a.py", None, None, "a.py"),
    ("jsrun -n 24 -a 1 -c 7 -g 1 -r 6 -b none python a.py", 24, 6, "a.py"),
    ("jsrun -n 4 -a 6 -g 6 python a.py", 24, 6, "a.py"),
    ("bind_gpu --foo torchrun --nproc-per-node 8 a.py", 8, 8, "a.py"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "ranks", "each", "job"), LINES)
def test_launchers_in_any_order_say_how_many_ranks_there_are(line, ranks, each, job):
    read = read_line(line.split(), {})
    assert (read.ranks, read.per_host, list(read.words)) == (ranks, each, job.split())


@pytest.mark.parametrize(
    ("line", "shell"),
    [
        ("srun -n 8 bash -c 'python a.py'", ["bash", "-c", "python a.py"]),
        ("docker exec -it box bash -lc 'torchrun a.py'", ["bash", "-lc", "torchrun a.py"]),
        ("pdsh -w h[1-4] 'cd /x; torchrun a.py'", ["bash", "-c", "cd /x; torchrun a.py"]),
        ("./train.sh 8", ["bash", "./train.sh", "8"]),
        ("sbatch -N 4 x.sbatch", ["sbatch", "-N", "4", "x.sbatch"]),
    ],
)
def test_a_shell_script_is_not_guessed_at(line, shell):
    read = read_line(shlex.split(line), {})
    assert (list(read.shell), read.words) == (shell, ())


def test_variables_stand_in_for_options_and_are_kept_for_the_job():
    read = read_line("srun python a.py".split(), {"SLURM_NTASKS": "32", "SLURM_NNODES": "4"})
    assert (read.ranks, read.per_host) == (32, 8)
    read = read_line("A=1 mpirun -n 2 -x B=2 -x PATH python a.py".split(), {})
    assert read.variables == {"A": "1", "B": "2"}


@pytest.mark.parametrize("number", ["gpu", "auto", "$GPUS", "0", "-2"])
def test_a_number_that_is_left_to_the_host_is_asked_for(number):
    read = read_line(["torchrun", f"--nproc-per-node={number}", "a.py"], {})
    with pytest.raises(UsageError, match=re.escape(f"--nproc-per-node {number}")):
        read.flags([])
    assert read.flags(["--prism-world-size", "8"]) == []


def test_our_flags_win_and_name_hosts_where_there_are_several():
    read = read_line("torchrun --nnodes 2 --nproc-per-node 8 a.py".split(), {})
    assert read.flags([]) == ["--prism-world-size", "16", "--prism-gpus-per-node", "8"]
    assert read.flags(["--prism-gpus-per-node=4"]) == ["--prism-world-size", "16"]
    one = read_line("torchrun --nproc-per-node 8 a.py".split(), {})
    assert one.flags([]) == ["--prism-world-size", "8"]


@pytest.mark.parametrize(
    ("words", "ours", "line"),
    [
        ("--prism-tier meta -- a.py --lr 1", "--prism-tier meta", "a.py --lr 1"),
        ("-o env --force torchrun a.py -- b", "-o env --force", "torchrun a.py -- b"),
        ("explain x limit=2 -- -m pkg.mod", "explain x limit=2", "-m pkg.mod"),
        ("-o d sbatch -N 4 x", "-o d", "sbatch -N 4 x"),
        ("slices machine=h200", "slices machine=h200", ""),
        ("--limit 80GB 'torchrun -m a.b --lr 1'", "--limit 80GB", "torchrun -m a.b --lr 1"),
        ("-- 'torchrun a.py --lr 1'", "", "torchrun a.py --lr 1"),
        ("srun -N 2 bash -c 'python a.py'", "", "srun -N 2 bash -c 'python a.py'"),
        ("'bash -lc \"torchrun a.py\"'", "", "bash -lc 'torchrun a.py'"),
        ("docker run img bash -c 'python a.py'", "", "docker run img bash -c 'python a.py'"),
        ("-- a.py --experiment-name 'python run 7'", "", "a.py --experiment-name 'python run 7'"),
        ("--dumps docker", "--dumps docker", ""),
    ],
)
def test_a_line_needs_no_dashes_before_it(words, ours, line):
    assert split_line(shlex.split(words), {"--force"}) == (ours.split(), shlex.split(line))


def test_several_programs_of_one_launcher_are_refused():
    for launcher in ("srun -n 8", "mpirun -np 8"):
        with pytest.raises(UsageError, match="several programs"):
            read_line(f"{launcher} python a.py : -n 2 python b.py".split(), {})


def test_a_script_of_another_machine_is_the_file_of_its_name_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert job_line.job_of(["python", "/no/where/train.py", "x"], [])[1] == ["train.py", "x"]
    assert "/no/where/train.py is not here" in capsys.readouterr().err
    for line in ("python /no/other.py", "python -m no.module", "srun nothing"):
        with pytest.raises(UsageError):
            job_line.job_of(line.split(), [])


def test_variables_of_the_line_reach_the_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("OF_THE_LINE", "0")
    job_line.job_of("env OF_THE_LINE=1 python train.py".split(), [])
    assert os.environ["OF_THE_LINE"] == "1"


@pytest.mark.parametrize(
    ("words", "says", "fix"),
    [("--limt 80GB torchrun a.py", "no option --limt", "--limit"),
     ("--limit 80 torchrun a.py", "80 bytes", "--limit 80GB"),
     ("torchrn --nnodes=2 a.py", "torchrn", "torchrun"),
     ("torchrun --nnodes 2 --nproc-per-node 8", "no script stands in torchrun", "pretrain_gpt.py")],
)  # fmt: skip
def test_what_is_wrong_before_a_line_is_said_before_the_capture(words, says, fix, tmp_path,
                                                                monkeypatch):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    monkeypatch.setattr(cli, "capture_line", lambda *words: pytest.fail("it was captured"))
    with pytest.raises(UsageError, match=says) as error:
        cli.read_words("fit", words.split())
    assert fix in error.value.fix


def test_a_world_that_contradicts_the_line_counts_and_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    given = ["--prism-world-size", "4"]
    assert job_line.job_of("torchrun --nproc-per-node 8 a.py".split(), given)[0] == []
    assert "--prism-world-size 4 counts, not the 8 ranks" in capsys.readouterr().err


@pytest.mark.ci
def test_a_world_that_nobody_says_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "train.py").touch()
    for words in (["capture", "-o", "d"], ["replay"], ["fit"]):
        assert main([*words, "--", "train.py", "--tensor-model-parallel-size", "8"]) == 2
        assert "nobody says how many ranks" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["replay", "slow=1:2"], ["CAPTURED", "slow=1:2"]),
        (["fit", "--top", "3"], ["CAPTURED"]),
        (["compare", "A"], ["A", "CAPTURED"]),
        (["hang", "--dumps=d"], ["a.py", "--lr", "1"]),
        (["capture", "-o", "d"], ["a.py", "--lr", "1"]),
    ],
)
def test_a_line_stands_in_place_of_programs(words, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    monkeypatch.setattr(cli, "capture_line", lambda *words: "CAPTURED")
    name, *rest = words
    args = cli.read_words(name, [*rest, *"torchrun --nproc-per-node 2 a.py --lr 1".split()])
    words = (getattr(args, "programs", None), *getattr(args, "settings", ()))
    programs = getattr(args, "paths", None) or [word for word in words if word]
    assert (programs or args.job) == expected
    assert args.ours == ["--prism-world-size", "2"]
