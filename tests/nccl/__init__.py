"""NCCL's rules, checked on a machine without a GPU: see docs/nccl.rst for what is modelled and what is not."""
