"""What keeps weights beside the tensors of a model: gathered copies of FSDP2, master weights of ZeRO."""
