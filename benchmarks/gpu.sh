#!/bin/sh
# Everything that needs a GPU, in one command: the tests of the operators on it, then all benchmarks. Results go to benchmarks/results,
# or to the folder given. The package need not be installed.
#   benchmarks/gpu.sh [FOLDER]
set -eu
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results}
python=${PYTHON:-python3}
export PYTHONPATH=src PWLU_EAGER="${PWLU_EAGER-compiled}"  # not what the first process on a machine has
"$python" -m pwlu info
"$python" -m pytest -q --device cuda tests/kernels/test_kernels.py tests/ops/test_ops.py tests/kernels/test_cuda_kernel.py tests/kernels/test_cuda_knots.py tests/kernels/test_cuda_rule.py tests/kernels/test_per_sample.py \
  tests/deploy/test_fuse.py tests/kernels/test_eager.py tests/kernels/test_norm_ops.py tests/units
"$python" tests/torture/torture.py --device cuda --models 0 --kills 0
"$python" benchmarks/op.py --device cuda --output "$folder/op-cuda.csv"
"$python" benchmarks/overhead.py --device cuda --output "$folder/overhead-cuda.csv"
"$python" benchmarks/model.py --device cuda --output "$folder/model-cuda.csv"
"$python" benchmarks/model.py training --device cuda --trained mobilenetv2_100 --modes eager \
  --kinds pwlu dynamic_pwlu dyrelu metaacon se_relu --output "$folder/dynamic-cuda.csv"
"$python" benchmarks/detection.py --device cuda --output "$folder/detection-cuda.csv"
"$python" benchmarks/learning_rule.py --device cuda --output "$folder/learning-rule-cuda.csv"
"$python" benchmarks/norm.py --device cuda --output "$folder/norm-cuda.csv"
