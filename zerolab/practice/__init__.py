"""What really happens: ranks, meters and the four stages, on torch and torch.distributed."""
