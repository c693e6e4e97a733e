"""What is measured and predicted of trials: needs, paces, overheads by profile key."""
