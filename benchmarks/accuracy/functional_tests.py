"""How many of Megatron-LM's own functional tests run here, how exact, and why the others do not.

``python -m benchmarks.accuracy.functional_tests run TREE OUT.csv [--half even|odd|all] [--only RE]
[--iters 2] [--limit 120] [--samples N] [--time h100] [--work DIR]``
``python -m benchmarks.accuracy.functional_tests new TREE OUT.csv [the same options]``
``python -m benchmarks.accuracy.functional_tests table OUT.csv [OUT.csv …]``

TREE is a checkout of Megatron-LM (``git clone --branch core_v0.19.0
https://github.com/NVIDIA/Megatron-LM``, outside of this repository); its tests are the files
``tests/functional_tests/test_cases/*/*/model_config.yaml``.  Each becomes a command line: the job's
own arguments with mock data and a tokenizer of the same size, two iterations, no files, no
evaluation.  The last rank, which writes Megatron's own figures, is emulated on tier ``meta``.
Where the tree has NVIDIA's figures for the test (golden values), the peak of allocated bytes is
compared with theirs; with ``--time`` one rank of every pipeline stage is captured and the replay on
that machine compared, too.

Rows are added to OUT.csv at once and tests that it has are skipped, so a run can be stopped and
started again; remove a row to try its test again.  ``table`` prints what the files say; ``new`` is
``run``, then the table, and each change of the tests that ran against the stored table of main.

outcome: works; refused (by name, exit 2 or 1 with ``prism: error:``); Megatron's own (a failure of
``MEGATRONS_OWN``); crashes (any other); too long (not done within the limit); not tried (no
training job, no way to convert it, or it needs a package that this environment lacks).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

CASES = "tests/functional_tests/test_cases"
OUTCOMES = ("works", "refused", "Megatron's own", "crashes", "too long", "not tried")
MEGATRONS_OWN = {  # the end of an error -> why it comes without an emulation, too
    "has no attribute 'use_legacy_models'": "pretrain_hybrid_flex.py:121 reads an argument that "
    "39ec5ebeb4 has taken out",
}
HARDWARE = "dev_dgx_h100"
LAST = Path(__file__).parents[1] / "results/functional_tests_main.csv"
# of files, logs, data, and how long it runs; formats of checkpoints stay, some features need one
DROPPED = re.compile(
    r"--(save|load|use-checkpoint-args|tensorboard|wandb|exit-|data-path|data-cache|split"
    r"|vocab-file|merge-file|tokenizer|vocab-size|mock-data|async-save|use-persistent-ckpt"
    r"|ckpt-(?!format$)|dist-ckpt|auto-detect-ckpt|train-iters|train-samples|eval-iters"
    r"|log-interval|log-.*-to-tensorboard|log-progress|non-persistent|per-split|no-mmap|one-logger"
    r"|export-|seed$|pretrained-checkpoint)"
)
VOCABULARY = {
    "BertWordPieceLowerCase": 30521,  # NullTokenizer adds one
    "BertWordPieceCase": 29095,  # with T5's hundred sentinels
    "GPT2BPETokenizer": 50257,
    "GPTSentencePieceTokenizer": 256000,
    "Llama2Tokenizer": 32000,
    "TikTokenizer": 131072,
    "HuggingFaceTokenizer": 32000,
    "SFTTokenizer": 131072,
}
SCRIPTS = {
    **dict.fromkeys(("gpt", "moe", "mixtral", "nemotron"), "pretrain_gpt.py"),
    "hybrid": "pretrain_hybrid.py",
    "bert": "examples/bert/pretrain_bert.py",
    "t5": "examples/t5/pretrain_t5.py",
    "multimodal-llava": "pretrain_vlm.py",
    "mimo": "examples/mimo/train.py",
}
OLDER = {"pretrain_hybrid.py": "pretrain_mamba.py", "examples/bert/pretrain_bert.py":
         "pretrain_bert.py", "examples/t5/pretrain_t5.py": "pretrain_t5.py"}  # fmt: skip


@dataclass
class Result:
    """One test; bytes and seconds are of the emulated rank and of NVIDIA's run.  ``resident`` is
    the optimizer step's peak, ``golden_resident`` what stays allocated between iterations."""

    test: str
    outcome: str = "not tried"
    why: str = ""
    bytes: int | str = ""
    golden_bytes: int | str = ""
    seconds: float | str = ""
    golden_seconds: float | str = ""
    took_s: int | str = ""
    gpus: int | str = ""
    resident: int | str = ""
    golden_resident: int | str = ""

    @property
    def memory_error(self) -> float | None:
        """Percent."""
        return _percent(self.bytes, self.golden_bytes)

    @property
    def resident_error(self) -> float | None:
        """Percent."""
        return _percent(self.resident, self.golden_resident)

    @property
    def time_error(self) -> float | None:
        """Percent."""
        return _percent(self.seconds, self.golden_seconds)


