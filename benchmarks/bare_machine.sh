#!/usr/bin/env bash
# Half an hour on a machine that has jax and little else, in three commands of at most ten minutes each:
#
#     bash benchmarks/bare_machine.sh 1|2|3 OUT [FOLDER]
#
# FOLDER has the rows of earlier commands; they are copied to OUT first. Needs .wheels (benchmarks/wheels.py).
set -euo pipefail
cd "$(dirname "$0")/.."
number=$1 out=$2 earlier=${3:-}
python3 -m pip install -q --no-index --no-deps --target /tmp/nagjax-site .wheels/*.whl
export PYTHONPATH=/tmp/nagjax-site NAGJAX_COMMIT=$(cat .wheels/COMMIT) PYTHONUNBUFFERED=1
mkdir -p "$out"
if [ -n "$earlier" ]; then cp "$earlier"/*.jsonl "$out"/ || true; fi  # none is no reason to stop here

measure() { python3 benchmarks/device.py --part "$1" --minutes "$2" --out "$out" --scratch /tmp/nagjax-scratch || true; }

case $number in
1) measure values 2.5; measure steps 5.5 ;;
2) measure kernels 5; measure attention 1; measure profile 1.5 ;;
3) measure training 5; measure mod 3 ;;
*) echo "$number: give 1, 2 or 3" >&2; exit 2 ;;
esac
