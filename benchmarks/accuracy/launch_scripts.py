"""How many launch scripts, as people write them, are answered from the file as it is.

python -m benchmarks.accuracy.launch_scripts PRETRAIN_GPT [--capture] [NAME …]

The scripts have the structure of public ones (launchers, schedulers, variables, helper lines), in
words of our own, around one small model.  Without --capture: is the job found, and its world right?
With it the job is captured and replayed, too.  Prints a row a script: answered, or the obstacle.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

MODEL = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \\
 --max-position-embeddings 256 --bf16 --train-iters 500000 --lr 1e-4 --micro-batch-size 1 \\
 --global-batch-size 128 --eval-iters 10 --eval-interval 1000 --tensor-model-parallel-size 2"""
HUB = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B"
BPE = "--tokenizer-type GPT2BPETokenizer --vocab-file /data/vocab.json --merge-file /data/m.txt"
DATA = "--data-path 0.5 /data/a_text_document 0.5 /data/b_text_document --split 98,2,0"
SAVE = "--save /ckpt/run --load /ckpt/run --save-interval 500 --tensorboard-dir /ckpt/tb"
REST = f"{DATA} {SAVE} {HUB}"
HOSTS = """nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )
head=${nodes[0]}
ip=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')"""
# name: (line, ranks, script); S and M stand for the script of training and the model's arguments
SCRIPTS = {
    "Megatron-LM, examples/gpt3": ("bash train.sh /ckpt /tb /vocab /merge /data", 8, f"""
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8; NUM_NODES=1; NODE_RANK=0; MASTER_PORT=6000
ARGS=( --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_port $MASTER_PORT )
MODEL=( M )
torchrun ${{ARGS[@]}} S ${{MODEL[@]}} --data-path $5 {BPE} --save $1 --tensorboard-dir $2
"""),
    "Megatron-LM, examples/llama": ("bash train.sh", 8, f"""
CHECKPOINT=${{1:-"checkpoints/llama"}}; TOKENIZER_ARG=${{3:-"MOCK"}}
mkdir -p "$(dirname "$CHECKPOINT")"
if [[ "$TOKENIZER_ARG" == "MOCK" ]]; then D=( --mock-data --tokenizer-type NullTokenizer
 --vocab-size 128256 --tiktoken-pattern v2 --no-create-attention-mask-in-dataloader )
else D=( {DATA} ); fi
if [ ! -f "S" ]; then echo "no script"; exit 1; fi
torchrun --nproc_per_node 8 --nnodes 1 --node_rank ${{NODE_RANK:-0}} S M "${{D[@]}}" \\
 --save "$CHECKPOINT"
"""),
    "swiss-ai": ("sbatch train.sh", 64, f"""#SBATCH --nodes=16 --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --exclusive --output=logs/%x.out
set -x; ulimit -c 0
export MASTER_ADDR=$(hostname) WORLD_SIZE=$SLURM_NPROCS
rsync -a src/ /iopsstor/copy/
CMD="numactl --membind=0-3 python3 S M {REST} --use-mpi"
srun -lu --cpus-per-task $SLURM_CPUS_PER_TASK bash -c "RANK=\\$SLURM_PROCID $CMD"
"""),
    "OLCF Frontier": ("sbatch train.sh", 128, f"""#SBATCH -N 16
#SBATCH -q debug
source /sw/rocm/env.sh
GPUS=8; export MASTER_ADDR=$(hostname -i)
srun -N $SLURM_NNODES -n $((SLURM_NNODES*GPUS)) --ntasks-per-node=8 -c7 --gpu-bind=closest \\
 python3 -W ignore S M {REST} > log 2>&1
"""),
    "ALCF Polaris": ("qsub train.sh", 40, f"""#PBS -l select=10:system=polaris
#PBS -l walltime=1:00:00
cd "${{PBS_O_WORKDIR}}" || exit
NHOSTS=$(wc -l < "${{PBS_NODEFILE}}"); NGPU=4; NGPUS=$(( NHOSTS * NGPU ))
python3 -m pip install -e deps
mpiexec -n $NGPUS -ppn $NGPU --hostfile "${{PBS_NODEFILE}}" --genvall --cpu-bind depth -d 16 \\
 python3 S M {REST} |& tee out.log
"""),
    "NERSC Perlmutter": ("sbatch train.sh", 64, f"""#SBATCH --nodes 16 -C gpu
#SBATCH --gpus-per-node 4 --ntasks-per-node=4
module load pytorch
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun -l -u shifter --image=nersc/pytorch:24 --module gpu bash -c "
 source export_vars.sh
 python S M {REST}"
"""),
    "BigScience": ("sbatch train.sh", 64, f"""#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
set -e
source $HOME/start-env; git -C data add . && git -C data commit -m x && git -C data push
GPUS_PER_NODE=8; NNODES=$SLURM_NNODES; MASTER_ADDR=$(scontrol show hostnames | head -n 1)
export LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node $GPUS_PER_NODE \\
 --nnodes $NNODES --master_addr $MASTER_ADDR --master_port 6000"
export CMD="S M {DATA} {BPE}"
clear; srun bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt
"""),
    "LUMI": ("sbatch train.sh", 64, f"""#SBATCH --nodes=8 --ntasks-per-node=8
#SBATCH --gpus-per-node=mi250:8
rm -rf separate-logs; mkdir -p separate-logs; ln -f -s $SLURM_JOB_ID.out logs/latest.out
c="fe"; BIND="mask_cpu:0x${{c}}000000"
cat > launch.sh <<EOF
#!/bin/bash
export LOCAL_RANK=\\$SLURM_LOCALID
exec "\\$@"
EOF
srun --label --cpu-bind=$BIND singularity exec -B /scratch:/scratch -B "$PWD" img.sif \\
 bash ./launch.sh python S M {REST}
"""),
    "Megatron-DeepSpeed": ("bash train.sh", 16, f"""
DIR=`pwd`; DATETIME=`date +'date_%y-%m-%d'`; NW=2; NG=8
HOST=10.0.0.1; export NCCL_TREE_THRESHOLD=0
options="M {REST}"
run_cmd="NCCL_DEBUG=WARN deepspeed --num_nodes $NW --num_gpus $NG --master_addr $HOST S $options \
 &>> log_$DATETIME.log"
echo ${{run_cmd}}
eval ${{run_cmd}}
set +x
"""),
    "Pai-Megatron-Patch": ("env WORLD_SIZE=4 RANK=0 sh train.sh dlc 2", 32, f"""
ENV=$1; TP=$2
if [ $ENV = dsw ]; then NNODES=1; GPUS_PER_NODE=8
elif [ $ENV = dlc ]; then NNODES=${{WORLD_SIZE}}; NODE_RANK=${{RANK}}; GPUS_PER_NODE=8; fi
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK"
run_cmd="torchrun $DISTRIBUTED_ARGS S M {REST} --patch-tokenizer-type Qwen2Tokenizer"
echo ${{run_cmd}}
eval ${{run_cmd}}
"""),
    "ROCm": ("bash train.sh", 8, f"""
GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
[ $GPUS_PER_NODE -gt 0 ] || GPUS_PER_NODE=8
export GPU_MAX_HW_QUEUES=2
LOG=out.log; EXTRA="--no-masked-softmax-fusion"
if ! python3 tools/preprocess_data.py --input x; then exit 1; fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${{NNODES:-1}} S M $EXTRA {REST} |& tee $LOG
grep -Eo 'elapsed [^|]*' $LOG | sed -E 's/.*: //' > times.txt
python3 mean_log_value.py times.txt
"""),
    "AWS, parallel cluster": ("sbatch train.sh", 32, f"""#SBATCH --nodes=4 --exclusive
: "${{IMAGE:=/apps/megatron.sqsh}}"
declare -a ARGS=( --container-image $IMAGE --container-mounts /fsx:/fsx )
declare -a TORCHRUN=( --nproc_per_node=8 --nnodes=$SLURM_JOB_NUM_NODES --rdzv_id=$SLURM_JOB_ID
 --rdzv_backend=c10d --rdzv_endpoint=$(hostname) )
srun -l "${{ARGS[@]}}" python -m torch.distributed.run "${{TORCHRUN[@]}}" /workspace/S M {REST}
"""),
    "Azure": ("bash train.sh", 16, f"""
mpirun -np 16 --map-by ppr:8:node -hostfile hosts -mca plm_rsh_num_concurrent 8 \\
 -mca coll_hcoll_enable 0 -x NCCL_TOPO_FILE=/opt/topo.xml -x LD_LIBRARY_PATH --bind-to numa \\
 --allow-run-as-root numactl -N 0 python S M {REST}
"""),
    "Kubernetes, PyTorchJob": ("env PET_NNODES=4 PET_NPROC_PER_NODE=8 bash train.sh", 32, f"""
until getent hosts $MASTER_ADDR; do sleep 1; done
torchrun --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT S M {REST}
"""),
    "GKE, JobSet": ("env NNODES=2 GPUS_PER_NODE=8 bash train.sh", 16, f"""
export NODE_RANK=$JOB_COMPLETION_INDEX
gsutil cp gs://bucket/data /data; touch /tmp/started; sleep 30
for v in $(seq 0 1); do echo $v; done
OMP_NUM_THREADS=12 torchrun --nnodes=$NNODES --node_rank=$NODE_RANK \\
 --nproc_per_node=$GPUS_PER_NODE S M {REST} &
PID=$!
wait $PID
"""),
    "LLM-jp, ABCI": ("qsub train.sh", 16, f"""#PBS -l select=2:ngpus=8
#PBS -v RTYPE=rt_HF
source venv/bin/activate
NUM_GPU_PER_NODE=8; NODES=$(sort -u $PBS_NODEFILE | wc -l); NUM_GPUS=$((NODES*NUM_GPU_PER_NODE))
mkdir -p ./hostfile
while read -r line; do echo "${{line}} slots=8"; done < "$PBS_NODEFILE" > "hostfile/h_1"
mpirun -np $NUM_GPUS --npernode $NUM_GPU_PER_NODE -hostfile hostfile/h_1 -x MASTER_ADDR \\
 -bind-to none python S M {REST} --use-mpi
"""),
    "nsys": ("bash train.sh", 8, f"""
nsys profile -s none -t nvtx,cuda -o report --force-overwrite true \\
 --capture-range=cudaProfilerApi --capture-range-end=stop \\
 torchrun --nproc-per-node 8 S M {REST} --profile
"""),
    "docker on each host": ("bash train.sh", 16, f"""
for host in node1 node2; do
 ssh $host "docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v /data:/data \\
  nvcr.io/nvidia/pytorch:25.04-py3 bash -c 'torchrun --nnodes 2 --nproc-per-node 8 S M {REST}'" &
done
wait
"""),
    "pdsh": ("bash train.sh", 16, f"""
HOSTS=node1,node2
pdsh -R ssh -w $HOSTS "cd $PWD && torchrun --nnodes 2 --nproc-per-node 8 S M {REST}"
"""),
    "Jean Zay": ("sbatch train.sh", 32, f"""#SBATCH --ntasks=32
#SBATCH --ntasks-per-node=4 --gres=gpu:4
module purge; module load pytorch-gpu
set -x
srun python -u S M {REST}
"""),
    "IBM, LSF": ("bsub train.sh", 24, f"""#BSUB -nnodes 4
#BSUB -gpu "num=6"
export MASTER_ADDR=$(echo $LSB_HOSTS | cut -d' ' -f1)
torchrun --nnodes 4 --nproc-per-node 6 S M {REST}
"""),
    "experiment driver": ("python3 -m torch.distributed.run --nproc-per-node 4 S M", 4, ""),
    "several scripts": ("bash train.sh", 8, f"""
cat > env.sh <<EOF
export TP=2
EOF
. ./env.sh
cat > inner.sh <<'EOF'
exec torchrun --nproc_per_node $1 S M {REST}
EOF
chmod +x inner.sh; bash inner.sh 8
"""),
    "a sweep of sizes": ("bash train.sh", 8, f"""
for lr in 1e-4 2e-4 3e-4; do
 torchrun --nproc-per-node 8 S M {REST} --lr $lr
done
"""),
    "restart loop": ("bash train.sh", 8, f"""
while true; do
 torchrun --nproc-per-node 8 S M {REST} && break
 rm -rf /ckpt/run/tmp; sleep 60
done
"""),
    "a wrapper of torchrun": ("bash train.sh", 16, f"""
set -euo pipefail
wait_for() {{ for i in 1 2 3; do [ -f /tmp/ready ] && return 0; sleep 1; done; return 0; }}
run() {{ wait_for; python3 elastic_launcher.py --nproc-per-node 8 --nnodes 2 --node-rank \
 ${{NODE_RANK:-0}} --master-port 29500 -- python3 ./S M {REST} 2>&1 | tee log; }}
while true; do set +e; run; rc=$?; set -e; [ $rc -eq 0 ] && break; done
"""),
    "singularity under srun": ("sbatch train.sh", 16, f"""#SBATCH --nodes=4 --gres=gpu:4
#SBATCH --ntasks-per-node=1
set -eo pipefail; module load singularity
MASTER=$(getent hosts $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) | cut -f 1)
CMD="S M {REST}"
L="singularity exec --nv i.sif python -u -m torch.distributed.run --nproc-per-node 4 --tee 3"
srun --wait=60 bash -c "$L --nnodes $SLURM_NNODES --rdzv_endpoint $MASTER:1 \
 --node_rank \$SLURM_PROCID $CMD"
"""),
    "docker under srun": ("sbatch train.sh", 16, f"""#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --gres=gpu:8
if docker ps; then export RUN=docker; else exit 1; fi
srun bash -c 'docker stop $(docker ps -aq)'; srun bash -c 'rocm-smi'
$RUN pull rocm/megatron-lm
cat > in.sh <<'EOF'
GPUS=`python3 -c "import torch; print(torch.cuda.device_count())"`
[ "$GPUS" == 0 ] && exit 1
cmd="torchrun --nproc_per_node $GPUS --nnodes $SLURM_NNODES S M {REST} |& tee log"
eval $cmd
EOF
srun bash -c '$RUN run --rm --privileged rocm/megatron-lm bash -c "cd $PWD; bash in.sh | tee l"'
"""),
    "Grid Engine": ("qsub train.sh", 16, f"""#$ -l rt_AF=2
#$ -cwd
IP=$(/usr/sbin/ip a show dev bond0 | grep inet | cut -d " " -f 6)
cat $SGE_JOB_HOSTLIST > ./hostfile
mpirun -np $((8 * NHOSTS)) -npernode 8 --hostfile ./hostfile python S M {REST}
"""),
    "Ray": ("bash train.sh", 8, f"""
ray start --head --num-gpus 8
ray job submit --address http://127.0.0.1:8265 -- torchrun --nproc-per-node 8 S M {REST}
"""),
}  # fmt: skip


