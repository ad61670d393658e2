"""Arguments of the real jobs that emulation is held against, by number of GPUs."""

NUM_RANKS = 4  # of ``CONFIGS`` and ``JOBS``
COMMON = """
--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32
--lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16
--use-distributed-optimizer --no-gradient-accumulation-fusion --eval-iters 0 --eval-interval 1000
--log-interval 1 --attention-dropout 0 --hidden-dropout 0 --distributed-timeout-minutes 3
"""
LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
)
TE = "--transformer-impl transformer_engine"
MOE = """
--num-layers 8 --hidden-size 2048 --ffn-hidden-size 4096 --num-attention-heads 16
--num-query-groups 4 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 4096
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--overlap-grad-reduce --overlap-param-gather
"""
CONFIGS = {
    "tp2pp2": f"{LOCAL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "pp4": f"{LOCAL} --pipeline-model-parallel-size 4",
    "dp4ov": f"{LOCAL} --num-layers 8 --overlap-grad-reduce --overlap-param-gather",
    "te_tp4sp": f"{TE} --tensor-model-parallel-size 4 --sequence-parallel",
    "te_tp2pp2vp2": f"{TE} --tensor-model-parallel-size 2 --sequence-parallel"
    " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
    "te_moe_ep4": f"{TE} {MOE}",
}
LLAMA_7B = """
--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 32
--ffn-hidden-size 11008 --seq-length 4096 --max-position-embeddings 4096
"""
JOBS = {
    **CONFIGS,
    "llama7b_tp4_mb1": f"{TE} {LLAMA_7B} --tensor-model-parallel-size 4 --global-batch-size 8",
    "llama7b_tp4_mb2": f"{TE} {LLAMA_7B} --tensor-model-parallel-size 4 --micro-batch-size 2"
    " --global-batch-size 16",
    "llama7b_dp2tp2": f"{TE} {LLAMA_7B} --tensor-model-parallel-size 2 --global-batch-size 8",
}
SP, PP2 = "--sequence-parallel", "--pipeline-model-parallel-size 2"
LLAMA3_8B = """
--num-layers 32 --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192
--rotary-base 500000 --global-batch-size 16
"""
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
JOBS8 = {
    "tp2pp2dp2vp2ov": f"{TE} --tensor-model-parallel-size 2 {SP} {PP2} {OVERLAP}"
    " --num-layers-per-virtual-pipeline-stage 4",
    "tp4pp2": f"{TE} --tensor-model-parallel-size 4 {SP} {PP2}",
    "tp8": f"{TE} --tensor-model-parallel-size 8 {SP}",
    "pp8vp2": f"{TE} --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 1",
    "dp8ov": f"{TE} --num-layers 8 {OVERLAP}",
    "moe_ep8": f"{TE} {MOE.replace('parallel-size 4', 'parallel-size 8')}",
    "cp2tp2dp2": f"{TE} --context-parallel-size 2 --tensor-model-parallel-size 2 {SP}",
    "cp2tp2dp2_fp8": f"{TE} --context-parallel-size 2 --tensor-model-parallel-size 2 {SP}"
    " --fp8-format hybrid",
    "llama3_8b_tp4dp2": f"{TE} {LLAMA3_8B} --tensor-model-parallel-size 4 {SP} {OVERLAP}",
}
TWO = "--tensor-model-parallel-size 2"
WIDE = """
--num-layers 6 --num-query-groups 32 --seq-length 8192 --max-position-embeddings 8192
--micro-batch-size 2 --global-batch-size 8
"""
WIDE_MOE = """
--num-layers 4 --num-experts 8 --moe-ffn-hidden-size 8192 --seq-length 4096
--max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 32
"""
_LONG = "--seq-length 16384 --max-position-embeddings 16384 --global-batch-size 4"
HOT2 = {  # of two H100: six at their power limit, two that wait for Python
    "hot_tp2sp": f"{TE} {TWO} {SP} --num-layers 6 --hidden-size 5120 --num-attention-heads 40"
    " --ffn-hidden-size 13824 --seq-length 4096 --max-position-embeddings 4096"
    " --micro-batch-size 2 --global-batch-size 16 --vocab-size 64000",
    "hot_tp2sp_long": f"{TE} {TWO} {SP} --num-layers 7 --hidden-size 3584 {_LONG}"
    " --num-attention-heads 28 --num-query-groups 4 --ffn-hidden-size 18944 --vocab-size 96000",
    "hot_pp2": f"{TE} {PP2} --num-layers 12 --hidden-size 3072 --num-attention-heads 24"
    " --ffn-hidden-size 9216 --seq-length 4096 --max-position-embeddings 4096"
    " --num-layers-per-virtual-pipeline-stage 3 --micro-batch-size 2 --global-batch-size 24",
    "hot_dp2_fp8": f"{TE} {OVERLAP} --num-layers 4 --hidden-size 4608 --num-attention-heads 36"
    " --num-query-groups 12 --ffn-hidden-size 12288 --seq-length 4096 --max-position-embeddings"
    " 4096 --micro-batch-size 2 --global-batch-size 16 --fp8-format hybrid",
    "hot_cp2": f"{TE} --context-parallel-size 2 --num-layers 6 --hidden-size 3072"
    f" --num-attention-heads 24 --ffn-hidden-size 8192 {_LONG}",
    "hot_cp2_a2a": f"{TE} --context-parallel-size 2 --cp-comm-type a2a --num-layers 6"
    f" --hidden-size 3072 --num-attention-heads 24 --ffn-hidden-size 8192 {_LONG}",
    "python_dp2_gelu": f"{TE} {OVERLAP} --num-layers 16 --hidden-size 1536"
    " --num-attention-heads 16 --ffn-hidden-size 6144 --seq-length 1024"
    " --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 32"
    " --attention-dropout 0.1 --hidden-dropout 0.1",
    "python_moe": f"{TE} {MOE.replace('parallel-size 4', 'parallel-size 2')} --num-layers 6"
    " --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1408 --seq-length 2048"
    " --global-batch-size 16",
}
UNSEEN2 = {  # of two GPUs, by name only: chosen before anything of the kind was run
    # experts as of DeepSeek's small models: a shared one, many small ones, a dense first layer
    "unseen_moe_shared": f"{TE} {OVERLAP} --num-layers 6 --hidden-size 2048"
    " --num-attention-heads 16 --num-query-groups 4 --ffn-hidden-size 8192 --num-experts 32"
    " --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816"
    " --moe-layer-freq ([0]*1+[1]*5) --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-permute-fusion"
    " --expert-model-parallel-size 2 --seq-length 4096 --max-position-embeddings 4096"
    " --global-batch-size 16 --vocab-size 102400",
    # experts and tensor parallelism, whose tokens are split and gathered
    "unseen_moe_tp2": f"{TE} {TWO} {SP} --num-layers 8 --hidden-size 2560 --num-attention-heads 20"
    " --num-query-groups 4 --ffn-hidden-size 6912 --num-experts 8 --moe-router-topk 2"
    " --moe-ffn-hidden-size 3456 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --expert-tensor-parallel-size 2 --seq-length 4096 --max-position-embeddings 4096"
    " --global-batch-size 16 --vocab-size 64000",
    "unseen_pp2": f"{TE} {PP2} --num-layers 20 --hidden-size 2560 --num-attention-heads 20"
    " --num-query-groups 20 --ffn-hidden-size 6912 --qk-layernorm --seq-length 4096"
    " --max-position-embeddings 4096 --global-batch-size 16 --vocab-size 151936",
    "unseen_dp2": f"{TE} {OVERLAP} --num-layers 14 --hidden-size 2304 --num-attention-heads 18"
    " --num-query-groups 6 --ffn-hidden-size 6144 --seq-length 4096 --max-position-embeddings 4096"
    " --micro-batch-size 2 --global-batch-size 16 --vocab-size 50304",
    "unseen_tp2sp_full": f"{TE} {TWO} {SP} --num-layers 16 --hidden-size 3584"
    " --num-attention-heads 28 --num-query-groups 4 --ffn-hidden-size 14336"
    " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    " --seq-length 8192 --max-position-embeddings 8192 --global-batch-size 8 --vocab-size 152064",
}
MORE = {  # context parallelism and FP8: by name only, none of the nine jobs
    "te_cp2tp2": f"{TE} --context-parallel-size 2 {TWO} {SP}",
    "te_cp2tp2_fp8": f"{TE} --context-parallel-size 2 {TWO} {SP} --fp8-format hybrid",
    "te_cp2": f"{TE} --context-parallel-size 2",
    "te_cp2_fp8": f"{TE} --context-parallel-size 2 --fp8-format hybrid",
    # of two GPUs of 80 GB, twice side by side, and bound by them
    **{f"te_cp2_{kind}": f"{TE} {WIDE} --context-parallel-size 2 --cp-comm-type {kind}"
       for kind in ("p2p", "a2a", "all_gather")},
    "te_tp2sp_dropout": f"{TE} {WIDE} {TWO} {SP} --attention-dropout 0.1 --hidden-dropout 0.1",
    **HOT2,
    **UNSEEN2,
    "te_moe_ep2_wide": f"{TE} {MOE.replace('parallel-size 4', 'parallel-size 2')} {WIDE_MOE}",
}  # fmt: skip
JOBS2 = {  # what two GPUs can say about the same effects
    "tp2": f"{LOCAL} {TWO}",
    "pp2": f"{LOCAL} {PP2}",
    "dp2ov": f"{LOCAL} --num-layers 8 {OVERLAP}",
    "te_tp2sp": f"{TE} {TWO} {SP}",
    "te_pp2vp2": f"{TE} {PP2} --num-layers-per-virtual-pipeline-stage 4",
    "te_moe_ep2": f"{TE} {MOE.replace('parallel-size 4', 'parallel-size 2')}",
    "llama7b_tp2": f"{TE} {LLAMA_7B} {TWO} --num-layers 16 --global-batch-size 8",
}
EVERY = {2: JOBS2, 4: JOBS, 8: JOBS8}  # by GPUs
