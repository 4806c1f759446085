#!/usr/bin/env bash
# Starts the ranks of this host: the same line on every host, within a minute of each other.
#
#   bash examples/cluster/torchrun.sh 10.0.0.1 2 4 -m examples.bytegpt checkpoint.folder=/shared/run --resume auto
#
#   1st argument   address of one of the hosts, the head, as the others reach it
#   2nd argument   number of hosts
#   3rd argument   ranks on this host
#   the others     what torchrun runs
#
# Variables: RENDEZVOUS_PORT (29400) at the head, RUN_ID (the same on all hosts), MAX_RESTARTS (0), and GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME where ranks shall not talk over the interface that leads to the head.
set -euo pipefail

head=$1 num_hosts=$2 num_local_ranks=$3
shift 3

# The address that the head sees of this host, and its interface. On the head itself both addresses are the same. So nothing
# depends on what the name of a host resolves to, which is often 127.0.1.1 on the host itself.
address=$(ip -4 -o route get "$head" | sed -n 's/.* src \([0-9.]*\).*/\1/p')
interface=$(ip -4 -o address show to "$address" | cut -d ' ' -f 2)
is_head=$([ "$address" = "$head" ] && echo 1 || echo 0)

export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else init_process_group hangs after a restart (torch 2.13)

echo "$(hostname): $num_local_ranks ranks at $address ($interface), head $head ($([ "$is_head" = 1 ] && echo here || echo there))" >&2
exec torchrun \
  --nnodes "$num_hosts" --nproc-per-node "$num_local_ranks" --max-restarts "${MAX_RESTARTS:-0}" \
  --rdzv-backend c10d --rdzv-id "${RUN_ID:-run}" --rdzv-endpoint "$head:${RENDEZVOUS_PORT:-29400}" \
  --rdzv-conf "is_host=$is_head" --local-addr "$address" \
  "$@"
