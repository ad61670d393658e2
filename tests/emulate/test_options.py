"""What the --prism-* flags mean, what they leave to be derived, and how bad input is refused."""

import os

import pytest

from megatron_prism.core.errors import UsageError, WorldError
from megatron_prism.emulate.command_line import launchers, options
from megatron_prism.emulate.command_line.options import from_command_line

SIZES = ["--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "4"]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}


def read(line="", env=None, sizes=SIZES):
    """Options of ``--prism-emulate`` with the job's own arguments around it."""
    job = ["--num-layers", "8", *sizes, "--bf16", "--lr", "1e-4"]
    return from_command_line([*job, "--prism-emulate", *line.split()], env or {})


def test_an_environment_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="PRISM_ARGS=--prism-ranks") as caught:
        read(env={"PRISM_ARGS": '--prism-ranks "'})
    assert caught.value.fix
    with pytest.raises(UsageError, match="RANK=9 is none of WORLD_SIZE=2"):
        read(env=TORCHRUN | {"RANK": "9"})


@pytest.mark.parametrize(
    ("parsed", "vpp", "order"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, 2, "tp-cp-ep-dp-pp"),
        ({"virtual_pipeline_model_parallel_size": None}, None, "tp-cp-ep-dp-pp"),
        ({"use_tp_pp_dp_mapping": True}, None, "tp-cp-ep-pp-dp"),
    ],
)
def test_chunks_are_those_of_the_parsed_arguments(parsed, vpp, order):
    """Several options say them, so the command line alone does not."""
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
    world = options.parsed_world(16, {**sizes, "num_layers": 8, **parsed})
    assert (world.tp, world.pp, world.dp, world.vpp, world.order) == (2, 4, 2, vpp, order)


@pytest.mark.parametrize("argv", [[], SIZES, ["--yaml-cfg", "x"], ["--fake-process-group"]])
def test_without_a_flag_nothing_is_asked_for(argv):
    assert from_command_line(argv, {"WORLD_SIZE": "64", "RANK": "3"}) is None


@pytest.mark.parametrize("argv", ["--prism-ranks 3", "--prism-tier=cpu", "--prism-force"])
def test_a_flag_without_emulation_is_an_error(argv):
    with pytest.raises(UsageError, match="without --prism-emulate has no effect") as caught:
        from_command_line(argv.split(), {})
    assert argv.split()[0] in caught.value.message
    assert "add --prism-emulate" in caught.value.fix


@pytest.mark.parametrize(
    ("sizes", "implied"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 8", 8),
        ("--context-parallel-size=2 --pipeline-model-parallel-size=3", 6),
        ("--expert-model-parallel-size 8 --tensor-model-parallel-size 2", 16),
    ],
)
def test_the_parallel_sizes_imply_a_world(sizes, implied):
    assert read(sizes=sizes.split()).world.size == implied


def test_plain_python_takes_the_worlds_size_and_rank_from_the_environment():
    options = read(env={"WORLD_SIZE": "65536", "RANK": "40000"})
    assert (options.world.size, options.rank, options.num_processes) == (65_536, 40_000, 1)


@pytest.mark.parametrize("process", [0, 1])
def test_torchruns_variables_count_processes_not_ranks(process):
    options = read("--prism-ranks 0,17", {**TORCHRUN, "RANK": str(process)})
    assert (options.process, options.num_processes) == (process, 2)
    assert options.world.size == 32
    assert (options.ranks, options.rank) == ((0, 17), (0, 17)[process])


def test_more_processes_than_the_sizes_imply_are_replicas():
    options = read(env={**TORCHRUN, "WORLD_SIZE": "5"}, sizes=["--tensor-model-parallel-size", "2"])
    assert (options.world.size, options.ranks) == (6, (0, 1, 2, 3, 4))


@pytest.mark.parametrize(
    ("selector", "rank"),
    [("517", 517), ("pp=3,tp=0", 768), ("tp=7", 7), ("pp=1;pp=2", 256), (" 3 ", 3)],
)
def test_selectors(selector, rank):
    options = from_command_line(
        [*SIZES, "--prism-emulate", "--prism-world-size", "1024", "--prism-ranks", selector], {}
    )
    assert options.rank == rank


def test_a_number_of_ranks_is_no_folder_of_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--prism-world 4") as caught:
        read("--prism-world 4")
    assert caught.value.fix == "--prism-world-size 4"


@pytest.mark.parametrize("selector", ["0,17", "0-1", "0;17"])
def test_several_ranks_need_several_processes(selector):
    with pytest.raises(UsageError, match="names 2 ranks, but there is one process") as caught:
        read(f"--prism-ranks {selector}")
    assert "torchrun --nproc-per-node 2" in caught.value.fix


