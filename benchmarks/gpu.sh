#!/bin/sh
# Everything that needs a GPU, in one command: all tests on it, then all benchmarks. Results go to benchmarks/results,
# or to the folder given. The package need not be installed.
#   benchmarks/gpu.sh [FOLDER]
set -eu
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results}
python=${PYTHON:-python3}
export PYTHONPATH=src PWLU_EAGER="${PWLU_EAGER-compiled}"  # not what the first process on a machine has
"$python" -m pwlu info
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "$python" -m pytest -q --device cuda -m "not slow" -n 8 --dist worksteal -p no:benchmark
"$python" tests/torture/torture.py --device cuda --models 0 --kills 0
"$python" benchmarks/op.py --device cuda --nonuniform --output "$folder/op-cuda.csv"
"$python" benchmarks/overhead.py --device cuda --output "$folder/overhead-cuda.csv"
"$python" benchmarks/model.py --device cuda --output "$folder/model-cuda.csv"
"$python" benchmarks/model.py training --device cuda --trained mobilenetv2_100 --modes eager \
  --kinds pwlu dynamic_pwlu dyrelu metaacon se_relu --output "$folder/dynamic-cuda.csv"
"$python" benchmarks/detection.py --device cuda --output "$folder/detection-cuda.csv"
"$python" benchmarks/recipes.py --jobs 1 16 --mps --output "$folder/recipes-cuda.csv"
"$python" benchmarks/learning_rule.py --device cuda --output "$folder/learning-rule-cuda.csv"
networks="resnet50 resnet18 mobilenetv2_100 efficientnet_b0"
"$python" benchmarks/model.py training --device cuda --trained $networks --modes eager --kinds silu pwlu "pwlu, norms fused" \
  --output "$folder/training-norms-cuda.csv"
"$python" benchmarks/model.py training --device cuda --trained $networks --modes compiled --kinds "own activation" \
  --output "$folder/training-compiled-cuda.csv"
"$python" benchmarks/norms_figure.py --input "$folder/training-norms-cuda.csv" "$folder/training-compiled-cuda.csv"
"$python" benchmarks/norm.py --device cuda --output "$folder/norm-cuda.csv"
