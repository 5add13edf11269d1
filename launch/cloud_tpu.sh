#!/usr/bin/env bash
# Trains on a Cloud TPU slice asked for as a queued resource: waits for it, installs nagjax on every host, trains.
# Run it again after a preemption: it asks for a new slice, and the run goes on from its last checkpoint.
set -euo pipefail

PROJECT=${PROJECT:?the Google Cloud project}
ZONE=${ZONE:-us-west4-a}
TYPE=${TYPE:-v5litepod-16}                      # accelerator type
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}         # software version that goes with the type
NAME=${NAME:-nagjax}
CAPACITY=${CAPACITY---spot}                     # --spot, --reserved, or "" for on demand
SOURCE=${SOURCE:?what pip installs: a git+https URL, or file:///mnt/nagjax/NAME.whl, a wheel in the bucket}
CONSTRAINTS=${CONSTRAINTS:-}                    # constraints.txt of that version, as a URL or under /mnt/nagjax
BUCKET=${BUCKET:?a bucket with hierarchical namespace, mounted on every host: checkpoints and the corpus}
STEPS=${STEPS:-55000}                           # of 64 x 2048 tokens: 7.2 billion, 20 for each parameter
OPTIONS=${OPTIONS:---preset 350M --remat block --batch 64 --mesh.fsdp 16 \
  --data.path /mnt/nagjax/corpus --out /mnt/nagjax/runs/nag}
OPTIONS=${OPTIONS//$'\n'/ }                      # one line of the command below
BUCKET=${BUCKET#gs://}

tpus() { gcloud compute tpus "$@" --project "$PROJECT" --zone "$ZONE"; }

state() { tpus queued-resources describe "$NAME" --format 'value(state.state)' 2>/dev/null || true; }

is() { case " $1 " in *" $2 "*) ;; *) return 1 ;; esac; }  # whether the first, several words, has the second

while is "SUSPENDING DELETING" "$(state)"; do sleep 30; done  # just after a preemption
case "$(state)" in
  SUSPENDED | FAILED) tpus queued-resources delete "$NAME" --force --quiet ;;
esac
have=$(tpus tpu-vm describe "$NAME" --format 'value(acceleratorType.basename())' 2>/dev/null || true)
if [ -n "$have" ] && [ "$have" != "$TYPE" ]; then
  echo "$NAME is a $have, not a $TYPE: delete it first, or give another NAME" >&2
  exit 1
fi
if [ -z "$(state)" ]; then
  # shellcheck disable=SC2086
  tpus queued-resources create "$NAME" --node-id "$NAME" --accelerator-type "$TYPE" --runtime-version "$RUNTIME" $CAPACITY
fi
silent=0
until now=$(state); [ "$now" = ACTIVE ]; do
  [ -n "$now" ] && silent=0 || silent=$((silent + 1))  # no answer: the network, or somebody has deleted it
  if [ $silent = 10 ] || is "FAILED SUSPENDED SUSPENDING DELETING" "$now"; then
    echo "the queued resource is ${now:-gone}" >&2
    exit 1
  fi
  sleep 30
done

# The same command on every host: they find each other through the slice's own metadata. It is set up on each start.
# gcloud runs it once more where ssh breaks off, while the first one trains on: the lock lets in one.
tpus tpu-vm ssh "$NAME" --worker all --command "
  set -e
  command -v gcsfuse >/dev/null || { echo 'install gcsfuse on the hosts, or mount another shared file system' >&2; exit 1; }
  if ! mountpoint -q /mnt/nagjax; then  # once it is mounted, root may not look into it
    sudo mkdir -p /mnt/nagjax && sudo chown \$USER /mnt/nagjax
    gcsfuse --metadata-cache-ttl-secs 10 $BUCKET /mnt/nagjax  # on large machines it would never look again
  fi
  exec 9>~/.nagjax.lock
  flock -n 9 || { echo 'a training still runs on this host: stop it first' >&2; exit 1; }
  if ! test -x ~/nagjax/bin/python; then
    command -v python3.12 >/dev/null || { sudo add-apt-repository -y ppa:deadsnakes/ppa; sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.12-venv; }
    python3.12 -m venv ~/nagjax
  fi
  ~/nagjax/bin/pip install -q ${CONSTRAINTS:+-c $CONSTRAINTS} 'nagjax[tpu] @ $SOURCE'
  ~/nagjax/bin/pip install -q --force-reinstall --no-deps 'nagjax @ $SOURCE'  # new code has no new version
  exec ~/nagjax/bin/nagjax train $OPTIONS --steps $STEPS"
