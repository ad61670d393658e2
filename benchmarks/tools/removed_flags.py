"""Write the table of flags that Megatron-LM had and has no more, from the tags of a clone.

python benchmarks/tools/removed_flags.py CLONE
"""

import json
import pathlib
import re
import subprocess
import sys

TABLE = pathlib.Path(__file__).parents[2] / "megatron_prism/emulate/removed_flags.json"
RELEASES = ["v1.0", "v2.0", "v2.5", "v2.6", "23.04", "23.06"]
REPLACED = {  # by its release notes and its own error messages
    "--checkpoint-activations": "--recompute-granularity full --recompute-method uniform",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--distribute-checkpointed-activations": "--distribute-saved-activations",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--min-scale": "--min-loss-scale",
    "--fp8-hybrid": "--fp8-format hybrid",
    "--fp8-e4m3": "--fp8-format e4m3",
    "--no-query-key-layer-scaling": "nothing: it is the default",
    "--lazy-mpu-init": "nothing",
    "--dataset-impl": "nothing: data sets are indexed",
    "--data-impl": "nothing: data sets are indexed",
    "--mmap-warmup": "nothing",
    "--DDP-impl": "nothing: local is the default",
    "--use-contiguous-buffers-in-local-ddp": "nothing: it is the default",
    "--no-contiguous-buffers-in-local-ddp": "nothing",
    "--empty-unused-memory-level": "nothing",
    "--use-mcore-models": "nothing: it is the default",
    "--no-scatter-gather-tensors-in-pipeline": "nothing",
    "--use-dist-ckpt": "--ckpt-format torch_dist",
    "--dist-ckpt-format": "--ckpt-format",
}


def git(clone, *words):
    return subprocess.run(["git", "-C", clone, *words], capture_output=True, text=True).stdout


def flags_of(clone, tag):
    """The flags that a release's arguments.py spells out."""
    folders = ("megatron/training/", "megatron/", "")
    text = "".join(git(clone, "show", f"{tag}:{folder}arguments.py") for folder in folders)
    return {flag for _, flag in re.findall(r"add_argument\(\s*(['\"])(--[\w-]+)", text)}


def alive(clone, tag):
    """Flags that a release spells out anywhere, or makes of fields of a dataclass."""
    found = set(flags_of(clone, tag))
    for file in git(clone, "ls-tree", "-r", "--name-only", tag, "megatron").splitlines():
        if file.endswith(".py") and ("config" in file or "training/" in file or "/models" in file):
            text = git(clone, "show", f"{tag}:{file}")
            fields = re.findall(r"^    (\w+) *:", text, re.MULTILINE)
            found |= {f"--{name.replace('_', '-')}" for name in fields}
            found |= {f"--no-{name.replace('_', '-')}" for name in fields}
            found |= set(re.findall(r"['\"](--[\w-]+)['\"]", text))
    return found


def main(clone):
    tags = [tag for tag in git(clone, "tag", "--sort=creatordate").split()
            if tag in RELEASES or re.fullmatch(r"core_[rv]0\.\d+\.\d+", tag)]  # fmt: skip
    tags.sort(key=lambda tag: git(clone, "log", "-1", "--format=%cI", tag))
    last = {flag: tag for tag in tags for flag in flags_of(clone, tag)}
    kept = alive(clone, tags[-1])
    table = {flag: [tag, REPLACED.get(flag, "")] for flag, tag in sorted(last.items())
             if flag not in kept}  # fmt: skip
    rows = ",\n".join(f" {json.dumps(flag)}: {json.dumps(row)}" for flag, row in table.items())
    TABLE.write_text("{\n" + rows + "\n}\n")
    print(f"{len(table)} flags, up to {tags[-1]}")


if __name__ == "__main__":
    main(sys.argv[1])
