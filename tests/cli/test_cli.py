"""``prism``: stdout is the result, stderr the talk, the exit status says which; no tracebacks."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.cli import output

DENSE = str(pathlib.Path(__file__).parents[1] / "golden" / "slices" / "dense_pp2")


def run(*words, capsys):
    status = cli.main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_without_a_command_it_shows_them_all(capsys):
    status, out, err = run(capsys=capsys)
    assert status == 2
    assert all(name in out for name in cli.COMMANDS)
    assert run("--help", capsys=capsys)[:2] == (0, out)


@pytest.mark.parametrize(
    ("words", "head", "first"),
    [
        (["recipes"], "recipe,shows", "guard-gpt_16gpu_tp2pp2vp2_h200,"),
        (["show", DENSE, "--rank", "3"], "rank,index,step,", "3,0,"),
    ],
)
def test_tables_as_csv(words, head, first, tmp_path, capsys):
    file = tmp_path / "t.csv"
    status, out, err = run(*words, "--csv", str(file), capsys=capsys)
    lines = file.read_text().splitlines()
    assert status == 0
    assert lines[0].startswith(head)
    assert lines[1].startswith(first)
    assert out  # the text as well
    assert str(file) in err
    assert run(*words, "--csv", str(file), capsys=capsys)[0] == 2  # it is not overwritten


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["shwo"], "did you mean show?"),
        (["emulate"], "required: RECIPE\n"),
        (["emulate", "llama3-70b"], "did you mean llama3-70b_1024gpu"),
        (["emulate", "tiny-gpt_1cpu", "--frce"], "did you mean --force?"),
        (["emulate", "tiny-gpt_1cpu", "tpp=2"], "did you mean tp"),
        (["emulate", "tiny-gpt_1cpu", "train.iterations=3"], "fix: did you mean train_iters?"),
        (["emulate", "tiny-gpt_1cpu", "lr=nan"], "lr is nan"),
        (["emulate", "tiny-gpt_1cpu", "prism.values=zeros"], "use mirror or noise"),
    ],
)
def test_bad_usage_is_status_2_with_a_fix_and_nothing_on_stdout(words, says, capsys):
    status, out, err = run(*words, capsys=capsys)
    assert status == 2
    assert out == ""
    assert err.startswith("prism: error: ")
    assert says in err
    assert "fix: " in err


def test_a_bug_ends_in_three_lines_and_keeps_its_traceback(monkeypatch, capsys, tmp_path):
    def broken(args):
        raise RuntimeError("a \x1b[31mbug")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "recipes", cli.Command(broken))
    status, _, said = run("recipes", capsys=capsys)
    assert status == 70
    assert len(said.splitlines()) == 3
    assert "RuntimeError: a \\x1b[31mbug" in said
    (kept,) = tmp_path.iterdir()
    assert str(kept) in said
    assert "in broken" in kept.read_text()
    monkeypatch.setenv("PRISM_DEBUG", "1")
    assert "in broken" in run("recipes", capsys=capsys)[2]
    assert list(tmp_path.iterdir()) == [kept]


def test_interrupt_is_status_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "recipes", cli.Command(interrupted))
    assert run("recipes", capsys=capsys)[0] == 130


def fresh(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import megatron_prism", "torch numpy rich yaml megatron"),
        ("import megatron_prism.cli.main", "torch numpy yaml megatron"),
        (
            "import megatron_prism.cli.main as c; c.main(['recipes'])",
            "torch megatron",
        ),
    ],
)
def test_light_imports(code, heavy):
    # a .pth hook of the environment may import things before us: count only what our line adds
    probe = f"import sys; before = set(sys.modules)\n{code}\n"
    probe += f"print('LOADED', *({set(heavy.split())!r} & (set(sys.modules) - before)))"
    out = fresh(probe)
    assert out[out.index("LOADED") + 1 :] == []


@pytest.mark.parametrize(
    "module",
    [
        "emulate.command_line.job_line",
        "emulate.jobs.script_job",
        "emulate.jobs.estimate",
        "features.scripts.execution",
        "features.fit.fit",
    ],
)
def test_what_reads_a_launch_line_starts_without_torch(module):
    """Torch takes more than a second, in front of the first line that is printed."""
    probe = f"import sys, megatron_prism.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_error_of_a_script_is_not_ours(tmp_path):
    """Without a file in it, as of a library that is missing."""
    script = tmp_path / "job.py"
    script.write_text('raise OSError("install transformers")')
    done = subprocess.run(
        [sys.executable, "-m", "megatron_prism", "run", "--", str(script)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "install transformers" in done.stderr
    assert "mistake of prism" not in done.stderr


@pytest.mark.parametrize(
    ("into", "status", "says"),
    [
        (">&-", 0, ""),
        (
            "> /dev/full",
            1,
            "No space left on device: not all was written\n"
            "  fix: make room there, and run it again",
        ),
    ],
)
@pytest.mark.parametrize("command", ["recipes", "recipes --json"])
def test_output_that_nobody_takes(command, into, status, says):
    """A closed stdout swallows what is printed; a full disk is named, both without a traceback."""
    done = subprocess.run(
        f"{sys.executable} -m megatron_prism {command} {into}",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    assert done.stderr == (f"prism: error: {says}\n" if says else "")


@pytest.mark.parametrize("command", ["recipes", "recipes --json", "--help"])
def test_nobody_reads(command):
    """As other tools that a closed pipe stops: no word, and the status that shells show for it."""
    words = [sys.executable, "-m", "megatron_prism", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_sigterm_unwinds_every_command(monkeypatch):
    seen = []

    def slow(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            seen.append("unwound")

    monkeypatch.setitem(cli.COMMANDS, "recipes", cli.Command(slow))
    with pytest.raises(SystemExit) as end:
        cli.main(["recipes"])
    assert (end.value.code, seen) == (143, ["unwound"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_labels_are_seen_and_not_obeyed(tmp_path, capsys):
    """A group's name, a note or a dump's frame that would clear the terminal or name its window."""
    path, name = tmp_path / "w.txt", "G\x1b]0;mine\x07\x1b[2J\x9b2J"
    path.write_text(
        f"prism-program 1\nworld size=2\ngroup {name} 0,1\nprogram ranks=0-1\n"
        f"- all_reduce {name} bf16 n=64 reduce=sum\n"
    )
    status, out, _ = run("replay", str(path), "--machine", "h100", capsys=capsys)
    assert status == 0
    assert "G\\x1b]0;mine\\x07\\x1b[2J\\x9b2J" in out
    status, _, err = run("replay", str(path), "--machine", "h100", "dp=4", capsys=capsys)
    assert status != 0
    assert "G\\x1b]0;mine" in err
    with output.visible():
        sys.stderr.writelines(["a\tb\r\n", "not\rover \u202e\n"])
        output.console().print("\x1b[8mhidden", style="red")
        output.print_table(["a", "b"], [["\x1b[2J", "c"]])
    out, err = capsys.readouterr()
    assert err == "a\tb\r\nnot\\rover \\u202e\n"
    assert "\\x1b[8mhidden" in out
    assert "\\x1b[2J  c" in out
    assert "\x1b" not in out


def test_the_overview_names_every_command_once(capsys):
    cli.main(["--help"])
    named = re.findall(r"^  ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(named) == sorted(cli.COMMANDS)


@pytest.mark.parametrize(
    "words",
    ["fit JOB --limit 40MiB", "replay JOB", "compare JOB slow=0:1.5", "memory record JOB -o OUT"],
)
def test_text_fits_a_terminal_of_80_columns(words, tmp_path, capsys):
    job = pathlib.Path(__file__).parents[1] / "golden" / "slices" / "interleaved"
    short = tmp_path / "job"
    short.symlink_to(job)
    words = words.replace("JOB", str(short)).replace("OUT", str(tmp_path / "m.json"))
    cli.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []
    torn = [
        (one, following)
        for one, following in zip(lines, lines[1:], strict=False)
        if re.search(r"\d$", one) and re.match(r" +([KMG]iB|[mun]?s|%)(\W|$)", following)
    ]
    assert torn == []


def test_a_command_that_asks_megatron_is_no_job():
    """Its words name a job's world; what it imports must not attach to them."""
    pytest.importorskip("megatron.core")
    code = "from megatron_prism.cli.main import main; main(); import megatron.core; print('there')"
    words = [sys.executable, "-c", code, "check", "nowhere", "--prism-world-size", "8"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("there\n", 0), done.stderr
