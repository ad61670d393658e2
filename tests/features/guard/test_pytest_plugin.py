"""The fixture ``prism_memory`` in a pytest of its own: guards, updates, refuses."""

import functools
import json

import pytest

# inner runs drop what they import, and with it the names in annotations that are looked up late
import megatron_prism.core.jobs.recipe  # noqa: F401
import megatron_prism.emulate.jobs.recipe_job  # noqa: F401
import megatron_prism.features.guard.baseline
import megatron_prism.features.guard.command
import megatron_prism.features.guard.pytest_plugin  # noqa: F401

pytest_plugins = ["pytester"]

PROGRAM = """prism-program 1
world size=2
source tier=meta torch=2.13.0
program ranks=0-1
- alloc storage=0 bytes=1000 note="decoder.mlp @core/transformer/mlp.py:5"
0F compute kernels=1
O compute kernels=1
"""
TEST = """
import pytest

@pytest.mark.prism_memory(job="job.txt", tol_bytes={tol!r}, limit={limit!r}, device="none")
def test_peak(prism_memory):
    prism_memory.check()
"""
BASELINE = "prism_memory/test_x-test_peak.json"


@pytest.fixture
def job(pytester, monkeypatch):
    monkeypatch.delenv("CI", raising=False)

    def write(size=1000, tol=0, limit=None, program=PROGRAM):
        (pytester.path / "job.txt").write_text(program.replace("bytes=1000", f"bytes={size}"))
        pytester.makepyfile(test_x=TEST.format(tol=tol, limit=limit))

    write()
    return write


def run(pytester, *words):
    plugins = () if has_entry_point() else ("-p", "megatron_prism.pytest_plugin")
    return pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", *plugins, *words)


def has_entry_point():
    from importlib.metadata import entry_points

    return any(e.value == "megatron_prism.pytest_plugin" for e in entry_points(group="pytest11"))


def test_a_missing_baseline_is_written_and_then_guards(pytester, job):
    run(pytester).assert_outcomes(passed=1)
    assert (pytester.path / BASELINE).exists()
    run(pytester).assert_outcomes(passed=1)
    job(size=1001)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*grown +1 B*", "*core/transformer/mlp.py:5*"])


def test_under_ci_a_missing_baseline_fails(pytester, job, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*is missing; write it: pytest --prism-mem-update*"])
    assert not (pytester.path / BASELINE).exists()
    run(pytester, "--prism-mem-update").assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)


@pytest.mark.parametrize(("size", "tol", "fails"), [(1512, "512 B", 0), (1513, 512, 1)])
def test_the_tolerance_is_exact(pytester, job, size, tol, fails):
    run(pytester).assert_outcomes(passed=1)
    job(size=size, tol=tol)
    run(pytester).assert_outcomes(passed=1 - fails, failed=fails)


@pytest.mark.parametrize(("limit", "fails"), [("2MiB", 0), (2097151, 1), ("2 qB", 1)])
def test_the_limit(pytester, job, limit, fails):
    job(limit=limit)
    run(pytester).assert_outcomes(passed=1 - fails, failed=fails)
    assert (pytester.path / BASELINE).exists() == (not fails)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("headroom='1MiB'", "headroom is taken from a limit"),
        ("limit='1MiB', headroom='2MiB'", "headroom leaves nothing of the limit"),
        ("tol_bytes='1mib'", "'1mib': 'mib' is no unit of a size"),
        ("job=17", "job=17 is no path"),
        ("settings='a.b=1'", "settings='a.b=1' changes no captured programs"),
    ],
)
def test_what_has_no_meaning_fails_in_one_line_and_writes_nothing(pytester, job, words, says):
    pytester.makepyfile(
        test_x="def test_peak(prism_memory):\n    prism_memory.check(**dict(dict(job='job.txt'), "
        f"**dict({words})))"
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"{says}*"])
    assert "During handling" not in str(result.stdout)
    assert not (pytester.path / "prism_memory").exists()


def test_a_named_baseline_is_the_same_from_every_folder(pytester, job, monkeypatch):
    pytester.makeini("[pytest]")
    pytester.makepyfile(
        test_x="import pathlib\n"
        "def test_peak(prism_memory):\n"
        "    job = pathlib.Path(__file__).parent / 'job.txt'\n"
        "    prism_memory.check(job, baseline='b.json')\n"
    )
    run(pytester).assert_outcomes(passed=1)
    job(size=2000, program=PROGRAM)  # grown
    elsewhere = pytester.mkdir("elsewhere")
    pytester.makepyfile(test_x=(pytester.path / "test_x.py").read_text())
    monkeypatch.chdir(elsewhere)
    run(pytester, "..").assert_outcomes(failed=1)
    assert not (elsewhere / "b.json").exists()


