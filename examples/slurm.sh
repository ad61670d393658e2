#!/bin/bash
#SBATCH --job-name=prism
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-task=1
#SBATCH --time=00:20:00

# Runs two ranks of a job of 1,024 GPUs on two GPUs of one node, every other rank is virtual:
#
#     sbatch examples/slurm.sh pretrain_gpt.py <the job's flags>
#     WORLD=4096 RANKS=0,3840 sbatch examples/slurm.sh pretrain_gpt.py <the job's flags>
#
# Every task of the step is one rank of RANKS, in their order; groups with both of them communicate.
set -euo pipefail

: "${WORLD:=1024}" "${RANKS:=0,768}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"

srun --kill-on-bad-exit=1 python "$@" \
  --prism-emulate --prism-world-size "$WORLD" --prism-ranks "$RANKS" \
  --prism-out "prism-$SLURM_JOB_ID"
