#!/usr/bin/env bash
# Trains on a GKE cluster through xpk, on one TPU slice or several; restarted by itself after a preemption.
set -euo pipefail

PROJECT=${PROJECT:?the Google Cloud project}
ZONE=${ZONE:-us-west4-a}
CLUSTER=${CLUSTER:?the cluster, made with xpk cluster create}
TYPE=${TYPE:-v5litepod-16}          # of one slice
SLICES=${SLICES:-1}
RESTARTS=${RESTARTS:-100}
GRACE=${GRACE:-120}                 # seconds between SIGTERM and SIGKILL: a save must fit
NAME=${NAME:-nagjax}
IMAGE=${IMAGE:?a container image with nagjax[tpu] in it}
STEPS=${STEPS:-55000}               # of 64 x 2048 tokens: 7.2 billion, 20 for each parameter
OPTIONS=${OPTIONS:---preset 350M --remat block --batch 64 --mesh.fsdp 16 \
  --data.path /mnt/nagjax/corpus --out /mnt/nagjax/runs/nag}
# /mnt/nagjax: a volume that all pods share, attached to the cluster with xpk storage attach

xpk workload create \
  --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER" --workload "$NAME" \
  --tpu-type "$TYPE" --num-slices "$SLICES" --docker-image "$IMAGE" \
  --max-restarts "$RESTARTS" --termination-grace-period-seconds "$GRACE" \
  --command "exec nagjax train $OPTIONS --steps $STEPS"