def test_a_baseline_of_another_job_is_updated_by_pytest(pytester, job):
    """Its words are this plugin's: there are no slices that ``prism memory update`` could take."""
    run(pytester).assert_outcomes(passed=1)
    job(program=PROGRAM.replace("torch=2.13.0", "torch=2.14.0"))
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*torch 2.13.0, now 2.14.0*", "*fix: pytest --prism-mem-update*"])
    assert "prism memory" not in str(result.stdout)
    run(pytester, "--prism-mem-update").assert_outcomes(passed=1)
    (pytester.path / BASELINE).write_text("{")
    result = run(pytester)
    result.stdout.fnmatch_lines(["*fix: pytest --prism-mem-update*"])
    run(pytester, "--prism-mem-update").assert_outcomes(passed=1)
    run(pytester).assert_outcomes(passed=1)


def test_a_launch_line_may_be_longer_than_the_name_of_a_file(pytester, job, monkeypatch):
    """In a marker, and as the parameter of a test, of which the baseline's name is made."""
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.guard import pytest_plugin

    lines = [f"torchrun --nproc-per-node 2 a.py --lr 1 --data-path {'x' * 300}{n}" for n in "12"]
    captured = []

    def capture(line, settings, stamp):
        captured.append(line)
        return open_programs(pytester.path / "job.txt")

    monkeypatch.setattr(pytest_plugin, "_captured", capture)
    pytester.makepyfile(
        test_x=f"""
import pytest

@pytest.mark.prism_memory(job={lines[0]!r}, device="none")
def test_peak(prism_memory):
    prism_memory.check()

@pytest.mark.parametrize("job", {lines!r})
def test_lines(prism_memory, job):
    prism_memory.check(job, device="none")
"""
    )
    run(pytester).assert_outcomes(passed=3)
    assert captured == [lines[0], *lines]
    assert len(list((pytester.path / "prism_memory").iterdir())) == 3
    job_text = pytester.path / "job.txt"
    job_text.write_text(job_text.read_text().replace("bytes=1000", "bytes=2000"))
    run(pytester).assert_outcomes(failed=3)


def test_a_marker_without_a_check_warns(pytester, job):
    pytester.makepyfile(
        test_x="""
import pytest

@pytest.mark.prism_memory(job="job.txt")
def test_peak(prism_memory):
    pass
"""
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*test_peak compared nothing: it has to call prism_memory.check*"])


def test_update_takes_growth_but_no_run_that_failed(pytester, job):
    run(pytester).assert_outcomes(passed=1)
    job(size=5000)
    run(pytester, "--prism-mem-update").assert_outcomes(passed=1)
    kept = (pytester.path / BASELINE).read_text()
    assert json.loads(kept)["classes"]["all"]["peak_allocated"] == 5000
    job(program=PROGRAM.replace("O compute kernels=1\n", ""))
    result = run(pytester, "--prism-mem-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*made no optimizer step*"])
    assert (pytester.path / BASELINE).read_text() == kept


def test_figures_are_in_the_junit_report(pytester, job):
    run(pytester, "--junitxml=report.xml").assert_outcomes(passed=1)
    text = (pytester.path / "report.xml").read_text()
    assert 'name="prism_memory[all].peak_allocated" value="1000"' in text


@pytest.mark.parametrize("job_line", ["tiny-gpt_1cpu", "torchrun --nproc-per-node 2 a.py --lr 1"])
def test_a_job_is_captured_once_for_all_tests_and_after_the_baseline_is_read(
    pytester, job, monkeypatch, job_line
):
    from megatron_prism.core.programs.program import save
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.emulate.jobs import recipe_job, script_job
    from megatron_prism.features.guard import pytest_plugin

    taken = []

    def capture(recipe, folder):
        taken.append(recipe.name)
        return open_programs(pytester.path / "job.txt")

    def capture_line(script, argv, folder, console):
        taken.append(" ".join([script, *argv]))
        folder.mkdir()
        save(open_programs(pytester.path / "job.txt"), folder / "world.prism")

    monkeypatch.setattr(recipe_job, "capture", capture)
    monkeypatch.setattr(script_job, "capture_command_line", capture_line)
    (pytester.path / "a.py").touch()
    monkeypatch.setattr(pytest_plugin, "_captured", pytest_plugin._captured.__wrapped__)
    monkeypatch.setattr(pytest_plugin, "_captured", functools.cache(pytest_plugin._captured))
    call = f"prism_memory.check('{job_line}', device='none')"
    pytester.makepyfile(
        test_x=f"def test_peak(prism_memory):\n    {call}\ndef test_it(prism_memory):\n    {call}\n"
    )
    run(pytester).assert_outcomes(passed=2)
    assert taken in (["tiny-gpt_1cpu"], ["a.py --prism-world-size 2 --lr 1"])
    pytest_plugin._captured.cache_clear()
    (pytester.path / BASELINE).write_text("{")
    run(pytester, "-k", "test_peak").assert_outcomes(failed=1)
    assert len(taken) == 1