def test_more_processes_than_ranks():
    with pytest.raises(UsageError, match="2 processes were started.* names 1") as caught:
        read("--prism-ranks 7", TORCHRUN)
    assert "start 1 processes" in caught.value.fix


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("--prism-ranks 32", {}),
        ("--prism-ranks 0,99", TORCHRUN),
        ("", {"RANK": "32"}),
        ("--prism-world-size 32", {"RANK": "40000", "WORLD_SIZE": "65536"}),
    ],
)
def test_a_rank_outside_the_world(line, env):
    with pytest.raises(WorldError, match="outside (the|a) world of 32 ranks") as caught:
        read(line, env)
    assert "31" in caught.value.fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("selector", ["pp=4", "x=1", "first", "1.5", "-1"])
def test_a_selector_that_selects_nothing(selector):
    with pytest.raises(UsageError) as caught:
        from_command_line([*SIZES, "--prism-emulate", f"--prism-ranks={selector}"], {})
    assert caught.value.fix


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--prism-tier gpu", "argument --prism-tier: invalid choice: 'gpu'"),
        ("--prism-xyz 3", "unknown option --prism-xyz"),
        ("--yaml-cfg job.yaml", "--yaml-cfg replaces Megatron's whole argument namespace"),
        ("--fake-process-group", "both replace the process groups"),
    ],
)
def test_bad_input_is_refused_with_a_fix(line, says):
    with pytest.raises(UsageError) as caught:
        read(line)
    assert says in caught.value.message
    assert caught.value.fix
    assert caught.value.exit_code == 2


def test_an_option_of_the_job_that_only_looks_like_ours():
    assert read("--prismatic-init").rank == 0


def test_prism_args_come_first():
    env = {"PRISM_ARGS": "--prism-emulate --prism-ranks 5 --prism-tier 'meta'"}
    options = from_command_line(SIZES, env)
    assert (options.rank, options.tier) == (5, "meta")
    assert from_command_line([*SIZES, "--prism-ranks", "6"], env).rank == 6


def recipe(folder, text):
    (folder / "job.yaml").write_text(text)
    return f"--prism-recipe {folder / 'job.yaml'}"


def test_a_recipe_gives_defaults(tmp_path):
    given = recipe(
        tmp_path,
        "prism: {world_size: 64, ranks: 'pp=2', tier: meta, values: noise, out: there}\n",
    )
    options = read(given)
    assert (options.rank, options.world.size) == (32, 64)
    assert (options.tier, options.values, str(options.out)) == ("meta", "noise", "there")
    assert read(given + " --prism-tier cpu --prism-ranks 1").tier == "cpu"
    assert read(given + " --prism-tier cpu --prism-ranks 1").rank == 1


@pytest.mark.parametrize(
    ("words", "local"),
    [
        ("", False),
        ("--transformer-impl local", True),
        ("--transformer-impl=local", True),
        ("--transformer-impl transformer_engine", False),
        ("--transformer-impl local --transformer-impl transformer_engine", False),
        ("--transformer-impl local --use-precision-aware-optimizer", False),
        ("--transformer-impl local --position-embedding-type rope", False),
        ("--transformer-impl local --position-embedding-type=rope --no-rope-fusion", True),
    ],
)
def test_local_layers_are_without_an_engine(monkeypatch, words, local):
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words.split()])
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        monkeypatch.delenv(name)
    assert options.without_engine() is local
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # of who has one
    assert not options.without_engine()


def test_tasks_of_srun_are_processes_of_one_job():
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
    assert launchers.processes(step) == (3, 4, True)
    assert launchers.launcher_variables(step)["LOCAL_RANK"] == "1"
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # a batch script is nobody's task
    assert launchers.processes(batch) == (0, 1, False)
    one = step | {"SLURM_STEP_NUM_TASKS": "1"}
    assert launchers.processes(one) == (0, 1, False)
    hosts = step | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert launchers.processes_here(hosts, 4) == 2
    assert launchers.processes_here(step, 4) == 4
    with pytest.raises(UsageError, match="MASTER_ADDR") as caught:
        launchers.launcher_variables(hosts)
    assert "scontrol" in caught.value.fix
    assert "MASTER_ADDR" not in launchers.launcher_variables(hosts | {"MASTER_ADDR": "node1"})


def test_an_iteration_of_a_checkpoint_is_a_number_or_two():
    assert read("--load ck --prism-iteration 7").iterations == (7, 7)
    assert read("--load=ck --prism-iteration 7..9").iterations == (7, 9)
    for words in ("--load ck --prism-iteration 9..7", "--load ck --prism-iteration 0",
                  "--load ck --prism-iteration x", "--prism-iteration 7"):  # fmt: skip
        with pytest.raises(UsageError) as error:
            read(words)
        assert "--" in error.value.fix
    assert "--load" in error.value.fix