def answer(name, script, capture):
    """(ranks that were found, the obstacle, seconds) of one."""
    line, _, text = SCRIPTS[name]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:

        def filled(part):
            return part.replace("M ", f"{MODEL} ").replace("M\n", MODEL + "\n").replace(
                " S ", " pretrain_gpt.py ").replace("/S ", "/pretrain_gpt.py ").replace(
                '"S"', '"pretrain_gpt.py"').replace('"S ', '"pretrain_gpt.py ')  # fmt: skip

        pathlib.Path(place, "train.sh").write_text(filled(text))
        pathlib.Path(place, "pretrain_gpt.py").symlink_to(script)
        words = filled(line + " ").replace("\\\n", " ").split()
        command = [sys.executable, "-m", "megatron_prism"]
        command += ["replay", "--prism-tier", "meta", "--prism-ignore-unknown"] if capture else [
            "capture", "-o", "slices", "--prism-tier", "none"]  # fmt: skip
        run = subprocess.run([*command, *words], cwd=place, capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": str(script.parent)})  # fmt: skip
    said = run.stderr
    found = next((part for part in said.split("; ") if " ranks" in part and ": " in part), "")
    ranks = int(found.split()[0].replace(",", "")) if found.split() else None
    failed = run.returncode and (capture or "--prism-tier" not in said)
    last = [one for one in said.splitlines() if one.startswith("prism: error")]
    return ranks, (last or [said[-200:]])[0][:100] if failed else "", time.monotonic() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("script", type=pathlib.Path)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    good = 0
    for name in args.names or SCRIPTS:
        ranks, obstacle, seconds = answer(name, args.script.resolve(), args.capture)
        if not obstacle and ranks != SCRIPTS[name][1]:
            obstacle = f"{ranks} ranks, not {SCRIPTS[name][1]}"
        good += not obstacle
        print(f"{name:28} {obstacle or 'answered':70} {seconds:6.1f} s", flush=True)
    total = len(args.names or SCRIPTS)
    print(f"{good} of {total} answered")
    return good < total


if __name__ == "__main__":
    sys.exit(main())
