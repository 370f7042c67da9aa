"""`batchinfer split`: turns data sets into JSON Lines chunks and writes one manifest for each worker."""
