"""Launch scripts: a shell script runs dry, and the first command that trains is the job.

launcher.py      what the reader of launch lines asks
dry_run.py       the run of a script in which nothing is launched (dry_run.sh)
execution.py     one such run, from its start to its job
attempts.py      further runs, with what the script lacks
dry_commands.py  the commands that launch, train or do harm, as the script finds them
batch_script.py  directives of schedulers and manifests of Kubernetes
confine.py       what else the kernel forbids the script
flags.py         --prism-allow-writes
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags", launcher="launcher")
