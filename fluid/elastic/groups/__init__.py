"""Groups of processes that exchange gradients: torch.distributed, Horovod, through the host; and how they meet."""