def _percent(ours: Any, theirs: Any) -> float | None:
    return 100 * (float(ours) / float(theirs) - 1) if ours and theirs else None


# -- a test as a command line ----------------------------------------------------------------------


def golden(file: Path, key: str, how: Callable[[list[float]], float]) -> float | str:
    """One of NVIDIA's figures, or "" where there is none."""
    try:
        values = json.loads(file.read_text())[key]["values"].values()
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return ""
    numbers = [v for v in values if not isinstance(v, str) and v == v]
    return how(numbers) if numbers else ""


def recipe_gpus(tree: Path) -> dict[str, int]:
    """GPUs of each test that a recipe of the tree starts; H100's recipe where there are two."""
    import yaml

    gpus: dict[str, int] = {}
    for file in sorted((tree / "tests/test_utils/recipes").glob("*/*.yaml")):
        recipe = yaml.safe_load(file.read_text())
        spec = recipe.get("spec", {})
        for product in recipe.get("products", []):
            for name in product.get("test_case", []):
                test = f"{product.get('model', spec.get('model'))}/{name}"
                if test not in gpus or file.parent.name == "h100":
                    gpus[test] = spec["nodes"] * spec["gpus"]
    return gpus


def world_size(config: dict[str, Any], node: int) -> int:
    """GPUs that the test names, else the fewest multiples of ``node`` that its sizes imply."""
    args = config["MODEL_ARGS"]
    own = (config.get("MODEL_ENV_VARS") or {}).get("MODEL_ARGS", {})
    if own.get("GPUS_PER_NODE"):
        return int(own["GPUS_PER_NODE"])

    def size(name: str) -> int:
        return int(args.get(f"--{name}-parallel-size") or 1)

    tp, pp, cp, ep = map(size, ("tensor-model", "pipeline-model", "context", "expert-model"))
    etp = int(args.get("--expert-tensor-parallel-size") or (tp if ep > 1 else 1))
    return math.lcm(node, tp * pp * cp, pp * ep * etp)


def words_of(value: Any) -> list[str]:
    """A value of the YAML as words of a command line."""
    if value is True:
        return []
    if isinstance(value, str) and re.fullmatch(r"\[[^]]+\]", value.strip()):
        return value.strip()[1:-1].split()
    if isinstance(value, str) and re.fullmatch(r"\d+( \d+)+", value.strip()):
        return value.split()
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def command(
    family: str, config: dict[str, Any], iters: int, tree: Path, data: Path
) -> tuple[list[str], str]:
    """(script and arguments, ""), or ([], why there are none)."""
    args = config.get("MODEL_ARGS") or {}
    script = "pretrain_hybrid.py" if "--hybrid-layer-pattern" in args else SCRIPTS.get(family)
    if config.get("MODE") in ("inference", "rl"):
        return [], f"{config['MODE']} test"
    if script is None or not any(key.startswith("--") for key in args):
        return [], "no script of Megatron-LM (NeMo, common)"
    if any(args.get(flag) for flag in ("--sft", "--fim-data")):
        return [], "needs data of its own kind (fine-tuning, fill-in-the-middle)"
    if not (tree / script).exists():
        script = OLDER.get(script, script)
    if any(key.startswith("--budget") for key in args):
        script = "megatron/elastification/pretrain_hybrid_flex.py"
    job = [script]
    for key, value in args.items():
        if value is not None and value is not False and not DROPPED.match(key):
            job += [key, *words_of(value)]
    usual = "BertWordPieceLowerCase" if family == "bert" else "GPT2BPETokenizer"
    vocabulary = args.get("--vocab-size") or VOCABULARY.get(args.get("--tokenizer-type") or usual)
    if family != "mimo":
        if vocabulary is None:
            return [], f"tokenizer {args['--tokenizer-type']} of unknown size"
        job += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size",
                str(vocabulary)]  # fmt: skip
    if args.get("--ckpt-format") == "fsdp_dtensor" and args.get("--load"):
        # nothing is there, and Megatron-FSDP makes the optimizer's states all the same
        job += ["--load", str(data / "no checkpoint")]
    if "--train-samples" in args:
        first = str(args.get("--step-batch-size-schedule", "")).split(" ")[0].split(":")[-1]
        batch = int(args.get("--global-batch-size") or first or 8)
        job += ["--train-samples", str(iters * batch)]
    else:
        job += ["--train-iters", str(iters)]
    return [*job, "--eval-iters", "0", "--log-interval", "1"], ""


