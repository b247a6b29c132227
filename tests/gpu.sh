#!/usr/bin/env bash
# What needs a GPU, in under 10 minutes on one H200: the CUDA-only tests, a 44m drift run, the benchmark. Prints one page;
# the logs stay in OUT (out/gpu). Installs nothing: torch, numpy, matplotlib and pytest must be there.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-out/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
echo "$($python -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)')"

echo "== compiled equals eager, bf16 is near fp32, no step waits for the device, torchrun with one process"
timeout 150 $python -m pytest -q -k cuda --durations=3 tests/test_bench.py >"$out/tests.log" 2>&1
grep -E "^FAILED|^ERROR|^E  |passed|failed|error" "$out/tests.log" | tail -n 12

echo "== drift, looped_gpt 44m, 300 steps on python-docs: mean ||H_4|| must grow with the rmsnorm readout, not with the penalty"
for penalty in 0 0.01; do
    timeout 60 $python train.py looped_gpt --preset=44m --dataset=python-docs --max_steps=300 --eval_interval=100 \
        --eval_batches=4 --log_interval=50 --norm_penalty=$penalty --data_dir="$out/data" --out_dir="$out/drift-$penalty" \
        --overwrite >"$out/drift-$penalty.log" 2>&1 || tail -n 2 "$out/drift-$penalty.log"
    echo "norm_penalty $penalty: $(grep -E 'val .*val_final_norm|validation loss' "$out/drift-$penalty.log" | tail -n 1)"
    grep -E "^step .*300/300" "$out/drift-$penalty.log" | tail -n 1
done

echo "== benchmark"
timeout 290 $python tests/bench.py --device=cuda --minutes=3.5 --data_dir="$out/data" --out="$out/bench.json" 2>"$out/bench.log"
rm -rf "$out"/data "$out"/drift-*/*.pt  # large, and of no further use
