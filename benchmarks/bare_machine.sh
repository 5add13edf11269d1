#!/usr/bin/env bash
# Half an hour on a machine that has jax and little else, in three commands:
#
#     bash benchmarks/bare_machine.sh 1|2|3 OUT [FOLDER [MINUTES]]
#
# FOLDER has the rows of earlier commands; they are copied to OUT first ("" for none, or for those that a command on this
# machine has left in /tmp/nagjax-rows). MINUTES is what a command may take in all where it is less than 8.3. Needs .wheels
# (benchmarks/wheels.py).
set -euo pipefail
cd "$(dirname "$0")/.."
number=$1 out=$2 earlier=${3:-} minutes=${4:-8.3}
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/nagjax-site .wheels/*.whl
NAGJAX_COMMIT=$(cat .wheels/COMMIT)
export NAGJAX_COMMIT PYTHONPATH=/tmp/nagjax-site PYTHONUNBUFFERED=1
kept=${NAGJAX_ROWS:-/tmp/nagjax-rows}
mkdir -p "$out" "$kept"
cp "$kept"/*.jsonl "$out"/ 2>/dev/null || true
trap 'cp "$out"/*.jsonl "$kept"/ 2>/dev/null || true' EXIT
if [ -n "$earlier" ]; then cp "$earlier"/*.jsonl "$out"/ || true; fi  # none is no reason to stop here

measure() {
    local share
    share=$(awk "BEGIN { print $2 * $minutes / 8.3 }")
    python3 benchmarks/device.py --part "$1" --minutes "$share" --out "$out" --scratch /tmp/nagjax-scratch || true
}

case $number in  # together a minute less than a command takes: parts start, and their last cases end, in the rest
1) python3 -m benchmarks.parts.check; measure values 2; measure steps 5.2 ;;
2) measure kernels 4.7; measure attention 0.7; measure profile 1.3 ;;
3) measure mod 2.6; measure training 4.5 ;;
*) echo "$number: give 1, 2 or 3" >&2; exit 2 ;;
esac