def shorten(job: list[str], samples: int, iters: int, replicas: int, stages: int) -> None:
    """About ``samples`` sequences in a batch, and four rounds of a pipeline: no peak depends on
    more."""
    micro = int(job[job.index("--micro-batch-size") + 1]) if "--micro-batch-size" in job else 1
    least = micro * replicas * stages
    most = max(samples, 4 * least if stages > 1 else least)
    for flag in ("--global-batch-size", "--step-batch-size-schedule"):
        if flag in job:
            at = job.index(flag)
            batch = int(job[at + 1].split(" ")[0].split(":")[-1])
            if batch > most:
                batch = most // least * least
            job[at : at + 2] = ["--global-batch-size", str(batch)]
            if "--train-samples" in job:
                job[job.index("--train-samples") + 1] = str(iters * batch)


# -- one run ---------------------------------------------------------------------------------------


def prism(
    words: Sequence[str], cwd: Path, env: dict[str, str], log: Path, limit: float
) -> int | None:
    """Exit status of ``prism WORDS``, whose output goes to ``log``; None, and no process left, past
    ``limit`` s."""
    with log.open("wb") as to:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "megatron_prism", *words],
            cwd=cwd, env=env, stdout=to, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def said(status: int | None, log: Path) -> tuple[str, str]:
    """(outcome, the line that says why) of a run that did not work."""
    text = log.read_text(errors="replace")
    lines = [re.sub(r"^\[rank\d+\]:", "", x).strip() for x in text.splitlines() if x.strip()]
    last = lines[-1] if lines else ""
    if status is None:
        return "too long", last[:200]
    refusals = [x for x in lines if x.startswith("prism: error:")]
    if refusals and "Traceback (most recent call last)" not in text:
        return "refused", refusals[0].removeprefix("prism: error:").strip()[:300]
    errors = [x for x in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", x)
              or re.search(r"\.py: error:", x)]  # fmt: skip
    frames = re.findall(r'File "([^"]+)", line (\d+)', text)
    place = "/".join(Path(frames[-1][0]).parts[-2:]) + f":{frames[-1][1]}" if frames else ""
    if errors and errors[-1].startswith(("ModuleNotFoundError", "ImportError")):
        return "not tried", f"needs a package: {errors[-1]}"[:300]
    error = (errors or refusals or [last])[-1][:240]
    own = next((why for end, why in MEGATRONS_OWN.items() if error.endswith(end)), None)
    return ("crashes", f"{error} ({place})") if own is None else ("Megatron's own", own)


