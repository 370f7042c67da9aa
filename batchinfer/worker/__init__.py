"""`batchinfer worker`: one stream of rows through the engine, finished rows to storage beside it."""
