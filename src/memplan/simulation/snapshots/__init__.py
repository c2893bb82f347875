"""Files of torch.cuda.memory snapshots, read and written."""