@dataclass
class Trial:
    """How tests are tried: ``run`` on the command line."""

    tree: Path
    work: Path
    iters: int
    limit: float
    samples: int | None
    machine: str | None
    gpus: dict[str, int]

    def run(self, test: str) -> Result:
        """Emulate one test.  The GPUs of a test without a recipe are written nowhere: the most
        whose optimizer step, with its smaller shards, still holds NVIDIA's resident bytes."""
        result = self.once(test, self.gpus.get(test))
        while test not in self.gpus and (result.resident_error or 0) > 2:
            more = self.once(test, 2 * int(result.gpus))
            error = more.resident_error
            if error is None or error < -2 or int(more.resident) >= int(result.resident):
                break
            result = more
        return result

    def once(self, test: str, gpus: int | None) -> Result:
        """Emulate one test on as many GPUs; None: the fewest whole nodes of 8."""
        import yaml

        family, name = test.split("/")
        folder = self.tree / CASES / test
        result = Result(test)
        figures = folder / f"golden_values_{HARDWARE}.json"
        peak, resident = (f"mem-{name}allocated-bytes" for name in ("max-", ""))
        result.golden_bytes = golden(figures, peak, max)
        result.golden_resident = golden(figures, resident, statistics.median)
        result.golden_seconds = golden(figures, "iteration-time", statistics.median)
        config = yaml.safe_load((folder / "model_config.yaml").read_text())
        data = self.work / "data"
        job, result.why = command(family, config, self.iters, self.tree, data)
        if not job:
            return result
        size = world_size(config, gpus or 8)
        result.gpus = size
        tp, pp, cp = (int(config["MODEL_ARGS"].get(f"--{name}-parallel-size") or 1)
                      for name in ("tensor-model", "pipeline-model", "context"))  # fmt: skip
        if self.samples:
            shorten(job, self.samples, self.iters, size // (tp * pp * cp), pp)
        own = (config.get("ENV_VARS") or {}).items()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.tree)}
        env |= {k: str(v) for k, v in own if v is not None and "$" not in str(v)}
        base = self.work / test.replace("/", "_")
        flags = ["run", "--prism-world-size", str(size), "--prism-tier", "meta", "--prism-force"]
        start = time.monotonic()
        out, log = base.with_suffix(".out"), Path(f"{base}.log")
        shutil.rmtree(out, ignore_errors=True)
        words = [*flags, "--prism-ranks", str(size - 1), "--prism-out", str(out), *job]
        status = prism(words, self.tree, env, log, self.limit)
        result.took_s = round(time.monotonic() - start)
        if status != 0:
            result.outcome, result.why = said(status, log)
            return result
        result.outcome = "works"
        (file,) = out.rglob("rank-*.json")
        parts = json.loads(file.read_text())["memory"]["by_part"]
        result.bytes = max(
            v or 0 for k, v in parts.items() if k not in ("evaluation", "checkpoint")
        )
        result.resident = parts["optimizer step"] or ""
        if self.machine and result.golden_seconds:
            stages = [str(stage * (size // pp)) for stage in range(pp)]
            self.replay(
                result, [(*flags, "--prism-ranks", rank) for rank in stages], job, env, base
            )
        return result

    def replay(
        self,
        result: Result,
        stages: Sequence[Sequence[str]],
        job: Sequence[str],
        env: dict[str, str],
        base: Path,
    ) -> None:
        """Capture a rank of every stage, and fill in how long an iteration of them takes."""
        log, slices = Path(f"{base}.replay.log"), f"{base}.slices"
        for flags in stages:
            words = [*flags, "--prism-capture", slices, *job]
            if (status := prism(words, self.tree, env, log, self.limit)) != 0:
                result.why = "capture: " + ": ".join(said(status, log))
                return
        words = ["replay", slices, "--machine", self.machine]
        status = prism(words, self.tree, env, log, self.limit)
        found = re.search(r"iteration +([\d.,]+) (ms|s)\b", log.read_text())
        if status == 0 and found:
            scale = 1e-3 if found[2] == "ms" else 1
            result.seconds = round(float(found[1].replace(",", "")) * scale, 6)
        else:
            result.why = "replay: " + ": ".join(said(status, log))


def in_half(test: str, half: str) -> bool:
    """Halves by crc32 of the test's folder name."""
    odd = zlib.crc32(test.rpartition("/")[2].encode()) % 2 == 1
    return half == "all" or odd == (half == "odd")


def read(file: Path) -> list[Result]:
    if not file.exists():
        return []
    with file.open(newline="") as rows:
        return [Result(**row) for row in csv.DictReader(rows)]  # type: ignore[arg-type]


def run(options: argparse.Namespace) -> None:
    tree, out = options.tree.resolve(), options.out.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        gpus = recipe_gpus(tree)
        trial = Trial(tree, work, options.iters, options.limit, options.samples, options.time, gpus)
        done = {result.test for result in read(out)}
        for file in sorted((tree / CASES).glob("*/*/model_config.yaml")):
            test = file.parent.relative_to(tree / CASES).as_posix()
            if test in done or not re.search(options.only, test) or not in_half(test, options.half):
                continue
            result = trial.run(test)
            with out.open("a", newline="") as rows:
                writer = csv.DictWriter(rows, [one.name for one in fields(Result)])
                if rows.tell() == 0:
                    writer.writeheader()
                writer.writerow(asdict(result))
            error = result.memory_error
            shown = "" if error is None else f"{error:+.2f} %"
            print(result.test, result.outcome, shown, result.why, result.took_s, flush=True)


# -- the table -------------------------------------------------------------------------------------


def table(files: Sequence[Path]) -> str:
    """What the files say, as Markdown: counts, why tests do not run, the largest errors."""
    lines = []
    for file in files:
        results = read(file)
        tried = [one for one in results if one.outcome != "not tried"]
        count = Counter(one.outcome for one in results)
        lines += [
            f"#### {file.stem.removeprefix('functional_tests_')}",
            "",
            "| outcome | tests | of those tried |",
            "| --- | --- | --- |",
        ]
        for outcome in OUTCOMES:
            share = f"{100 * count[outcome] / len(tried):.0f} %" if outcome != "not tried" else ""
            lines.append(f"| {outcome} | {count[outcome]} | {share} |")
        lines += ["", "| tests | that do not run, and why |", "| --- | --- |"]
        why = Counter((one.outcome, _plain(one.why)) for one in results if one.outcome != "works")
        lines += [f"| {n} | {outcome}: {text} |" for (outcome, text), n in why.most_common()]
        for name, unit in (("memory_error", "peak of allocated bytes"),
                           ("time_error", "iteration time")):  # fmt: skip
            errors = [(getattr(one, name), one.test) for one in results]
            found = sorted((e for e in errors if e[0] is not None), key=lambda e: -abs(e[0]))
            if not found:
                continue
            sizes = [abs(error) for error, _ in found]
            lines += ["", f"{unit} against NVIDIA's figures ({len(found)} tests): median "
                      f"{statistics.median(sizes):.2f} %, within 2 % "
                      f"{sum(size <= 2 for size in sizes)}; the ten worst:", "",
                      "| test | error |", "| --- | --- |"]  # fmt: skip
            lines += [f"| {test} | {error:+.1f} % |" for error, test in found[:10]]
        lines.append("")
    return "\n".join(lines)


def changes(before: Sequence[Result], after: Sequence[Result]) -> str:
    """What became of tests: another outcome, or another peak by 0.5 % and more; Markdown."""
    there = {one.test: one for one in before}
    lines = ["| test | before | now |", "| --- | --- | --- |"]
    for one in after:
        old = there.get(one.test, Result(one.test, "new"))
        moved = _percent(one.bytes, old.bytes)
        if one.outcome != old.outcome or moved is not None and abs(moved) >= 0.5:
            peak = "" if moved is None else f"{moved:+.1f} % of bytes"
            lines.append(f"| {one.test} | {old.outcome} | {one.outcome} {_plain(one.why)}{peak} |")
    return "\n".join(lines)


def new(options: argparse.Namespace) -> None:
    run(options)
    print(f"{table([options.out])}\n{changes(read(LAST), read(options.out))}")


def _plain(why: str) -> str:
    """A reason without what differs from run to run, for one cell."""
    text = re.sub(r"; fix:.*|\bfix:.*", "", why).replace("|", "\\|")
    return re.sub(r"\s+", " ", text).strip(" ;.")[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    for do, text in ((run, "try tests and add their rows to OUT.csv"),
                     (new, "the same, then what changed against the last table")):  # fmt: skip
        trial = commands.add_parser(do.__name__, help=text)
        trial.add_argument("tree", type=Path)
        trial.add_argument("out", type=Path)
        trial.add_argument("--half", choices=("even", "odd", "all"), default="all")
        trial.add_argument("--only", default="", metavar="RE")
        trial.add_argument("--iters", type=int, default=2)
        trial.add_argument("--limit", type=float, default=120, help="seconds for one process")
        trial.add_argument("--samples", type=int, help="of a batch, about")
        trial.add_argument("--time", metavar="MACHINE", help="compare iteration times, too: h100")
        trial.add_argument("--work", type=Path, help="keep logs and JSON files in this folder")
        trial.set_defaults(do=do)
    found = commands.add_parser("table", help="counts, reasons and worst errors as Markdown")
    found.add_argument("files", type=Path, nargs="+")
    found.set_defaults(do=lambda options: print(table(options.files)))
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
