"""`batchinfer run`: split, generate and collect as one command on one machine."""
