"""`batchinfer split`: data sets into JSON Lines chunks and one manifest for each worker."""
