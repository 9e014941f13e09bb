#!/bin/bash
# Trains on 8 nodes of 8 GPUs under SLURM:
#
#   GLOO_SOCKET_IFNAME=ib0 sbatch recipes/cluster/slurm.sh [options of hanayo fit]

#SBATCH --job-name=hanayo
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@180
#SBATCH --requeue

set -euo pipefail

: "${GLOO_SOCKET_IFNAME:?set it to the network interface between the nodes, such as ib0 or eth0}"
export GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

srun hanayo fit --config recipes/gpt/wave.yaml --config recipes/cluster/gpus64.yaml "$@"
