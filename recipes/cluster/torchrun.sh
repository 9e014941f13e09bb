#!/bin/bash
# Trains on 8 nodes of 8 GPUs. To be started on each node, with its number from 0 to 7 and the address of node 0:
#
#   GLOO_SOCKET_IFNAME=ib0 recipes/cluster/torchrun.sh NUMBER ADDRESS [options of hanayo fit]

set -euo pipefail

node=${1:?the number of this node, 0 to 7}
address=${2:?the address of node 0}
shift 2

: "${GLOO_SOCKET_IFNAME:?set it to the network interface between the nodes, such as ib0 or eth0}"
export GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

torchrun --nnodes=8 --nproc-per-node=8 --node-rank="$node" --master-addr="$address" --master-port=29500 \
    --max-restarts=3 -m lightning_hanayo fit \
    --config recipes/gpt/wave.yaml --config recipes/cluster/gpus64.yaml "$@"
