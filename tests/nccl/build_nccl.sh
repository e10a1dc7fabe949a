#!/bin/sh
# Build NCCL for the GPU of this machine, from sources that were carried here (https://github.com/NVIDIA/nccl). From 2.30
# it takes several ranks on one GPU, which some tests marked gpu want. It needs nvcc, g++ and make, and some minutes:
#   sh tests/nccl/build_nccl.sh nccl-2.30.7-1.tar.gz && LD_PRELOAD=$PWD/.gpu/nccl/lib/libnccl.so.2 make gpu
set -eu
[ -f "${1-}" ] || { echo "usage: sh tests/nccl/build_nccl.sh SOURCES.tar.gz" >&2; exit 2; }
command -v nvcc >/dev/null || { echo "nvcc is missing: put the CUDA toolkit's bin on PATH" >&2; exit 1; }
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
tar -xf "$1" -C "$sources" --strip-components=1
sm=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
make -C "$sources" -j "$(nproc)" src.build BUILDDIR="$PWD/.gpu/nccl" CUDA_HOME="$(dirname "$(dirname "$(command -v nvcc)")")" \
  NVCC_GENCODE="-gencode=arch=compute_$sm,code=sm_$sm"
ls -l .gpu/nccl/lib/libnccl.so.2
