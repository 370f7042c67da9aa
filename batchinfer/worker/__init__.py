"""`batchinfer worker`: sends rows through an engine in one stream, and writes finished rows to storage meanwhile."""
