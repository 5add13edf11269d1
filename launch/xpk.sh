#!/usr/bin/env bash
# Trains on a GKE cluster through xpk, on one TPU slice or several; restarted by itself after a preemption. A pod that
# was asked to end by SIGTERM fails with 143, which restarts all: with 0, as nagjax ends, it would count as complete.
set -euo pipefail

PROJECT=${PROJECT:?the Google Cloud project}
ZONE=${ZONE:-us-west4-a}
CLUSTER=${CLUSTER:?the cluster, made with xpk cluster create}
TYPE=${TYPE:-v5litepod-16}          # of one slice
SLICES=${SLICES:-1}
RESTARTS=${RESTARTS:-100}
GRACE=${GRACE:-120}                 # seconds between SIGTERM and SIGKILL: a save must fit. On Spot nodes GKE gives 15,
                                    # unless the node pool extends them: set --save-minutes there
NAME=${NAME:-nagjax}
IMAGE=${IMAGE:?a container image with nagjax[tpu] in it}
STEPS=${STEPS:-55000}               # of 64 x 2048 tokens: 7.2 billion, 20 for each parameter
OPTIONS=${OPTIONS:---preset 350M --remat block --batch 64 --mesh.fsdp 16 \
  --data.path /mnt/nagjax/corpus --out /mnt/nagjax/runs/nag}
OPTIONS=${OPTIONS//$'\n'/ }          # xpk writes the command into a line of YAML
# /mnt/nagjax: a volume that all pods share, attached to the cluster with
#   xpk storage attach ... --mount-point /mnt/nagjax --readonly false --auto-mount true

xpk workload create \
  --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER" --workload "$NAME" \
  --tpu-type "$TYPE" --num-slices "$SLICES" --docker-image "$IMAGE" \
  --max-restarts "$RESTARTS" --restart-on-exit-codes 1,2 --termination-grace-period-seconds "$GRACE" \
  --command "t=0; trap 't=1; kill -TERM \$p' TERM; nagjax train $OPTIONS --steps $STEPS & p=\$!; wait \$p; c=\$?; \
    if [ \$t = 1 ]; then wait \$p; c=\$?; [ \$c != 0 ] || c=143; fi; exit \$c"
