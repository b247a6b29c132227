#!/usr/bin/env bash
# What needs a GPU, in under 10 minutes on one H200: the CUDA-only tests, a 44m drift run, the benchmark as far as the time
# goes. Prints one page; logs and JSONs stay in OUT (out/gpu). Needs torch, numpy, matplotlib and pytest, and no network.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-out/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
$python -c 'import sys, torch
print(torch.cuda.get_device_name(), "torch", torch.__version__) if torch.cuda.is_available() else sys.exit("no CUDA device")' || exit 1

echo "== compiled equals eager, bf16 is near fp32, no step waits for the device, torchrun with one process"
timeout 150 $python -m pytest -q -k cuda tests/test_bench.py >"$out/tests.log" 2>&1
grep -E "^FAILED|^ERROR|^E  |passed|failed|error" "$out/tests.log" | cut -c1-150 | tail -n 12

echo "== looped_gpt 44m, 300 steps on python-docs: the norm must grow with the rmsnorm readout, and not with the penalty"
for penalty in 0.0 0.01; do
    timeout 35 $python train.py looped_gpt --preset=44m --dataset=python-docs --max_steps=300 --eval_interval=150 \
        --eval_batches=4 --norm_penalty=$penalty --data_dir="$out/data" --out_dir="$out/drift-$penalty" --overwrite \
        >"$out/drift-$penalty.log" 2>&1
    echo "penalty $penalty: $(grep '^step' "$out/drift-$penalty.log" | tail -n 1)"
    grep -E "^validation loss|error" "$out/drift-$penalty.log"
done

echo "== benchmark; alone and longer: python tests/bench.py --device=cuda"
timeout 210 $python tests/bench.py --device=cuda --only=matmul,training --minutes=2.5 --data_dir="$out/data" \
    --out="$out/bench-1.json" 2>"$out/bench-1.log"
timeout 150 $python tests/bench.py --device=cuda --only=stars,decoding,growth,data --minutes=1.5 --data_dir="$out/data" \
    --out="$out/bench-2.json" 2>"$out/bench-2.log"
rm -rf "$out/data" "$out"/drift-*/*.pt  # large, and of no further use
