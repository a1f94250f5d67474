"""A real instruct model and random checkpoints for machines without a hub or a GPU."""
